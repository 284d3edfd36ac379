"""`attnlab sweep`, `attnlab sweep worker`, `attnlab sweep status`: many runs, searched and given up early."""

import re
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from absl import flags

from attnlab.commands.arguments import (
    asks_for_help,
    define_devices,
    define_format,
    directory,
    help_text,
    parsed,
    printing,
    start_devices,
    whole,
)
from attnlab.errors import UserError, nearest

if TYPE_CHECKING:
    from ml_collections import ConfigDict

HANDED_ON = ('storage', 'platform', 'cpu_devices', 'distributed', 'coordinator', 'processes', 'process')
"""Flags that a sweep hands on to its workers as they were given."""
LISTS = ('slurm_setup', 'slurm_teardown', 'slurm_srun_args')
"""Parameters of submitit that are lists."""


def main(argv: list[str]) -> int:
    """Runs the command, or the one of `SUBCOMMANDS` that is named."""
    if argv and not argv[0].startswith('-'):
        if argv[0] not in SUBCOMMANDS:
            raise UserError(f'there is no command sweep {argv[0]}{nearest(argv[0], SUBCOMMANDS)}')
        return SUBCOMMANDS[argv[0]](argv[1:])
    values = flags.FlagValues()
    _define_study(values)
    define_devices(values)
    _define_stopping(values)
    flags.DEFINE_integer('workers', 1, 'How many trials run at once.', lower_bound=1, flag_values=values)
    flags.DEFINE_list(
        'devices', [], 'Accelerators of this host, by index; workers are assigned them in turn.', flag_values=values
    )
    flags.DEFINE_enum(
        'launcher',
        'processes',
        ['processes', 'submitit'],
        'Run workers as processes on this host, or as jobs of submitit.',
        flag_values=values,
    )
    flags.DEFINE_enum(
        'cluster', 'slurm', ['slurm', 'local'], 'With --launcher=submitit: what runs the jobs.', flag_values=values
    )
    flags.DEFINE_list(
        'job',
        [],
        'With --launcher=submitit: its parameters, such as gpus_per_node=1,slurm_partition=gpu.',
        flag_values=values,
    )
    flags.DEFINE_bool(
        'dry_run',
        False,
        'Print the search space, trials, steps and the cost of a trial; start nothing.',
        flag_values=values,
    )
    define_format(values)
    if asks_for_help(argv):
        usage = 'usage: attnlab sweep --config=NAME[:ARG] --study=DIR [--config.KEY=VALUE ...] [--flag=value ...]'
        print(help_text(usage, values))
        return 0
    from attnlab.configuration import read_config

    config = read_config(values, argv, 'sweep')
    if values.dry_run:
        return _plan(values, config)
    if values.format is not None:
        raise UserError('--format is for tables, which a sweep does not print: it goes with --dry_run, or sweep status')
    from attnlab.sweep import launch
    from attnlab.sweep.splits import said_of, without_own_split
    from attnlab.sweep.study import create_study
    from attnlab.tables import standard_output
    from attnlab.train.devices import check_processes
    from attnlab.trust import allowed

    console = standard_output()
    folder = directory(values, 'study')
    check_processes(values.coordinator, values.processes, values.process)
    together = values.distributed or values.coordinator is not None
    if together and values.launcher == 'processes' and values.workers != 1:
        raise UserError(f'--workers is {values.workers}; several processes that run one trial together are one worker')
    study = create_study(folder, config, values.storage)
    if without_own_split(study.sweep):
        console.print(said_of('This sweep chooses and reports', 'its data set'), highlight=False)
    arguments = [f'--study={folder}', f'--compilation_cache={values.compilation_cache}']
    given = {name: values[name].value for name in HANDED_ON}
    arguments += [f'--{name}={value}' for name, value in given.items() if value is not None and value is not False]
    arguments += [f'--allow={package}' for package in allowed()]
    if values.launcher == 'submitit':
        jobs = launch.submit(folder, arguments, values.workers, values.cluster, _options(values.job))
        quoted = shlex.quote(str(folder))
        console.print(f'submitted {", ".join(job.job_id for job in jobs)}. Next: attnlab sweep status --study={quoted}')
        return 0
    devices = [whole(text, '--devices', least=0) for text in values.devices]
    where = launch.places(values.workers, devices, launch.host_cores())
    finished = launch.run_processes(study, arguments, where, console, values.storage)
    return 0 if finished else values.stopped_status


