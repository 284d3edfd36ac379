"""`attnlab show`: what a run was, and how far it came."""

import pathlib

from absl import flags

from attnlab.commands.arguments import define_format, parsed, printing
from attnlab.errors import UserError


def main(argv: list[str]) -> int:
    """Runs the command."""
    runs = [word for word in argv if not word.startswith('-')]
    values = flags.FlagValues()
    define_format(values)
    if not parsed(values, [word for word in argv if word.startswith('-')], 'show RUN'):
        return 0
    if len(runs) != 1:
        raise UserError('usage: attnlab show RUN [--format=FORMAT]')
    from attnlab.runs.show import show_run

    with printing(values) as printer:
        show_run(pathlib.Path(runs[0]), printer)
    return 0
