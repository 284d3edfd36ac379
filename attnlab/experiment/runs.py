"""An experiment: one question, the runs that answer it, what is measured of each, a figure and a table.

It is a folder with two files of Python. `sweep.py` has `runs(size)`, a list of `Run`, and `measure(finished)`, which
returns plain data about a `Finished` one. `plot.py` has `figure(rows)` and `table(rows)`, the latter a list of lines of
text cells, the heading first; `rows` is what was measured, in the order of the runs. What comes of it is written to
`results/`, and the table into `README.md`, between two comments.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from ml_collections import ConfigDict
from rich.console import Console

from attnlab import config as configs
from attnlab import files
from attnlab.config import from_plain, plain
from attnlab.errors import UserError, nearest
from attnlab.files import replacing
from attnlab.runs.loading import Loaded, restored
from attnlab.train import launch, loop, run
from attnlab.train.programs import Programs, Unbuildable
from attnlab.train.report import read_lines

SIZES = ('cpu', 'full')
"""How large an experiment is: minutes on 2 cores, or what the question deserves, on an accelerator."""

MEASURED = 'measured.json'
"""What was measured of a run, in its work directory; a run that has it is done."""

Row = dict[str, Any]
Line = Sequence[str]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of an experiment: an ordinary config, under a name that its work directory has too."""

    label: str
    config: ConfigDict


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run that came to its end, for what is to be measured of it."""

    label: str
    workdir: pathlib.Path
    loaded: Loaded

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """The metric over steps, as the run wrote it down."""
        lines = read_lines(self.workdir / 'metrics.jsonl')
        return [(line['step'], line[metric]) for line in lines if metric in line]

    @property
    def tokens_per_second(self) -> float:
        """Of training, the median over what was reported."""
        return float(np.median([line['tokens_per_second'] for line in read_lines(self.workdir / 'speed.jsonl')]))


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The folder of an experiment at one of its sizes, its Python loaded.

    Raises `UserError` for an experiment or a size that is not there, naming those there are.
    """

    folder: pathlib.Path
    size: str

    def __post_init__(self) -> None:
        there = sorted(path.parent.name for path in self.folder.parent.glob('*/sweep.py'))
        if self.folder.name not in there:
            raise UserError(
                f'there is no experiment {self.folder.name!r} in {self.folder.parent}; there are {", ".join(there)}'
            )
        if self.size not in SIZES:
            raise UserError(f'there is no size {self.size!r}{nearest(self.size, SIZES)}')

    def runs(self) -> list[Run]:
        """The runs, as `sweep.py` has them. Raises `UserError` for two of one name."""
        runs = _module(self.folder / 'sweep.py').runs(self.size)
        labels = [run.label for run in runs]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise UserError(f'two runs of {self.folder.name} are called {", ".join(twice)}')
        return runs

    def has_studies(self) -> bool:
        """Whether it is one of sweeps; see `attnlab.experiment.studies`."""
        return hasattr(_module(self.folder / 'sweep.py'), 'studies')

    def studies(self) -> Mapping[str, Mapping[str, ConfigDict]]:
        """The configs of its sweeps, as `sweep.py` has them."""
        return _module(self.folder / 'sweep.py').studies(self.size)

    def workdir(self, each: Run, workdirs: pathlib.Path) -> pathlib.Path:
        """Where a run is kept."""
        return workdirs / self.folder.name / self.size / each.label


def run_experiment(experiment: Experiment, workdirs: pathlib.Path, command: str, console: Console) -> str:
    """Runs what has not been run, measures it, and reports everything; returns FINISHED, or STOPPED after SIGTERM.

    Every run has a work directory of its own, `workdirs/NAME/SIZE/LABEL`, and what was measured of it is its
    `measured.json`: a run that has one is neither run nor measured again. Runs share compiled programs where they can.
    A run that cannot go on (a loss that is not finite) is reported as such, and the others go on.

    Raises `UserError` for a work directory that was made by another config, and for a README without the two comments.
    """
    measure = _module(experiment.folder / 'sweep.py').measure
    runs, programs, outcome = experiment.runs(), Programs(), loop.FINISHED
    written((experiment.folder / 'README.md').read_text(), experiment.size, '')
    for number, each in enumerate(runs, 1):
        workdir = experiment.workdir(each, workdirs)
        _check_same(workdir, each.config)
        if (workdir / MEASURED).exists():
            continue
        console.print(f'{number} of {len(runs)}: {each.label}')
        row = _run(each, workdir, measure, programs)
        if row is None:
            outcome = loop.STOPPED
            break
        files.write(workdir / MEASURED, json.dumps(row) + '\n')
    report_experiment(experiment, workdirs, command, console)
    return outcome


def report_experiment(experiment: Experiment, workdirs: pathlib.Path, command: str, console: Console) -> None:
    """Writes results, figures and the table of the README, of as many runs as have been measured."""
    runs = experiment.runs()
    paths = [experiment.workdir(each, workdirs) / MEASURED for each in runs]
    rows = [json.loads(path.read_text()) for path in paths if path.exists()]
    if not rows:
        raise UserError(f'no run of {experiment.folder.name} has been measured at size {experiment.size}')
    _report(experiment, rows, len(runs), command)
    console.print(f'written: {experiment.folder}/README.md, {experiment.folder}/results/{experiment.size}.*')


