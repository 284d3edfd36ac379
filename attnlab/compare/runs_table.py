"""`attnlab compare RUN...`: one table of runs, as text and as CSV, and one figure."""

import csv
import dataclasses
import io
import pathlib
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from attnlab import files
from attnlab.compare.runs import (
    RunResult,
    by_task,
    distinctly_named,
    equalities,
    equality_summary,
    run_result,
    unequal,
)
from attnlab.compare.runs_figure import draw_costs
from attnlab.errors import UserError
from attnlab.runs.record import read_record

HEADERS = ('score', 'parameters', 'state', 'at 8x', 'FLOPs', 'tokens/s')
CAPTION = 'state: bytes that decoding keeps at the training length, and at 8 times that; FLOPs: of all training'

WIDEST = 16
"""Characters of a run's name that are not broken in the table."""


def compare_runs(
    folders: Sequence[pathlib.Path],
    out: pathlib.Path,
    console: Console,
    *,
    metric: str | None = None,
    tolerance: float = 0.01,
    strict: bool = False,
) -> list[RunResult]:
    """Prints one table of runs, and writes it as `runs.csv` beside one figure, `runs.png` and `runs.svg`.

    Raises `UserError` for what is no run, two runs of one name on one task and, when `strict`, for runs of one task
    that are not matched.
    """
    results = distinctly_named([run_result(read_record(folder), metric) for folder in folders], folders)
    groups = by_task(results)
    found = {task: equalities(group, tolerance) for task, group in groups.items()}
    wrong = [f'{task}: {"; ".join(parts)}' for task, group in groups.items() if (parts := unequal(found[task], group))]
    if strict and wrong:
        raise UserError(f'the runs are not matched: {"; ".join(wrong)}')
    console.print(_table(groups))
    console.print(CAPTION, highlight=False, soft_wrap=True)
    for task, group in groups.items():
        console.print(f'{task}, {equality_summary(found[task], group)}', highlight=False, soft_wrap=True)
    files.write(out / 'runs.csv', csv_text(groups))
    for suffix in ('png', 'svg'):
        draw_costs(groups, out / f'runs.{suffix}')
    written = ', '.join(str(out / f'runs.{suffix}') for suffix in ('csv', 'png', 'svg'))
    console.print(f'written: {written}', highlight=False, soft_wrap=True)
    return results


def _table(groups: Mapping[str, Sequence[RunResult]]) -> Table:
    """A section a task, under its name and that of its score."""
    table = Table(title='runs by task, the best first', title_justify='left', box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    longest = max(len(one.name) for group in groups.values() for one in group)
    table.add_column('run', min_width=min(longest, WIDEST), overflow='fold')
    for column in HEADERS:
        table.add_column(column, justify='right', overflow='fold')
    for task, group in groups.items():
        table.add_row(f'[bold]{task}[/bold]\n{", ".join(dict.fromkeys(one.metric for one in group))}')
        for line in lines(group):
            table.add_row(*line)
        table.add_section()
    return table


def lines(group: Sequence[RunResult]) -> list[list[str]]:
    """Cells of the table, a line a run: its name, its score, and the costs."""
    return [
        [
            one.name if one.finished else f'{one.name} (not finished)',
            f'{one.score:.4f}',
            f'{one.parameters:,}',
            _state(one.state_bytes),
            _state(one.state_bytes_8x),
            f'{one.flops:.3g}',
            '' if one.tokens_per_second is None else f'{one.tokens_per_second:,.0f}',
        ]
        for one in group
    ]


def csv_text(groups: Mapping[str, Sequence[RunResult]]) -> str:
    """Every run with every digit: the fields of a `RunResult` but the settings."""
    fields = [field.name for field in dataclasses.fields(RunResult) if field.name != 'settings']
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow(fields)
    writer.writerows([getattr(one, name) for name in fields] for group in groups.values() for one in group)
    return text.getvalue()


def _state(size: int) -> str:
    """Bytes of state; a model that keeps none does not stream."""
    return f'{size:,}' if size else 'no stream'
