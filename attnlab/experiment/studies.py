"""An experiment whose runs are the trials of sweeps: studies that are compared, in one report or several.

It is a folder whose `sweep.py` has `studies(size)`, which returns the sweeps' configs by report and study, such as
`{'recall': {'gla': sweep_config(...), 'mha': sweep_config(...)}}`, and whose `plot.py` has `figure(studies)`, of what
`results/SIZE.json` holds of each. Beside the studies, in `WORKDIRS/NAME/SIZE/pages/REPORT`, the page of each report is
written as `attnlab report` writes it.
"""

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict
from optuna.trial import TrialState
from rich.console import Console

from attnlab import files
from attnlab.compare.baselines import trivial_scores
from attnlab.compare.report.comparison import (
    Comparison,
    Point,
    StudyResult,
    ranked_metric,
    study_table,
    with_sentence,
)
from attnlab.compare.report.contents import StudyContents, gather
from attnlab.compare.report.page import write_report
from attnlab.errors import UserError, nearest
from attnlab.experiment.experiment import Experiment, module_of
from attnlab.experiment.results import (
    SECONDS,
    Measurements,
    kept_pictures,
    markdown,
    of_other_python,
    provenance,
    pythons_of,
    rounded,
    seconds_of,
    with_results,
    write_figure,
    write_readme,
    write_results,
    written_results,
)
from attnlab.experiment.runs import check_config
from attnlab.runs.record import read_record
from attnlab.sweep import launch
from attnlab.sweep.study import STATES, Parts, Study, create_study, read_study
from attnlab.sweep.sweep import read
from attnlab.sweep.trial import check_metric

Studies = Mapping[str, Mapping[str, ConfigDict]]

MATCHED_BY, TOLERANCE = 'params', 0.01
"""What the models of the studies agree in."""

ENDED = tuple(STATES.values())
"""States of trials whose points stand in the results."""

REPORTED = ('reasons', 'task')
"""What is kept of a comparison besides its studies; its sentence follows from them."""


def run_studies(experiment: Experiment, workdirs: pathlib.Path, command: str, workers: int, console: Console) -> bool:
    """Runs the sweeps that are not finished, `workers` trials at once, and reports; returns whether all are finished.

    A study is kept in `workdirs/NAME/SIZE/REPORT/STUDY`, and goes on where it was stopped or killed. Raises `UserError`
    for a folder that holds a study of another sweep, and before any runs for what `check_studies` refuses.
    """
    check_studies(experiment)
    for folder, config in _folders(experiment, workdirs).items():
        study = create_study(folder, config)
        if not _finished(study):
            console.print(f'{folder}: {study.sweep.trials} trials')
            _run(study, workers, console)
        if not _finished(study):
            console.print(f'{folder} is not finished; the same command goes on with it')
            return False
    report_studies(experiment, workdirs, command, console)
    return True


def check_studies(experiment: Experiment) -> int:
    """Builds the sweep and the base of every study, without data; returns how many there are.

    Raises `UserError` for a config that cannot be built and a metric that no evaluator has, naming the study, and for a
    README without the two comments.
    """
    with_results((experiment.folder / 'README.md').read_text(), experiment.size, '')
    studies = {
        f'{report}/{name}': config for report, found in experiment.studies().items() for name, config in found.items()
    }
    for name, config in studies.items():
        try:
            sweep = read(config)
            sweep.check_values()
            setup = check_config('its base', sweep.base)
            check_metric(sweep.metric, setup)
            check_metric(sweep.score, setup, 'reported')
        except UserError as error:
            raise UserError(f'{name}: {error}') from error
    return len(studies)


def _finished(study: Study) -> bool:
    """Whether all trials have ended, those of the confirmation too."""
    return Parts(study, None).finished()


