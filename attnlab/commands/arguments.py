"""Flags that several commands share, and how a command reads its flags.

Nothing heavy is imported here or at the top of a command: help, and the complaint about a wrong flag, come at once.
"""

import contextlib
import math
import pathlib
import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from absl import flags

from attnlab.errors import UserError
from attnlab.flags import parse_flags

if TYPE_CHECKING:
    from attnlab.tables import Printer

WIDTH = 79
"""Of help, in characters."""

FORMATS = ('plain', 'json', 'csv', 'markdown')


def help_text(usage: str, values: flags.FlagValues) -> str:
    """The usage, the flags of the command, and after an empty line those that it shares with others."""
    modules = [name for name in values.flags_by_module_dict() if name != flags.__name__]
    modules.sort(key=lambda name: name == __name__)
    blocks = [values.module_help(name).strip('\n').partition('\n')[2] for name in modules]
    usage = textwrap.fill(usage, WIDTH, subsequent_indent='  ', break_long_words=False, break_on_hyphens=False)
    return '\n\n'.join([usage, *blocks])


def asks_for_help(argv: list[str]) -> bool:
    """Whether a command is asked to print its help."""
    return '--help' in argv or '-h' in argv


def parsed(values: flags.FlagValues, argv: list[str], command: str) -> bool:
    """Parses the flags of a command; prints them and returns False when asked for help."""
    if asks_for_help(argv):
        print(help_text(f'usage: attnlab {command} [--flag=value ...]', values))
        return False
    parse_flags(values, argv, command)
    for name in values:
        value = values[name].value
        if isinstance(value, float) and math.isnan(value):
            raise UserError(f'--{name} is nan; it must be a number')
    return True


def required(values: flags.FlagValues, name: str) -> pathlib.Path:
    """The path that a flag gives. Raises `UserError` where it is not given."""
    given = values[name].value
    if not given:
        raise UserError(f'--{name} is missing')
    return pathlib.Path(given).expanduser()


def directory(values: flags.FlagValues, name: str) -> pathlib.Path:
    """The folder that a flag gives, which need not exist yet. Raises `UserError` where it cannot be a folder."""
    path = required(values, name)
    for place in (path, *path.parents):
        if place.exists():
            if not place.is_dir():
                raise UserError(f'--{name} is {path}, and {place} is a file; it must be a folder')
            return path
    return path


def lines(values: flags.FlagValues, name: str) -> tuple[str, ...]:
    """The lines of the file of texts that a flag gives, empty ones left out. Raises `UserError` where there is none."""
    path = required(values, name)
    try:
        found = tuple(line for line in path.read_text(encoding='utf-8').split('\n') if line)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'--{name} is {path}, which cannot be read: {error}') from error
    if not found:
        raise UserError(f'--{name} is {path}, which holds no text; put one on each line')
    return found


def whole(text: str, flag: str, least: int = 1) -> int:
    """The whole number an item of a list flag gives. Raises `UserError` for anything else or below `least`."""
    if not text.isdecimal() or int(text) < least:
        raise UserError(f'{flag} holds {text!r}; it must hold whole numbers of at least {least}')
    return int(text)


def check_belonging(
    values: flags.FlagValues, belonging: Mapping[str, tuple[str, ...]], given: Collection[str] | None = None
) -> None:
    """Raises `UserError` for a flag that is given without any of those that it belongs to.

    `given` are the flags that it may belong to here: by default all that have a value.
    """
    if given is None:
        given = [name for name in values if values[name].value is not None]
    for name, owners in belonging.items():
        if values[name].present and not set(owners) & set(given):
            *some, last = (f'--{owner}' for owner in owners)
            known = f'{", ".join(some)} or {last}' if some else last
            raise UserError(f'--{name} is for {known}, which is not given')


def define_format(values: flags.FlagValues) -> None:
    """Defines the flag of a command that prints tables."""
    flags.DEFINE_enum(
        'format', None, FORMATS, 'Of tables; outside of a terminal plain, lines with tabs.', flag_values=values
    )


