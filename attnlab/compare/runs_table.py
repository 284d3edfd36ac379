"""`attnlab compare RUN...`: one table of runs, as text and as CSV, and one figure."""

import csv
import dataclasses
import io
import pathlib
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnlab import files
from attnlab.compare.report.runs_page import runs_opening, runs_page
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
from attnlab.runs.record import Record, read_record

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
    """Prints a sentence a task and one table of runs, and writes them as `index.html` and `runs.csv`, with one figure
    beside them, `runs.png` and `runs.svg`.

    Raises `UserError` for what is no run, two runs of one name on one task and, when `strict`, for runs of one task
    that are not matched.
    """
    records = [read_record(folder) for folder in folders]
    results = distinctly_named([run_result(record, metric) for record in records], folders)
    groups = by_task(results)
    found = {task: equalities(group, tolerance) for task, group in groups.items()}
    wrong = [f'{task}: {"; ".join(parts)}' for task, group in groups.items() if (parts := unequal(found[task], group))]
    if strict and wrong:
        raise UserError(f'the runs are not matched: {"; ".join(wrong)}')
    for place, (task, group) in enumerate(groups.items()):
        opening = runs_opening(task, group, tolerance, place)
        console.print(f'{opening.sentence}\n', highlight=False, markup=False, soft_wrap=True)
    console.print(_table(groups))
    console.print(CAPTION, highlight=False, soft_wrap=True)
    summaries = {task: equality_summary(found[task], group) for task, group in groups.items()}
    for task, summary in summaries.items():
        console.print(f'{task}, {summary}', highlight=False, markup=False, soft_wrap=True)
    curves = {(one.task, one.name): _curves(record, one.metric) for one, record in zip(results, records, strict=True)}
    files.write(out / 'index.html', runs_page(groups, summaries, curves, tolerance))
    files.write(out / 'runs.csv', csv_text(groups))
    for suffix in ('png', 'svg'):
        draw_costs(groups, out / f'runs.{suffix}')
    names = ('index.html', *(f'runs.{suffix}' for suffix in ('csv', 'png', 'svg')))
    written = ', '.join(str(out / name) for name in names)
    console.print(f'written: {written}', highlight=False, soft_wrap=True)
    return results


def _curves(record: Record, metric: str) -> dict[str, Sequence[tuple[int, float]]]:
    """The score and the training loss of a run over steps, where they have more than one value."""
    found = {name: record.curve(name) for name in dict.fromkeys((metric, 'train/loss'))}
    return {name: points for name, points in found.items() if len(points) > 1}


def _table(groups: Mapping[str, Sequence[RunResult]]) -> Table:
    """A section a task, under its name and that of its score."""
    table = Table(title='runs by task, the best first', title_justify='left', box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    longest = max(len(one.name) for group in groups.values() for one in group)
    table.add_column('run', min_width=min(longest, WIDEST), overflow='fold')
    for column in HEADERS:
        table.add_column(column, justify='right', overflow='fold')
    for task, group in groups.items():
        table.add_row(f'[bold]{escape(task)}[/bold]\n{", ".join(dict.fromkeys(one.metric for one in group))}')
        for line in (*lines(group), *baseline_lines(group)):
            table.add_row(*map(escape, line))
        table.add_section()
    return table


def lines(group: Sequence[RunResult]) -> list[list[str]]:
    """Cells of the table, a line a run: its name, its score, and the costs."""
    return [
        [
            one.name if one.finished else f'{one.name} (not finished)',
            one.measured.text(4),
            f'{one.parameters:,}',
            _state(one.state_bytes),
            _state(one.state_bytes_8x),
            f'{one.flops:.3g}',
            '' if one.tokens_per_second is None else f'{one.tokens_per_second:,.0f}',
        ]
        for one in group
    ]


def baseline_lines(group: Sequence[RunResult]) -> list[list[str]]:
    """What trivial predictors reach, a line each."""
    found = {name: value for one in group for name, value in one.baselines.items()}
    return [[f'({name})', f'{value:.4f}', *[''] * (len(HEADERS) - 1)] for name, value in found.items()]


def csv_text(groups: Mapping[str, Sequence[RunResult]]) -> str:
    """Every run with every digit: the fields of a `RunResult` but the settings."""
    fields = [field.name for field in dataclasses.fields(RunResult) if field.name not in ('settings', 'baselines')]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow(fields)
    writer.writerows([getattr(one, name) for name in fields] for group in groups.values() for one in group)
    return text.getvalue()


def _state(size: int) -> str:
    """Bytes of state; a model that keeps none does not stream."""
    return f'{size:,}' if size else 'no stream'
