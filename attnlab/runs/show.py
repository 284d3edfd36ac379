"""`attnlab show`: what a run was."""

import json
import pathlib

from rich.console import Console
from rich.table import Table

from attnlab import config as configs
from attnlab.errors import UserError
from attnlab.train.report import read_lines
from attnlab.train.run import flatten


def show_run(workdir: pathlib.Path, console: Console) -> None:
    """Prints a run's config, how it was started, its numbers and its checkpoints."""
    if not (workdir / 'config.json').exists():
        raise UserError(f'{workdir} is not a run: it holds no config.json')
    config = configs.load(workdir / 'config.json')
    console.print(_pairs('config', flatten(config)))
    if (workdir / 'run.json').exists():
        starts = json.loads((workdir / 'run.json').read_text())['starts']
        facts = flatten({name: value for name, value in starts[-1].items() if name != 'implementations'})
        console.print(_pairs(f'last of {len(starts)} start{"s" if len(starts) > 1 else ""}', facts))
        for entry in starts[-1]['implementations']:
            console.print(f'{entry["mixer"]} runs {entry["core"]} as {entry["implementation"]}')
    last: dict[str, object] = {}
    for line in read_lines(workdir / 'metrics.jsonl'):
        last |= line
    console.print(_pairs('last of each metric', last))
    saved = sorted(int(path.name) for path in (workdir / 'checkpoints').glob('*') if path.name.isdecimal())
    console.print(f'checkpoints: {", ".join(map(str, saved)) or "none"} of {config.steps} steps')


def _pairs(title: str, values: dict[str, object]) -> Table:
    table = Table(title=title, title_justify='left', show_header=False)
    table.add_column(overflow='fold')
    table.add_column(overflow='fold')
    for name, value in values.items():
        table.add_row(name, f'{value:.6g}' if isinstance(value, float) else str(value))
    return table
