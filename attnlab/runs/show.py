"""`attnlab show`: what a run was, its results first."""

import pathlib
import shlex
from collections.abc import Mapping
from typing import Any

from attnlab.config import flatten
from attnlab.errors import UserError
from attnlab.runs.record import newest
from attnlab.tables import Column, Printer, Table, pairs
from attnlab.train.metrics_file import METRICS, read_lines
from attnlab.train.run import saved_config
from attnlab.train.run import starts as run_starts
from attnlab.train.saved import steps_in


def show_run(workdir: pathlib.Path, printer: Printer) -> None:
    """Prints a run's results and checkpoints, how it was started, and its config."""
    config, starts = saved_config(workdir), run_starts(workdir)
    last = newest(read_lines(workdir / METRICS))
    ordered = dict(sorted(last.items(), key=lambda item: item[0].startswith('train/')))
    printer.table(pairs('results', ordered, 'last of each metric'))
    saved = ', '.join(map(str, steps_in(workdir / 'checkpoints')))
    printer.line(f'checkpoints: {saved or "none"} of {config.steps} steps')
    if starts:
        facts = flatten({name: value for name, value in starts[-1].items() if name != 'implementations'})
        facts['command'] = _command(starts[-1], workdir)
        printer.table(pairs('start', facts, f'last of {len(starts)} start{"s" if len(starts) > 1 else ""}'))
        columns = Column('mixer'), Column('core'), Column('implementation')
        rows = [[entry[column.name] for column in columns] for entry in starts[-1]['implementations']]
        printer.table(Table('kernels', columns, rows, 'kernels'))
    printer.table(pairs('config', flatten(config), 'config'))


def _command(start: Mapping[str, Any], workdir: pathlib.Path) -> str:
    command = start.get('command')
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        raise UserError(f'{workdir / "run.json"} is damaged: its last start names no command; put back a copy of it')
    return shlex.join(command)
