"""`attnlab show`: what a run was, and how far it came."""

import pathlib

from attnlab.commands.arguments import asks_for_help
from attnlab.errors import UserError

USAGE = 'usage: attnlab show RUN'


def main(argv: list[str]) -> int:
    """Runs the command."""
    if asks_for_help(argv):
        print(USAGE)
        return 0
    if len(argv) != 1 or argv[0].startswith('-'):
        raise UserError(USAGE)
    from rich.console import Console

    from attnlab.runs.show import show_run

    show_run(pathlib.Path(argv[0]), Console())
    return 0