def report_studies(experiment: Experiment, workdirs: pathlib.Path, command: str, console: Console) -> None:
    """Writes the results, the figure, the README's tables and the pages.

    Where no study is here, the figure and the tables are made again from `results/SIZE.json`, with what trivial
    predictors reach where it has none. Raises `UserError` where there is neither, and for a study without a trial that
    could be built.
    """
    folders = _folders(experiment, workdirs)
    if not any(folder.exists() for folder in folders):
        results = written_results(experiment)
        if (whole := with_baselines(experiment, results, console)) != results:
            write_results(
                experiment, {key: whole[key] for key in whole if key != 'studies'}, 'studies', whole['studies']
            )
        _report(experiment, whole, experiment.root(workdirs))
        console.print(f'written: {experiment.folder}/README.md, results/{experiment.size}.png')
        return
    missing = [folder for folder in folders if not _begun(folder)]
    if missing:
        raise UserError(_without_trial(missing[0]))
    reports: dict[str, Any] = {}
    studies: list[Measurements] = []
    for report in dict.fromkeys(folder.parent for folder in folders):
        page = report.parent / 'pages' / report.name
        compared = [folder for folder in folders if folder.parent == report]
        found = gather(compared, page, by=MATCHED_BY, tolerance=TOLERANCE)
        write_report(found, page, console)
        reports[report.name] = {name: getattr(found.comparison, name) for name in REPORTED}
        studies += [measurements(report.name, found.comparison, study) for study in found.studies]
    made = provenance([_made(folder) for folder in folders], len(folders), command, 'studies')
    facts = {'experiment': experiment.folder.name, 'size': experiment.size, 'command': command, 'made': made}
    write_results(experiment, facts | {'reports': rounded(reports)}, 'studies', [rounded(study) for study in studies])
    _report(experiment, written_results(experiment), experiment.root(workdirs))
    names = f'README.md, results/{experiment.size}.json, results/{experiment.size}.png'
    console.print(f'written: {experiment.folder}/{names}')


def with_baselines(experiment: Experiment, results: Mapping[str, Any], console: Console) -> dict[str, Any]:
    """Results with what trivial predictors reach in the reports that have none of them, by the config of a study.

    Unchanged where they say by `baselines`, null, that what was evaluated is not what the configs ask today, and where
    they were made by another Python whose text it was, which the console is told. Raises `UserError` for a report that
    has none and that `sweep.py` has not.
    """
    without = {study['report'] for study in results['studies'] if not study['baselines']}
    if 'baselines' in results or not without:
        return dict(results)
    reports = experiment.studies()
    for name in sorted(without - reports.keys()):
        where = f'results/{experiment.size}.json of {experiment.folder.name}'
        raise UserError(f'{where} has a report {name!r}, and sweep.py does not{nearest(name, sorted(reports))}')
    bases = {name: read(next(iter(reports[name].values()))).base for name in without}
    if said := of_other_python(pythons_of(results['made']), bases.values()):
        console.print(said)
        return dict(results)
    studies = [study | {'baselines': study['baselines'] or _baselines(study, bases)} for study in results['studies']]
    return {**results, 'studies': studies}


def _baselines(kept: Measurements, bases: Mapping[str, ConfigDict]) -> Measurements:
    row = study_result(kept)
    return rounded(dict(trivial_scores(bases[kept['report']], ranked_metric([row], row.metric, row.score))))


def _report(experiment: Experiment, results: Mapping[str, Any], root: pathlib.Path) -> None:
    """The figure and the tables from numbers as they are written, so that anyone can make them again."""
    plot = module_of(experiment.folder / 'plot.py')
    write_figure(experiment, plot.figure(results['studies']))
    pictures = kept_pictures(experiment, plot, results['studies'], root)
    write_readme(experiment, '\n\n'.join(filter(None, [*tables(results), pictures, results['made']])))


def tables(results: Mapping[str, Any]) -> list[str]:
    """The table of every report, from what `results/SIZE.json` holds."""
    found = []
    for name, report in results['reports'].items():
        studies = [study for study in results['studies'] if study['report'] == name]
        rows = tuple(map(study_result, studies))
        comparison = Comparison(
            metric=studies[0]['metric'],
            by=MATCHED_BY,
            tolerance=TOLERANCE,
            rows=rows,
            reasons=tuple(report['reasons']),
            task=report['task'],
            baselines=studies[0]['baselines'],
            reported=studies[0].get('reported', ''),
        )
        found.append(_table(name, with_sentence(comparison, [study['costs'] for study in studies])))
    return found