def _run(each: Run, workdir: pathlib.Path, measure: Any, programs: Programs) -> Row | None:
    """Trains and measures a run; `None` where it was stopped."""
    began = time.perf_counter()
    config = from_plain(plain(each.config))
    made = {**run.environment(), 'cores': os.cpu_count()}
    try:
        setup, facts = programs.prepare(config)
    except Unbuildable as error:
        raise UserError(f'{each.label}: {error}') from error
    run.claim(workdir, config)
    found = {name: facts[name] for name in ('parameters', 'state_bytes_per_sequence', 'implementations')}
    with (workdir / 'log.txt').open('a') as log:
        try:
            outcome = launch.train(setup, workdir, facts, console=Console(file=log, width=120, highlight=False))
        except loop.NonFinite as error:
            found['failed'] = str(error)
        else:
            if outcome == loop.STOPPED:
                return None
            finished = Finished(each.label, workdir, restored(setup, workdir))
            found |= {'tokens_per_second': finished.tokens_per_second, **measure(finished)}
    return {'label': each.label, 'made': made, 'seconds': round(time.perf_counter() - began, 1), **found}


def _check_same(workdir: pathlib.Path, config: ConfigDict) -> None:
    path = workdir / 'config.json'
    differing = run.differences(configs.load(path), config) if path.exists() else []
    if differing:
        shown = '; '.join(differing[:8])
        raise UserError(f'{workdir} holds a run with another config ({shown}): remove it to run this one')


def _report(experiment: Experiment, rows: list[Row], planned: int, command: str) -> None:
    plot = _module(experiment.folder / 'plot.py')
    folder, size = experiment.folder / 'results', experiment.size
    results = {'experiment': experiment.folder.name, 'size': size, 'command': command, 'planned': planned}
    lines = ',\n'.join(json.dumps(_rounded(row)) for row in rows)
    files.write(folder / f'{size}.json', f'{json.dumps(results)[:-1]}, "runs": [\n{lines}\n]}}\n')
    whole = [row for row in rows if 'failed' not in row]
    if whole:
        with matplotlib.rc_context({'svg.hashsalt': experiment.folder.name, 'svg.fonttype': 'none'}):
            figure = plot.figure(whole)
            for suffix, metadata in (('png', {'Software': None}), ('svg', {'Date': None})):
                with replacing(folder / f'{size}.{suffix}') as temporary:
                    figure.savefig(temporary, format=suffix, dpi=120, metadata=metadata)
    table = markdown(plot.table(whole) if whole else [])
    failures = [f'{row["label"]} did not come to its end: {row["failed"]}.' for row in rows if 'failed' in row]
    text = '\n\n'.join([table, *failures, provenance(rows, planned, command)]).strip()
    readme = experiment.folder / 'README.md'
    files.write(readme, written(readme.read_text(), size, text))


def provenance(rows: Sequence[Row], planned: int, command: str, what: str = 'runs') -> str:
    """What the rows were made with, in a sentence."""
    seconds = sum(row['seconds'] for row in rows)

    def all_of(read: Any) -> str:
        return ', '.join(dict.fromkeys(str(read(row['made'])) for row in rows))

    return (
        f'{len(rows)} of {planned} {what}, {seconds / 60:.1f} minutes, by `{command}`; '
        f'device: {all_of(lambda made: f"{made['device_count']} {made['device_kind']}, {made['cores']} cores")}; '
        f'Python {all_of(lambda made: made["python"])}, jax {all_of(lambda made: made["packages"]["jax"])}, '
        f'flax {all_of(lambda made: made["packages"]["flax"])}; '
        f'commit {all_of(lambda made: _commit(made["git"]))}.'
    )


def _commit(git: Mapping[str, Any]) -> str:
    return 'unknown' if git['commit'] is None else git['commit'][:10] + (' with changes' if git['changed'] else '')


def markdown(lines: Sequence[Line]) -> str:
    """A table; the first line is its heading, and columns after the first are flush right."""
    if not lines:
        return ''
    rule = ['---', *['---:'] * (len(lines[0]) - 1)]
    return '\n'.join(f'| {" | ".join(line)} |' for line in (lines[0], rule, *lines[1:]))


def written(readme: str, size: str, text: str) -> str:
    """A README with what stands between the two comments of a size replaced. Raises `UserError` where they are not."""
    begin, end = f'<!-- results of size {size} -->', f'<!-- end of size {size} -->'
    before, found, rest = readme.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise UserError(f'README.md lacks the comments {begin} and {end}, between which the table goes')
    return f'{before}{begin}\n{text}\n{end}{after}'


T_QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""By number of samples, the 97.5 % quantile of Student's t with one degree of freedom less."""


def confidence(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % confidence interval by Student's t; NaN unless there are 2 to 10 values."""
    count = len(values)
    half = T_QUANTILES[count] * float(np.std(values, ddof=1)) / count**0.5 if count in T_QUANTILES else float('nan')
    return float(np.mean(values)), half


def plus_minus(values: Sequence[float], digits: int) -> str:
    """`mean ± half` of the 95 % confidence interval; the mean alone where there is no interval."""
    mean, half = confidence(values)
    return f'{mean:.{digits}f}' + (f' ± {half:.{digits}f}' if half == half else '')


def panels(columns: int, *, rows: int = 1, width: float = 4.2, height: float = 3.4) -> tuple[Figure, list[Any]]:
    """A figure of panels side by side, and their axes in reading order."""
    figure = Figure(figsize=(width * columns, height * rows), layout='constrained')
    axes = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for each in axes:
        each.grid(alpha=0.3)
        each.spines[['top', 'right']].set_visible(False)
    return figure, axes


def _module(path: pathlib.Path) -> Any:
    """A file of Python as a module that nothing else imports."""
    found = importlib.util.spec_from_file_location(f'{path.parent.name}_{path.stem}', path)
    if found is None or found.loader is None or not path.exists():
        raise UserError(f'there is no {path}')
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _rounded(value: Any) -> Any:
    """Numbers with six digits: files that are read, and kept in git."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f'{value:.6g}') if isinstance(value, float) else value