def _plan(values: flags.FlagValues, config: 'ConfigDict') -> int:
    """Prints what a sweep would run."""
    start_devices(values)
    from attnlab.sweep.plan import print_sweep
    from attnlab.sweep.sweep import read

    with printing(values) as printer:
        print_sweep(read(config), printer)
    return 0


def worker(argv: list[str]) -> int:
    """Runs `attnlab sweep worker`."""
    values = flags.FlagValues()
    _define_study(values)
    define_devices(values)
    _define_stopping(values)
    flags.DEFINE_float(
        'idle', None, 'Seconds to wait without a trial before exiting; forever by default.', flag_values=values
    )
    flags.DEFINE_list('cores', [], 'CPU cores to run on, by index.', flag_values=values)
    flags.DEFINE_integer('device', None, 'The accelerator to run on, by index.', flag_values=values)
    flags.DEFINE_bool('tied', False, 'Stop when standard input closes.', flag_values=values)
    if not parsed(values, argv, 'sweep worker'):
        return 0
    folder = directory(values, 'study')
    cores = [whole(text, '--cores', least=0) for text in values.cores]
    from attnlab.sweep.launch import pin

    pin(cores, values.device)
    start_devices(values)
    from attnlab.sweep.worker import leave_when_asked, stop_with_parent, work
    from attnlab.tables import plain_console

    leave_when_asked(values.stopped_status)
    if values.tied:
        stop_with_parent()
    idle = float('inf') if values.idle is None else values.idle
    finished = work(folder, values.storage, plain_console(soft_wrap=True), idle)
    return 0 if finished else values.stopped_status


def status(argv: list[str]) -> int:
    """Runs `attnlab sweep status`."""
    values = flags.FlagValues()
    _define_study(values)
    flags.DEFINE_bool('watch', False, 'Keep refreshing until the sweep is finished.', flag_values=values)
    define_format(values)
    if not parsed(values, argv, 'sweep status'):
        return 0
    folder = directory(values, 'study')
    if values.watch and values.format is not None:
        raise UserError('--watch shows tables in a terminal; leave out --format')
    from attnlab.sweep.status import show_status

    with printing(values) as printer:
        show_status(folder, values.storage, printer, watch=values.watch)
    return 0


SUBCOMMANDS: dict[str, Callable[[list[str]], int]] = {'worker': worker, 'status': status}


def _define_study(values: flags.FlagValues) -> None:
    flags.DEFINE_string('study', None, 'The directory of the study.', flag_values=values)
    flags.DEFINE_string(
        'storage',
        None,
        'A database for the trials, such as postgresql://USER@HOST/NAME; a journal file in the study by default.',
        flag_values=values,
    )


def _define_stopping(values: flags.FlagValues) -> None:
    flags.DEFINE_integer(
        'stopped_status',
        0,
        'Exit status if stopped before the end; clusters that restart failed jobs need one above 0.',
        lower_bound=0,
        upper_bound=255,
        flag_values=values,
    )


def _options(items: list[str]) -> dict[str, Any]:
    """Reads `name=value` items as submitit takes them: numbers, true or false, lists of one, else text."""
    pairs = [item.partition('=') for item in items]
    for item, (name, equals, _) in zip(items, pairs, strict=True):
        if not equals or not name:
            raise UserError(f'--job holds {item!r}, which is not name=value')
    return {name: [value] if name in LISTS else _option(value) for name, _, value in pairs}


def _option(text: str) -> bool | int | float | str:
    if text in ('true', 'false'):
        return text == 'true'
    if text.isdecimal():
        return int(text)
    return float(text) if re.fullmatch(r'\d+\.\d+', text) else text
