"""`attnlab train`: trains, or goes on training."""

import pathlib
from typing import TYPE_CHECKING

from absl import flags

from attnlab.commands.arguments import (
    asks_for_help,
    define_devices,
    define_format,
    define_other_data,
    directory,
    help_text,
    printing,
    start_devices,
)
from attnlab.errors import UserError

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from attnlab.train.profile import Profile


def main(argv: list[str]) -> int:
    """Runs the command."""
    values = _flags()
    if asks_for_help(argv):
        usage = 'usage: attnlab train --config=NAME[:ARG] --workdir=DIR [--config.KEY=VALUE ...] [--flag=value ...]'
        print(help_text(usage, values))
        return 0
    run = _given(argv, 'from')
    config = _config(values, argv, run)
    _check(values, run)
    profile = _profile(values, config)
    if values.topology is not None:
        return _plan_for(values, config)
    start_devices(values)
    return _plan(values, config) if values.dry_run else _train(values, config, run, profile)


def _flags() -> flags.FlagValues:
    """The flags of the command."""
    values = flags.FlagValues()
    flags.DEFINE_string('workdir', None, 'The directory of the run.', flag_values=values)
    flags.DEFINE_bool(
        'dry_run', False, 'Print the plan of the run, without allocating or training anything.', flag_values=values
    )
    flags.DEFINE_string(
        'topology',
        None,
        'With --dry_run: plan for devices that are not present, such as v5p:4x4x4 or H100x8; for GPUs '
        'the step is lowered, and compiled where the CUDA plugin is installed.',
        flag_values=values,
    )
    flags.DEFINE_integer(
        'data_workers',
        0,
        'How many processes read data; changes speed, not results.',
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_string(
        'from', None, 'A run to branch off from, in place of --config; that run is not changed.', flag_values=values
    )
    flags.DEFINE_integer(
        'from_step', None, 'With --from: which of its checkpoints; the most suitable by default.', flag_values=values
    )
    flags.DEFINE_string(
        'profile', None, 'Steps to trace for XProf and TensorBoard: 10, or 10:15 inclusive.', flag_values=values
    )
    define_other_data(values)
    define_format(values)
    define_devices(values)
    return values


def _given(argv: list[str], name: str) -> pathlib.Path | None:
    """The folder that a flag names, before flags are read."""
    flag = f'--{name}='
    given = next((item.removeprefix(flag) for item in argv if item.startswith(flag)), '')
    return pathlib.Path(given).expanduser() if given else None


def _config(values: flags.FlagValues, argv: list[str], run: pathlib.Path | None) -> 'ConfigDict':
    """The config with its overrides, that of the run to begin as where there is one; gives the flags their values."""
    from attnlab.configuration import read_config

    if run is None:
        return read_config(values, argv, 'train')
    from attnlab.train.fork import forked_config

    return read_config(values, argv, 'train', forked_config(run, _given(argv, 'workdir')))


def _check(values: flags.FlagValues, run: pathlib.Path | None) -> None:
    """Raises `UserError` for flags that do not go together."""
    if run is None and values['from'].value is not None:
        raise UserError('flags are written --name=value, such as --from=RUN')
    if run is None and values.from_step is not None:
        raise UserError('--from_step is given without --from')
    if values.profile is not None and values.dry_run:
        raise UserError('--profile traces steps, of which --dry_run takes none')
    if values.topology is not None and not values.dry_run:
        raise UserError('--topology names devices that are not present: it goes with --dry_run')
    if values.format is not None and not values.dry_run:
        raise UserError('--format is for tables, which training does not print: it goes with --dry_run')


def _profile(values: flags.FlagValues, config: 'ConfigDict') -> 'Profile | None':
    """The steps to trace, if any. Raises `UserError` for steps that the run does not take."""
    if values.profile is None:
        return None
    from attnlab.train.profile import profile_of

    profile = profile_of(values.profile)
    profile.check(0, config.steps)
    return profile


def _plan(values: flags.FlagValues, config: 'ConfigDict') -> int:
    """Prints the plan of a run on the devices that are here."""
    from attnlab.runs.plan import print_plan
    from attnlab.train.setup import prepare

    with printing(values) as printer:
        print_plan(prepare(config), printer)
    return 0


def _plan_for(values: flags.FlagValues, config: 'ConfigDict') -> int:
    """Prints the plan of a run on devices that are not present."""
    from attnlab.runs.plan import print_plan_for
    from attnlab.train import devices, topologies
    from attnlab.train.setup import prepare

    # Nothing is kept: JAX reads no program of devices that are not there, and says so each time.
    devices.start(platform='cpu', cpu_devices=topologies.gpus(values.topology))
    topology = topologies.find(values.topology)
    with printing(values) as printer:
        print_plan_for(prepare(config, topology.devices), topology, printer)
    return 0


def _train(values: flags.FlagValues, config: 'ConfigDict', run: pathlib.Path | None, profile: 'Profile | None') -> int:
    """Trains, beginning as another run where one is given and this one has not begun."""
    workdir = directory(values, 'workdir')
    from attnlab.tables import standard_output
    from attnlab.train.fork import fork
    from attnlab.train.launch import launch
    from attnlab.train.processes import together
    from attnlab.train.run import has_begun

    with together():
        return launch(
            config,
            workdir,
            console=standard_output(),
            data_workers=values.data_workers,
            other_data=values.other_data,
            fork=None if run is None or has_begun(workdir) else fork(run, config, values.from_step),
            profile=profile,
        )
