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


def parse_flags(values: flags.FlagValues, argv: Sequence[str], command: str) -> None:
    """Gives flags the values of a command line. Raises `UserError` for a wrong one, and for what is no flag."""
    try:
        rest = values(['attnlab', *argv])[1:]
    except flags.Error as error:
        raise _wrong_flag(str(error)) from error
    if rest:
        raise UserError(f'{command} takes no argument {rest[0]!r}; flags are written --name=value')


def _wrong_flag(said: str) -> UserError:
    """What absl says of flags, in our words where it quotes Python's of what is no number."""
    number = NO_NUMBER.match(said)
    if number is None:
        return UserError(said)
    name, given, kind = number.groups()
    right = NUMBERS.get(name, 'a whole number' if kind.startswith('invalid') else 'a number')
    return UserError(f'--{name} is {given!r}; it must be {right}')
