"""`attnlab compare RUN...`: one table of runs, as text and as CSV, and one figure."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from attnlab import files
from attnlab.compare.report.runs_page import runs_opening, runs_page
from attnlab.compare.runs import (
    RunResult,
    baselines_of,
    by_task,
    curves,
    distinctly_named,
    equalities,
    equality_summary,
    metrics_of,
    run_result,
    unequal,
)
from attnlab.compare.runs_figure import draw_costs
from attnlab.compare.seeds import mean_curves, over_seeds, seed_groups
from attnlab.errors import UserError
from attnlab.evals.measured import Measured
from attnlab.runs.record import read_record
from attnlab.tables import Column, Interval, Printer, Table, csv_lines, digits, shown

CAPTION = 'state: bytes that decoding keeps at the training length, and at 8 times that; FLOPs: of all training'


def compare_runs(
    folders: Sequence[pathlib.Path],
    out: pathlib.Path,
    printer: Printer,
    *,
    metric: str | None = None,
    tolerance: float = 0.01,
    strict: bool = False,
) -> list[RunResult]:
    """Prints a sentence a task with what is not matched, and one table of runs, and writes them as `index.html` and
    `runs.csv`, with one figure beside them, `runs.png` and `runs.svg`. Runs that differ only in seed are one row, with
    an interval over the seeds.

    Without a `metric` runs of a task are ranked by the first of the usual scores that all of them have. Raises
    `UserError` for what is no run, two runs of one name on one task, runs of one task without a score in common and,
    when `strict`, for those that are not matched.
    """
    records = [read_record(folder) for folder in folders]
    seeds = seed_groups(records)
    found_by = zip(records, metrics_of(records, metric), strict=True)
    results = over_seeds(distinctly_named([run_result(record, name) for record, name in found_by], folders), seeds)
    groups = by_task(results)
    found = {task: equalities(group, tolerance) for task, group in groups.items()}
    wrong = {task: unequal(found[task], group) for task, group in groups.items()}
    if strict and any(wrong.values()):
        listed = (f'{task}: {"; ".join(parts)}' for task, parts in wrong.items() if parts)
        raise UserError(f'the runs are not matched: {"; ".join(listed)}')
    for place, (task, group) in enumerate(groups.items()):
        printer.line(runs_opening(task, group, tolerance, place).sentence)
        if len(group) > 1:
            printer.line(f'Not matched: {"; ".join(wrong[task]) or "nothing"}.')
        printer.line('')
    printer.table(_table(groups))
    printer.line(CAPTION)
    summaries = {task: equality_summary(found[task]) for task in groups}
    for task, summary in summaries.items():
        printer.line(f'{task}, {summary}')
    drawn = {
        (one.task, one.name): mean_curves([curves(records[place], one.metric) for place in places])
        for one, places in zip(results, seeds, strict=True)
    }
    files.write(out / 'index.html', runs_page(groups, summaries, wrong, drawn, tolerance))
    files.write(out / 'runs.csv', runs_csv(groups))
    for suffix in ('png', 'svg'):
        draw_costs(groups, out / f'runs.{suffix}')
    names = ('index.html', *(f'runs.{suffix}' for suffix in ('csv', 'png', 'svg')))
    printer.line(f'written: {", ".join(str(out / name) for name in names)}')
    return results


def _table(groups: Mapping[str, Sequence[RunResult]]) -> Table:
    """A row a run, the best of each task first, then what trivial predictors reach."""
    weighed = any(one.quantized for group in groups.values() for one in group)
    columns = (*COLUMNS, *WEIGHT_COLUMNS) if weighed else COLUMNS
    rows: list[tuple[Any, ...]] = []
    for task, group in groups.items():
        rows += [(task, one.metric, *_values(one), *(_weights(one) if weighed else ())) for one in group]
        unknown = [None] * (len(columns) - len(COLUMNS))
        rows += [(task, group[0].metric, *line, *unknown) for line in baseline_values(group)]
    leading = Column('task', rank=0 if len(groups) > 1 else 5), Column('metric', rank=6)
    return Table('runs', (*leading, *columns), rows, 'runs by task, the best first')


def baseline_values(group: Sequence[RunResult]) -> list[tuple[Any, ...]]:
    """What trivial predictors reach, a row of values each."""
    return [(f'({name})', value, *[None] * (len(COLUMNS) - 2)) for name, value in baselines_of(group).items()]


def _values(one: RunResult) -> tuple[Any, ...]:
    costs = one.parameters, one.state_bytes, one.state_bytes_8x, one.flops, one.tokens_per_second
    return one.titled(one.name), one.measured, one.seeds, *costs


def _weights(one: RunResult) -> tuple[Any, ...]:
    return one.weight_bytes, one.bits


def _score(value: Measured | float) -> str:
    return value.text(4) if isinstance(value, Measured) else f'{value:.4f}'


def _exact_score(value: Measured | float) -> Interval:
    return Interval(value.mean, value.low, value.high) if isinstance(value, Measured) else Interval(value, None, None)


def _state(size: int | None) -> str:
    """Bytes of state; a model that keeps none does not stream."""
    return 'no stream' if size == 0 else shown(size)


COLUMNS = (
    Column('run', prose=True),
    Column('score', _score, right=True, exact=_exact_score),
    Column('seeds', right=True, rank=1),
    Column('parameters', right=True),
    Column('state', _state, right=True, rank=1),
    Column('at 8x', _state, right=True, rank=3),
    Column('FLOPs', digits('.3g'), right=True, rank=2),
    Column('tokens/s', digits(',.0f'), right=True, rank=4),
)


WEIGHT_COLUMNS = Column('weights', right=True), Column('bits', digits('.2f'), right=True)
"""Besides, where runs of few bits are among them."""


def runs_csv(groups: Mapping[str, Sequence[RunResult]]) -> str:
    """Every run with every digit: the fields of a `RunResult` but the settings."""
    fields = [field.name for field in dataclasses.fields(RunResult) if field.name not in ('settings', 'baselines')]
    return csv_lines(fields, ([getattr(one, name) for name in fields] for group in groups.values() for one in group))