def study_result(kept: Mapping[str, Any]) -> StudyResult:
    """What `measurements` kept of the results of a study."""
    return StudyResult(
        name=kept['study'],
        size=kept['costs']['parameters'],
        flops=kept['flops_of_all'],
        points=tuple(Point(**trial) for trial in kept['trials']),
        goal=kept['goal'],
        confirmed=tuple(kept['confirmed']),
        tokens=kept['tokens'],
        noise=kept['noise'],
        metric=kept['metric'],
        score=kept.get('reported', '') or kept['metric'],
        counted=kept['counted'],
        failed=kept.get('failed', 0),
    )


def measurements(report: str, comparison: Comparison, study: StudyContents) -> Measurements:
    """What is kept of a study: its trials, its statistics with intervals, its costs, and its best runs by length.

    So that a figure of studies needs nothing else, what trivial predictors reach is with every study of a report.
    `settings` are what each of the trials sets: of a search, what it found is among them.
    """
    row = study.row
    return {
        'report': report,
        'study': row.name,
        'metric': comparison.metric,
        'reported': comparison.reported,
        'goal': row.goal,
        'flops_of_all': row.flops,
        'tokens': row.tokens,
        'counted': row.counted,
        'noise': row.noise,
        'trials': [dataclasses.asdict(point) for point in row.points],
        'settings': [dict(trial.settings) for trial in study.trials if not trial.confirms and trial.state in ENDED],
        'confirmed': row.confirmed,
        'failed': row.failed,
        'baselines': comparison.baselines,
        'statistics': {name: dataclasses.asdict(interval) for name, interval in row.statistics.items()},
        'costs': dataclasses.asdict(study.costs),
        'by_length': [
            {'run': 'confirmation' if trial.confirms else 'best', **{f'{n}x': x for n, x in trial.lengths.items()}}
            for trial in study.trials
            if trial.lengths and (trial.best or trial.confirms)
        ],
        'slices': _by_slice([trial.slices for trial in study.trials if trial.confirms]),
    }


def _by_slice(runs: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The values of confirmed runs by slice, of slices that all of them have."""
    return {name: [run[name] for run in runs] for name in (runs[0] if runs else ()) if all(name in run for run in runs)}


def _folders(experiment: Experiment, workdirs: pathlib.Path) -> dict[pathlib.Path, ConfigDict]:
    """The config of every study, by where it is kept."""
    root = experiment.root(workdirs)
    reports: Studies = experiment.studies()
    return {root / report / name: config for report, studies in reports.items() for name, config in studies.items()}


def _run(study: Study, workers: int, console: Console) -> None:
    path = study.folder / SECONDS
    began = time.perf_counter() - (seconds_of(path) or 0.0)
    arguments = [f'--study={study.folder}', '--compilation_cache=~/.cache/attnlab/compiled']
    try:
        launch.run_processes(study, arguments, launch.places(workers, [], launch.host_cores()), console)
    finally:
        files.write(path, json.dumps(time.perf_counter() - began))


def _begun(folder: pathlib.Path) -> list[pathlib.Path]:
    """The trials of a study that have been prepared, in order."""
    return sorted(path.parent for path in folder.glob('trials/*/run.json'))


def _without_trial(folder: pathlib.Path) -> str:
    """Why no trial of a study has been prepared: none has begun, or none could be built."""
    study = read_study(folder) if (folder / 'sweep.json').exists() else None
    failed = [] if study is None else [trial for trial in study.trials() if trial.state == TrialState.FAIL]
    if not failed:
        return f'{folder} is no study with a trial yet: run the experiment first'
    reason = failed[0].user_attrs.get('reason', 'no known reason')
    return f'no trial of {folder} could be built, the first for this: {reason}'


def _made(folder: pathlib.Path) -> Measurements:
    """What a study was made with, for `provenance`; where what ran it was killed each time, it left no time."""
    made = {**read_record(_begun(folder)[0]).facts, 'cores': os.cpu_count()}
    return {'made': made, 'seconds': seconds_of(folder / SECONDS)}


def _table(report: str, found: Comparison) -> str:
    """The table of `attnlab compare`, under its head and its sentence, above what intervals and rates leave out."""
    chosen = f'{found.reported}, chosen by {found.metric}' if found.reported else found.metric
    head = f'**{report}**: {chosen}; {found.head}\n\n{found.sentence}'
    columns = study_table(found)
    table = markdown([[each.name for each in columns.columns], *columns.text()])
    return '\n\n'.join(filter(None, [head, table, found.left_out, found.at_an_end]))
