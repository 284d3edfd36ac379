"""How the flags of a command are read, and what is said of one that is wrong. Nothing heavy is imported here."""

import re
from collections.abc import Sequence

from absl import flags

from attnlab.errors import UserError

NO_NUMBER = re.compile(
    r'flag --(\w+)=(.*): (invalid literal for int\(\) with base \d+|could not convert string to float): ', re.DOTALL
)

NUMBERS = {
    'step': 'the step of a checkpoint, a whole number; without --step the newest is taken',
    'from_step': 'the step of a checkpoint, a whole number; without --from_step the best fit is taken',
}
"""What flags must be that mean more than a number."""

MAY_BE_EMPTY = ('answer', 'compilation_cache', 'prompt')
"""Flags of texts that may say something when they are empty; so do lists that are not empty by default."""


def parse_flags(values: flags.FlagValues, argv: Sequence[str], command: str) -> None:
    """Gives flags the values of a command line. Raises `UserError` for a wrong or empty one, and no flag."""
    try:
        rest = values(['attnlab', *argv])[1:]
    except flags.Error as error:
        raise _wrong_flag(str(error)) from error
    if rest:
        raise UserError(f'{command} takes no argument {rest[0]!r}; flags are written --name=value')
    for name in values:
        flag = values[name]
        empty = flag.value == '' or (flag.value == [] and not flag.default)
        if flag.present and empty and name not in MAY_BE_EMPTY:
            # As of a variable of the shell that is not set, which is not the same as no flag.
            raise UserError(f'--{name} is empty; give it a value, or leave it out')


def _wrong_flag(said: str) -> UserError:
    """What absl says of flags, in our words where it quotes Python's of what is no number."""
    number = NO_NUMBER.match(said)
    if number is None:
        return UserError(said)
    name, given, kind = number.groups()
    right = NUMBERS.get(name, 'a whole number' if kind.startswith('invalid') else 'a number')
    return UserError(f'--{name} is {given!r}; it must be {right}')
