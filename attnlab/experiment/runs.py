"""An experiment of single runs: each is trained, measured once, and reported.

What is measured is plain data, in the order of the runs; it is written to `results/`, and the table into `README.md`.
"""

import json
import os
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict
from rich.console import Console

from attnlab import config as configs
from attnlab import files
from attnlab.compare.baselines import text_scores
from attnlab.compare.runs import task_name
from attnlab.config import from_plain, plain
from attnlab.errors import UserError, nearest
from attnlab.experiment.experiment import Experiment, Finished, Run, module_of, telling
from attnlab.experiment.published import PublishedPlot, claims_of
from attnlab.experiment.results import (
    SECONDS,
    Measurements,
    kept_pictures,
    markdown,
    of_other_python,
    provenance,
    rounded,
    seconds_of,
    with_gaps,
    with_results,
    write_figure,
    write_readme,
    write_results,
    written_results,
)
from attnlab.runs.loading import restored
from attnlab.tables import plain_console
from attnlab.train import launch, loop, run
from attnlab.train.programs import Programs, Unbuildable
from attnlab.train.setup import Setup, prepare

MEASURED = 'measured.json'
"""What was measured of a run, in its work directory; a run that has it is done."""


def run_experiment(experiment: Experiment, workdirs: pathlib.Path, command: str, console: Console) -> str:
    """Runs what has not been run, measures it, and reports everything; returns FINISHED, or STOPPED after SIGTERM.

    Every run has a work directory of its own, `workdirs/NAME/SIZE/LABEL`, and what was measured of it is its
    `measured.json`: a run that has one is neither run nor measured again. Runs share compiled programs where they can.
    A run that cannot go on (a loss that is not finite) is reported as such, and the others go on.

    Raises `UserError` before any run for what `check_runs` refuses.
    """
    check_runs(experiment, workdirs)
    runs, programs, stop, outcome = experiment.runs(), Programs(), threading.Event(), loop.FINISHED
    for number, each in enumerate(runs, 1):
        workdir = experiment.workdir(each, workdirs)
        if (workdir / MEASURED).exists():
            continue
        if stop.is_set():
            outcome = loop.STOPPED
            break
        console.print(f'{number} of {len(runs)}: {each.label}')
        measured = train_and_measure(experiment, each, workdir, programs, stop)
        if measured is None:
            outcome = loop.STOPPED
            break
        files.write(workdir / MEASURED, json.dumps(files.finite(measured), allow_nan=False) + '\n')
    # Of one that was stopped in its first run nothing is there to report.
    if outcome == loop.FINISHED or any((experiment.workdir(each, workdirs) / MEASURED).exists() for each in runs):
        report_experiment(experiment, workdirs, command, console)
    return outcome


def check_runs(experiment: Experiment, workdirs: pathlib.Path) -> int:
    """Builds every run that has not been measured, without data; returns how many there are.

    Raises `UserError` for a config that cannot be built, naming the run, for a work directory that was made by another
    config, for a README without the two comments, and for a `sweep.py` without `measure`.
    """
    runs, sweep = experiment.runs(), experiment.folder / 'sweep.py'
    if not hasattr(module_of(sweep), 'measure'):
        raise UserError(f'{sweep} has no function measure')
    with_results((experiment.folder / 'README.md').read_text(), experiment.size, '')
    left = 0
    for each in runs:
        workdir = experiment.workdir(each, workdirs)
        _check_same(workdir, each.config)
        if not (workdir / MEASURED).exists():
            check_config(each.label, each.config)
            left += 1
    return left


def check_config(label: str, config: ConfigDict) -> Setup:
    """Builds the config of a run, without data. Raises `UserError` that names the run where it cannot be built."""
    try:
        setup = prepare(from_plain(plain(config)))
        setup.check()
    except UserError as error:
        raise UserError(f'{label}: {error}') from error
    return setup


def check_results(experiment: Experiment, rows: Sequence[Measurements]) -> None:
    """Raises `UserError` where rows of results are of runs, or of tasks, that `sweep.py` does not have."""
    tasks = {each.label: task_name(each.config.task) for each in experiment.runs()}
    where = f'results/{experiment.size}.json of {experiment.folder.name}'
    for row in rows:
        label = row['label']
        if label not in tasks:
            raise UserError(f'{where} has a run {label!r}, and sweep.py does not{nearest(label, tasks)}')
        if 'task' in row and row['task'] != tasks[label]:
            raise UserError(f'{where} says that {label} is of {row["task"]}; in sweep.py it is of {tasks[label]}')


def report_experiment(experiment: Experiment, workdirs: pathlib.Path, command: str, console: Console) -> None:
    """Writes results, figures and the table of the README, of as many runs as have been measured.

    Where none has been, the table and the figure are made again from `results/SIZE.json`. What trivial predictors reach
    on text stands below the table, computed where the results do not have it, but not under another Python than theirs
    where the text is that of Python. Raises `UserError` where there is neither, and for what `check_results` refuses.
    """
    runs = experiment.runs()
    paths = [experiment.workdir(each, workdirs) / MEASURED for each in runs]
    found, planned = [_read_measured(path) for path in paths if path.exists()], len(runs)
    kept: Measurements = {}
    if not found:
        kept = written_results(experiment)
        found, planned, command = kept['runs'], kept['planned'], kept['command']
        check_results(experiment, found)
    if 'baselines' in kept:
        baselines = kept['baselines']
    elif said := of_other_python({row['made']['python'] for row in found}, [each.config for each in runs]):
        console.print(said)
        baselines = []
    else:
        baselines = baselines_of(runs)
    _report(experiment, found, planned, command, baselines, experiment.root(workdirs))
    console.print(
        f'written: {experiment.folder}/README.md, results/{experiment.size}.json, results/{experiment.size}.png'
    )


