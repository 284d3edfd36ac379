"""`attnlab experiment`: runs an experiment, or goes on with it."""

import os
import pathlib
from typing import TYPE_CHECKING

from absl import flags

from attnlab.commands.arguments import parsed
from attnlab.errors import UserError

if TYPE_CHECKING:
    from attnlab.experiment.experiment import Experiment

EXPERIMENTS = pathlib.Path('experiments')


def main(argv: list[str]) -> int:
    """Runs the command."""
    names = [word for word in argv if not word.startswith('-')]
    values = _flags()
    if not parsed(values, [word for word in argv if word.startswith('-')], 'experiment NAME|FOLDER'):
        return 0
    _check(values, names)
    from attnlab.experiment.experiment import Experiment

    folder = pathlib.Path(names[0])
    experiment = Experiment(folder if folder.is_dir() else EXPERIMENTS / folder, values.size)
    command = f'attnlab experiment {names[0]} --size={experiment.size}'
    if values.workers is not None and (values.report or values.dry_run or not experiment.has_studies()):
        raise UserError('--workers is for experiments of studies that are run here; leave it out')
    return (_studies if experiment.has_studies() else _runs)(values, experiment, command)


def _flags() -> flags.FlagValues:
    """The flags of the command."""
    values = flags.FlagValues()
    flags.DEFINE_string('size', 'cpu', 'cpu or full.', flag_values=values)
    flags.DEFINE_string('workdirs', 'runs/experiments', 'Where the runs are kept.', flag_values=values)
    flags.DEFINE_bool(
        'report',
        False,
        'Run nothing: write tables and figures again, of the runs that are here or, without any, of results/SIZE.json.',
        flag_values=values,
    )
    flags.DEFINE_bool('dry_run', False, 'Run nothing: build all that would run, and stop.', flag_values=values)
    flags.DEFINE_integer(
        'workers',
        None,
        'Of sweeps, trials at once; at size cpu as many as there are cores.',
        lower_bound=1,
        flag_values=values,
    )
    return values


def _check(values: flags.FlagValues, names: list[str]) -> None:
    """Raises `UserError` for flags that do not go together, and for no experiment or several."""
    if len(names) != 1:
        raise UserError('usage: attnlab experiment NAME|FOLDER [--size=cpu|full]; NAME is a folder of ./experiments')
    if values.report and values.dry_run:
        raise UserError('--report and --dry_run do not go together: neither runs anything')


def _studies(values: flags.FlagValues, experiment: 'Experiment', command: str) -> int:
    """An experiment of sweeps: tries it, reports it, or runs it."""
    from attnlab.experiment.studies import check_studies, report_studies, run_studies
    from attnlab.tables import plain_console
    from attnlab.train.launch import STOPPED

    workdirs, console = pathlib.Path(values.workdirs).expanduser(), plain_console(soft_wrap=True)
    if values.dry_run:
        console.print(f'{experiment.folder}, size {experiment.size}: {check_studies(experiment)} studies can be run')
        return 0
    if values.report:
        report_studies(experiment, workdirs, command, console)
        return 0
    workers = values.workers or (os.cpu_count() or 1 if experiment.size == 'cpu' else 1)
    return 0 if run_studies(experiment, workdirs, command, workers, console) else STOPPED


def _runs(values: flags.FlagValues, experiment: 'Experiment', command: str) -> int:
    """An experiment of runs: tries it, reports it, or runs it."""
    from attnlab.experiment.runs import check_runs, report_experiment, run_experiment
    from attnlab.tables import plain_console
    from attnlab.train import devices
    from attnlab.train.launch import STOPPED
    from attnlab.train.loop import FINISHED

    workdirs, console = pathlib.Path(values.workdirs).expanduser(), plain_console(soft_wrap=True)
    if values.dry_run:
        left = check_runs(experiment, workdirs)
        console.print(f'{experiment.folder}, size {experiment.size}: {left} runs are left, and can be run')
        return 0
    devices.start(compilation_cache='~/.cache/attnlab/compiled')
    if values.report:
        report_experiment(experiment, workdirs, command, console)
        return 0
    return 0 if run_experiment(experiment, workdirs, command, console) == FINISHED else STOPPED
