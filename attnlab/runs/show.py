"""`attnlab show`: what a run was."""

import pathlib

from rich.console import Console
from rich.table import Table

from attnlab.train.report import read_lines
from attnlab.train.run import flatten, saved_config
from attnlab.train.run import starts as run_starts


def show_run(workdir: pathlib.Path, console: Console) -> None:
    """Prints a run's numbers and checkpoints, how it was started, and its config."""
    config, starts = saved_config(workdir), run_starts(workdir)
    last: dict[str, object] = {}
    for line in read_lines(workdir / 'metrics.jsonl'):
        last |= line
    console.print(_pairs('last of each metric', last))
    saved = sorted(int(path.name) for path in (workdir / 'checkpoints').glob('*') if path.name.isdecimal())
    console.print(f'checkpoints: {", ".join(map(str, saved)) or "none"} of {config.steps} steps')
    if starts:
        facts = flatten({name: value for name, value in starts[-1].items() if name != 'implementations'})
        console.print(_pairs(f'last of {len(starts)} start{"s" if len(starts) > 1 else ""}', facts))
        for entry in starts[-1]['implementations']:
            console.print(f'{entry["mixer"]} runs {entry["core"]} as {entry["implementation"]}')
    console.print(_pairs('config', flatten(config)))


def _pairs(title: str, values: dict[str, object]) -> Table:
    table = Table(title=title, title_justify='left', show_header=False)
    table.add_column(overflow='fold')
    table.add_column(overflow='fold')
    for name, value in values.items():
        table.add_row(name, f'{value:.6g}' if isinstance(value, float) else str(value))
    return table
