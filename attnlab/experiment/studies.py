"""An experiment whose runs are the trials of sweeps: studies that are compared, in one report or several.

It is a folder whose `sweep.py` has `studies(size)`, which returns the sweeps' configs by report and study, such as
`{'recall': {'gla': sweep_config(...), 'mha': sweep_config(...)}}`. What comes of it are the pages
`results/SIZE/REPORT/index.html` with their figures and numbers, and the tables in `README.md`, between two comments.
"""

import json
import os
import pathlib
import time
from collections.abc import Mapping

from ml_collections import ConfigDict
from rich.console import Console

from attnlab import files
from attnlab.compare.report.comparison import Comparison, cells, headers
from attnlab.compare.report.contents import gather
from attnlab.compare.report.page import write_report
from attnlab.errors import UserError
from attnlab.experiment.runs import Experiment, Row, markdown, provenance, written
from attnlab.runs.record import read_record
from attnlab.sweep import launch
from attnlab.sweep.study import Study, create_study

Studies = Mapping[str, Mapping[str, ConfigDict]]

SECONDS = 'seconds.json'
"""How long the sweep of a study took, all its starts together, in its folder."""

MATCHED_BY, TOLERANCE = 'params', 0.01
"""What the models of the studies agree in."""


def run_studies(experiment: Experiment, workdirs: pathlib.Path, command: str, workers: int, console: Console) -> bool:
    """Runs the sweeps that are not finished, `workers` trials at once, and reports; returns whether all are finished.

    A study is kept in `workdirs/NAME/SIZE/REPORT/STUDY`, and goes on where it was stopped or killed. Raises `UserError`
    for a folder that holds a study of another sweep, and for a README without the two comments.
    """
    written((experiment.folder / 'README.md').read_text(), experiment.size, '')
    for folder, config in _folders(experiment, workdirs).items():
        study = create_study(folder, config)
        if not study.finished():
            console.print(f'{folder}: {study.sweep.trials} trials')
            _run(study, workers, console)
        if not study.finished():
            return False
    report_studies(experiment, workdirs, command, console)
    return True


def report_studies(experiment: Experiment, workdirs: pathlib.Path, command: str, console: Console) -> None:
    """Writes the pages and the tables of the README. Raises `UserError` where a study was not begun."""
    folders = _folders(experiment, workdirs)
    missing = [folder for folder in folders if not (folder / 'sweep.json').exists()]
    if missing:
        raise UserError(f'{missing[0]} is not a study yet: run the experiment first')
    tables = []
    for report in dict.fromkeys(folder.parent for folder in folders):
        out = experiment.folder / 'results' / experiment.size / report.name
        found = gather(
            [folder for folder in folders if folder.parent == report], out, by=MATCHED_BY, tolerance=TOLERANCE
        )
        write_report(found, out, console)
        tables.append(_table(report.name, found.comparison))
    made = provenance([_made(folder) for folder in folders], len(folders), command, 'studies')
    readme = experiment.folder / 'README.md'
    files.write(readme, written(readme.read_text(), experiment.size, '\n\n'.join([*tables, made])))


def _folders(experiment: Experiment, workdirs: pathlib.Path) -> dict[pathlib.Path, ConfigDict]:
    """The config of every study, by where it is kept."""
    root = workdirs / experiment.folder.name / experiment.size
    reports: Studies = experiment.studies()
    return {root / report / name: config for report, studies in reports.items() for name, config in studies.items()}


def _run(study: Study, workers: int, console: Console) -> None:
    began, path = time.perf_counter(), study.folder / SECONDS
    arguments = [f'--study={study.folder}', '--compilation_cache=~/.cache/attnlab/compiled']
    before = json.loads(path.read_text()) if path.exists() else 0.0
    launch.run_processes(study, arguments, launch.places(workers, [], launch.host_cores()), console)
    files.write(path, json.dumps(before + time.perf_counter() - began))


def _made(folder: pathlib.Path) -> Row:
    """What a study was made with, for `provenance`."""
    trial = next(path for path in sorted((folder / 'trials').iterdir()) if (path / 'run.json').exists())
    made = {**read_record(trial).facts, 'cores': os.cpu_count()}
    return {'made': made, 'seconds': json.loads((folder / SECONDS).read_text())}


def _table(report: str, found: Comparison) -> str:
    """The table of `attnlab compare`, under its head."""
    head = f'**{report}**: {found.metric}; {found.head}'
    return f'{head}\n\n{markdown([headers(found), *map(cells, found.rows)])}'
