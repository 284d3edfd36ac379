"""Studies side by side, with equal effort and equal size, or with a head that says in what they are not equal."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from attnlab import config as configs
from attnlab.analysis.match import MEASURES, measure, unmatched
from attnlab.analysis.report.summary import Interval, area, best, bootstrap, mean, top_quarter
from attnlab.errors import UserError
from attnlab.sweep.study import Study, open_study
from attnlab.train.run import differences
from attnlab.train.setup import prepare

RATE = 'optimizer.peak_lr'
MODEL = 'base.model'
"""What of a sweep may differ between studies that are compared."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One trial: its learning rate, its seed, and its value; `None` for one that failed."""

    rate: float
    seed: int
    state: str
    value: float | None


@dataclasses.dataclass(frozen=True)
class Row:
    """One study.

    Attributes:
      name: of its folder.
      size: of its model, by the measure asked for.
      flops: of all its trials, had they run to the end.
      points: its trials.
      goal: 'min' or 'max'.
      confirmed: the winner's values with fresh seeds.
    """

    name: str
    size: float
    flops: float
    points: tuple[Point, ...]
    goal: str
    confirmed: tuple[float, ...]

    def statistics(self) -> dict[str, Interval]:
        """Best, top quarter, area under the learning-rate curve and, where there is one, the confirmation.

        A failed trial counts as the worst of those that did not fail, a pruned one with what it had when it was pruned.
        """
        sign = 1.0 if self.goal == 'min' else -1.0
        known = [sign * point.value for point in self.points if point.value is not None]
        if not known:
            return {}
        rates = [point.rate for point in self.points]
        values = [max(known) if point.value is None else sign * point.value for point in self.points]
        named = {'best': best, 'top quarter': top_quarter, 'area': area}
        found = {name: bootstrap(statistic, rates, values) for name, statistic in named.items()}
        if self.confirmed:
            found['confirmed'] = bootstrap(mean, self.confirmed, [sign * value for value in self.confirmed])
        return found if self.goal == 'min' else {name: interval.negated() for name, interval in found.items()}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Rows, and what makes them unequal: nothing, if they may be compared."""

    metric: str
    by: str
    tolerance: float
    rows: tuple[Row, ...]
    reasons: tuple[str, ...]

    @property
    def head(self) -> str:
        """What stands above the table."""
        if self.reasons:
            return f'NOT MATCHED: {"; ".join(self.reasons)}'
        return f'matched by {self.by} within {self.tolerance:.1%}; same space, trials, seeds and tokens'


def compare(folders: Sequence[pathlib.Path], by: str, tolerance: float, storage: str | None = None) -> Comparison:
    """Reads studies. Raises `UserError` for a folder that is none, or two of one name."""
    studies = [open_study(folder, storage) for folder in folders]
    names = [study.folder.absolute().name for study in studies]
    if len(set(names)) != len(names):
        raise UserError(f'two of the studies are called the same: {", ".join(names)}')
    rows = tuple(_row(name, study, by, storage) for name, study in zip(names, studies, strict=True))
    return Comparison(
        studies[0].sweep.metric, by, tolerance, rows, tuple(_reasons(names, studies, rows, by, tolerance))
    )


def print_comparison(comparison: Comparison, console: Console, *, strict: bool = False) -> None:
    """Prints the table; with `strict`, raises `UserError` instead where the rows are not matched."""
    if strict and comparison.reasons:
        raise UserError(f'the studies are not matched: {"; ".join(comparison.reasons)}')
    table = Table(title=comparison.head, title_justify='left', title_style='bold red' if comparison.reasons else 'bold')
    for header in headers(comparison):
        table.add_column(header, justify='left' if header == 'study' else 'right', overflow='fold')
    for row in comparison.rows:
        table.add_row(*(cell.replace(' [', '\n[').replace(', ', ',\n') for cell in cells(row)))
    console.print(table)
    console.print(
        f'{comparison.metric} with 95% bootstrap intervals; trials done/pruned/failed; '
        f'top quarter: median of the best quarter of trials; area: mean over log learning rate'
    )


def headers(comparison: Comparison) -> tuple[str, ...]:
    """The columns of the table; trials are counted as done, pruned and failed."""
    return ('study', comparison.by, 'FLOPs', 'trials', *COLUMNS)


def cells(row: Row) -> list[str]:
    """A row of the table, as text."""
    counts = '/'.join(str(sum(point.state == state for point in row.points)) for state in STATES.values())
    found = row.statistics()
    shown = [shown_interval(found[name]) if name in found else '' for name in COLUMNS]
    return [row.name, f'{row.size:,.6g}', f'{row.flops:.3g}', counts, *shown]


COLUMNS = ('best', 'top quarter', 'area', 'confirmed')


def shown_interval(interval: Interval) -> str:
    """A number and its interval."""
    return f'{interval.value:.4g} [{interval.low:.4g}, {interval.high:.4g}]'


def _row(name: str, study: Study, by: str, storage: str | None) -> Row:
    setup = prepare(study.sweep.base)
    tokens = study.sweep.base.steps * study.sweep.base.batch_size * study.sweep.base.length
    return Row(
        name=name,
        size=measure(by)(setup),
        flops=MEASURES['train_flops'](setup) * tokens * study.sweep.trials,
        points=tuple(_point(study, trial) for trial in study.trials() if trial.state.is_finished()),
        goal=study.sweep.goal,
        confirmed=_confirmed(study, storage),
    )


STATES = {TrialState.COMPLETE: 'done', TrialState.PRUNED: 'pruned', TrialState.FAIL: 'failed'}


def _point(study: Study, trial: FrozenTrial) -> Point:
    settings = study.settings(trial)
    rate = settings.get(RATE, study.sweep.base.optimizer.peak_lr)
    return Point(float(rate), study.sweep.seed(trial.number), STATES[trial.state], trial.value)


def _confirmed(study: Study, storage: str | None) -> tuple[float, ...]:
    folder = study.folder / 'confirm'
    if not (folder / 'sweep.json').exists():
        return ()
    trials = open_study(folder, storage, study).trials()
    return tuple(trial.value for trial in trials if trial.state == TrialState.COMPLETE and trial.value is not None)


def _reasons(
    names: Sequence[str], studies: Sequence[Study], rows: Sequence[Row], by: str, tolerance: float
) -> list[str]:
    reasons = [f'{name} is not finished' for name, study in zip(names, studies, strict=True) if not study.finished()]
    first: Any = configs.load(studies[0].folder / 'sweep.json')
    for name, study in zip(names[1:], studies[1:], strict=True):
        differing = differences(first, configs.load(study.folder / 'sweep.json'))
        told = [line for line in differing if not line.startswith(MODEL)]
        reasons += [f'{name} has another sweep than {names[0]}: {line}' for line in told[:3]]
    if unmatched([row.size for row in rows], tolerance):
        sizes = ', '.join(f'{row.name} {row.size:,.6g}' for row in rows)
        reasons.append(f'{by} differs by more than {tolerance:.1%}: {sizes}')
    return reasons