def _read_measured(path: pathlib.Path) -> Measurements:
    """What was measured of a run. Raises `UserError` where the file is damaged."""
    remedy = 'remove it, and run the experiment again: the run is kept, and measured'
    found = files.read_json(path, remedy)
    if not isinstance(found, dict) or not {'label', 'made', 'seconds'} <= found.keys():
        raise UserError(f'{path} is damaged: it is not what is measured of a run; {remedy}')
    return found


def baselines_of(runs: Sequence[Run]) -> list[Measurements]:
    """What trivial predictors reach on the texts that runs evaluate, by metric; once where it is the same for all."""
    found = [rounded(text_scores(each.config)) for each in runs]
    return [one for number, one in enumerate(found) if one and one not in found[:number]]


def beside(baselines: Sequence[Measurements] | None) -> list[str]:
    """What is said of trivial predictors below a table; of `None`, that the text evaluated then is not known now."""
    if baselines is None:
        return [
            'No counts of bytes and pairs stand beside these losses: they are of the first tokens of the split, as '
            'runs were evaluated then, and not of the text that the configs ask today.'
        ]
    return [
        'On the text evaluated, counts of training tokens and of pairs reach '
        + '; '.join(
            f'{metric} {", ".join(f"{value:.4g} ({name})" for name, value in scores.items())}'
            for metric, scores in one.items()
        )
        + '.'
        for one in baselines
    ]


def train_and_measure(
    experiment: Experiment, each: Run, workdir: pathlib.Path, programs: Programs, stop: threading.Event | None = None
) -> Measurements | None:
    """Trains and measures a run; `None` where it was stopped. `stop` is set where it was asked to, if too late too."""
    began = time.perf_counter() - (seconds_of(workdir / SECONDS) or 0.0)
    config = from_plain(plain(each.config))
    made = {**run.environment(), 'cores': os.cpu_count()}
    try:
        setup, facts = programs.prepare(config)
    except Unbuildable as error:
        raise UserError(f'{each.label}: {error}') from error
    run.claim(workdir, config)
    found = {name: facts[name] for name in ('parameters', 'state_bytes_per_sequence', 'implementations')}
    found |= {'data': run.data_hashes(facts['data'])}
    try:
        more = _results(experiment, each, workdir, setup, config, facts, stop)
    finally:
        files.write(workdir / SECONDS, json.dumps(time.perf_counter() - began))
    if more is None:
        return None
    return {
        'label': each.label,
        'task': task_name(config.task),
        'made': made,
        'seconds': round(time.perf_counter() - began, 1),
        **found,
        **more,
    }


def _results(
    experiment: Experiment,
    each: Run,
    workdir: pathlib.Path,
    setup: Setup,
    config: ConfigDict,
    facts: dict[str, Any],
    stop: threading.Event | None,
) -> Measurements | None:
    """What a run has once it was trained: its speed and what `measure` says, or why it failed; `None` where stopped."""
    with files.appending(workdir / 'log.txt') as log:
        console = plain_console(file=log, width=120)
        try:
            outcome = launch.train(setup, config, workdir, facts, console=console, stop=stop)
        except loop.NonFinite as error:
            return {'failed': str(error)}
        if outcome == loop.STOPPED:
            return None
        finished = Finished(each.label, workdir, restored(setup, workdir), experiment.size)
        return {'tokens_per_second': finished.tokens_per_second, **_measured(experiment, finished)}


def _measured(experiment: Experiment, finished: Finished) -> Measurements:
    """What `measure` returns. Raises as `telling` does where it raises; the run is kept, and measured next time."""
    path = experiment.folder / 'sweep.py'
    module = module_of(path)
    with telling(path, f'{finished.label} has run and cannot be measured: '):
        return module.measure(finished)


def _check_same(workdir: pathlib.Path, config: ConfigDict) -> None:
    path = workdir / 'config.json'
    differing = run.differences(configs.load(path), config) if path.exists() else []
    if differing:
        found = run.listed(differing)
        raise UserError(f'{workdir} holds a run with another config ({found}): remove it to run this one')


def plot_of(experiment: Experiment, failed: Sequence[str] = ()) -> Any:
    """What draws the figure and writes the table: `plot.py`, or the same for all that repeat a published result."""
    sweep = module_of(experiment.folder / 'sweep.py')
    if hasattr(sweep, 'published'):
        return PublishedPlot(claims_of(sweep.published(experiment.size)), failed)
    return module_of(experiment.folder / 'plot.py')


def _report(
    experiment: Experiment,
    found: list[Measurements],
    planned: int,
    command: str,
    baselines: Sequence[Measurements] | None,
    root: pathlib.Path,
) -> None:
    """The results from numbers as they are written, so that anyone can make them again from the JSON."""
    found = [rounded(one) for one in found]
    plot = plot_of(experiment, [one['label'] for one in found if 'failed' in one])
    facts = {'experiment': experiment.folder.name, 'size': experiment.size, 'command': command, 'planned': planned}
    write_results(experiment, facts | ({} if baselines == [] else {'baselines': baselines}), 'runs', found)
    whole = with_gaps([one for one in found if 'failed' not in one])
    if whole:
        write_figure(experiment, plot.figure(whole))
    table = markdown(plot.table(whole) if whole else [])
    pictures = kept_pictures(experiment, plot, whole, root) if whole else ''
    failures = [f'{one["label"]} did not come to its end: {one["failed"]}.' for one in found if 'failed' in one]
    said = [*beside(baselines), *failures, provenance(found, planned, command)]
    write_readme(experiment, '\n\n'.join(filter(None, [table, pictures, *said])))