@contextlib.contextmanager
def printing(values: flags.FlagValues, *, several: bool = False) -> 'Iterator[Printer]':
    """A printer in the format that the flags ask for; closed where the command ends without an error.

    Of a command that may run in `several` processes, the first alone prints the tables that were kept.
    """
    from attnlab.tables import Printer, standard_output

    printer = Printer(standard_output(), values.format)
    yield printer
    if not several or is_first_process():
        printer.close()


def is_first_process() -> bool:
    """Whether this is the first process of a command, of one or several."""
    import jax

    return jax.process_index() == 0


def define_run(values: flags.FlagValues, *, several: bool = False) -> None:
    """Defines the flags of a command that loads a trained run in one process; with `several` it may be in several."""
    flags.DEFINE_string('workdir', None, 'The directory of the run.', flag_values=values)
    flags.DEFINE_integer(
        'step', None, 'The checkpoint to load; the newest by default.', lower_bound=0, flag_values=values
    )
    (define_devices if several else define_platform)(values)


def define_ema(values: flags.FlagValues) -> None:
    """Defines the flag of a command that can take the average of the parameters."""
    flags.DEFINE_bool(
        'ema',
        False,
        'The moving average of the parameters in their place, of a run with config.optimizer.ema.',
        flag_values=values,
    )


def define_split(values: flags.FlagValues) -> None:
    """Defines the flags of a command that reads a split of a run's task."""
    define_other_data(values)
    flags.DEFINE_string(
        'split', None, 'The split: valid of a text, test of other tasks by default.', flag_values=values
    )


def define_other_data(values: flags.FlagValues) -> None:
    """Defines the flag of a command that reads the data of a run."""
    flags.DEFINE_bool(
        'other_data', False, 'Go on although the data are not those that the run was trained on.', flag_values=values
    )


def define_studies(values: flags.FlagValues) -> None:
    """Defines the flags of a command that compares studies."""
    flags.DEFINE_string('by', 'params', 'What the models should agree in, as for match.', flag_values=values)
    define_strictness(values)
    flags.DEFINE_string('storage', None, 'The database of the studies, if they are in one.', flag_values=values)
    define_platform(values)


def define_strictness(values: flags.FlagValues) -> None:
    """Defines the flags of a command that compares."""
    flags.DEFINE_float('tolerance', 0.01, 'How far sizes may be off, as a share.', lower_bound=0.0, flag_values=values)
    flags.DEFINE_bool('strict', False, 'Refuse to compare what is not matched.', flag_values=values)
    define_format(values)


def define_platform(values: flags.FlagValues) -> None:
    """Defines the flags of a command that computes in one process."""
    flags.DEFINE_string('platform', None, 'cpu, cuda or tpu; the best there is by default.', flag_values=values)
    flags.DEFINE_integer(
        'cpu_devices', None, 'Virtual CPU devices, to try a mesh out.', lower_bound=1, flag_values=values
    )
    flags.DEFINE_string(
        'compilation_cache',
        '~/.cache/attnlab/compiled',
        'Where compiled programs are kept between runs; empty for nowhere.',
        flag_values=values,
    )


def define_devices(values: flags.FlagValues) -> None:
    """Defines the flags of a command that computes in one process or several."""
    define_platform(values)
    flags.DEFINE_bool('distributed', False, 'Join the processes that the cluster started.', flag_values=values)
    flags.DEFINE_string('coordinator', None, 'HOST:PORT of process 0, where no cluster gives it.', flag_values=values)
    flags.DEFINE_integer(
        'processes', None, 'How many processes, with --coordinator.', lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer('process', None, 'Which of them this is, from 0.', lower_bound=0, flag_values=values)


def start_platform(values: flags.FlagValues) -> None:
    """Starts JAX as the flags of `define_platform` say."""
    from attnlab.train.devices import start

    start(platform=values.platform, cpu_devices=values.cpu_devices, compilation_cache=values.compilation_cache)


def start_devices(values: flags.FlagValues) -> None:
    """Starts JAX as the flags of `define_devices` say."""
    from attnlab.train.devices import start

    start(
        platform=values.platform,
        cpu_devices=values.cpu_devices,
        compilation_cache=values.compilation_cache,
        distributed=values.distributed,
        coordinator=values.coordinator,
        processes=values.processes,
        process=values.process,
    )
