"""`attnlab show`: what a run was, and how far it came."""

import pathlib

from attnlab.errors import UserError


def main(argv: list[str]) -> int:
    """Runs the command."""
    if len(argv) != 1 or argv[0].startswith('-'):
        raise UserError('usage: attnlab show RUN')
    from rich.console import Console

    from attnlab.runs.show import show_run

    show_run(pathlib.Path(argv[0]), Console())
    return 0
