"""Studies side by side, with equal effort and equal size, or with a head that says in what they are not equal."""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from attnlab import config as configs
from attnlab.compare.equality import unmatched
from attnlab.compare.intervals import Interval, area, best, bootstrap, mean, top_quarter
from attnlab.compare.measures import measure
from attnlab.errors import UserError
from attnlab.runs.record import Record, read_record
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
class StudyResult:
    """What the trials of one study reached.

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

    @functools.cached_property
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
    rows: tuple[StudyResult, ...]
    reasons: tuple[str, ...]

    @property
    def head(self) -> str:
        """What stands above the table."""
        if self.reasons:
            return f'NOT MATCHED: {"; ".join(self.reasons)}'
        return f'matched by {self.by} within {self.tolerance:.1%}; same space, trials, seeds and tokens'


def compare(folders: Sequence[pathlib.Path], by: str, tolerance: float, storage: str | None = None) -> Comparison:
    """Reads studies. Raises `UserError` for a folder that is none, or two of one name."""
    return compare_studies(open_studies(folders, storage), by, tolerance, storage)


def open_studies(folders: Sequence[pathlib.Path], storage: str | None = None) -> list[Study]:
    """Opens studies to compare. Raises `UserError` for a folder that is none, or two of one name."""
    studies = [open_study(folder, storage) for folder in folders]
    names = [name_of(study) for study in studies]
    if len(set(names)) != len(names):
        raise UserError(f'two of the studies are called the same: {", ".join(names)}')
    return studies


def name_of(study: Study) -> str:
    """That of its folder."""
    return study.folder.absolute().name


def compare_studies(studies: Sequence[Study], by: str, tolerance: float, storage: str | None) -> Comparison:
    """Compares open studies."""
    names = [name_of(study) for study in studies]
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


def cells(row: StudyResult) -> list[str]:
    """A row of the table, as text."""
    counts = '/'.join(str(sum(point.state == state for point in row.points)) for state in STATES.values())
    found = row.statistics
    shown = [shown_interval(found[name]) if name in found else '' for name in COLUMNS]
    return [row.name, shown_size(row.size), f'{row.flops:.3g}', counts, *shown]


COLUMNS = ('best', 'top quarter', 'area', 'confirmed')


def shown_size(size: float) -> str:
    """A size by any measure: what is counted with every digit, what is timed with few."""
    return f'{size:,.0f}' if size == int(size) else f'{size:,.6g}'


def shown_interval(interval: Interval) -> str:
    """A number and its interval."""
    return f'{interval.value:.4g} [{interval.low:.4g}, {interval.high:.4g}]'


def shown_config(study: Study) -> ConfigDict:
    """The config of the trial that stands for the study: its best, or what all start from before there is one."""
    best = study.best()
    return study.sweep.base if best is None else study.sweep.config(best.number, study.drawn(best))


def shown_record(study: Study) -> Record | None:
    """What that trial wrote down of its model, or another where it left nothing; `None` before one has started."""
    best = study.best()
    numbers = [trial.number for trial in study.trials()]
    for number in numbers if best is None else [best.number, *numbers]:
        if (study.workdir(number) / 'run.json').exists():
            return read_record(study.workdir(number))
    return None


def measured_by(study: Study, record: Record | None, by: str) -> float:
    """The size of a study's model by a measure: as it was recorded, else measured on the model, built here."""
    if record is not None:
        if by == 'params':
            return float(record.parameters)
        if by == 'train_flops':
            return record.flops_per_token
        known = {f'state_bytes@{length}': size for length, size in record.state_bytes.items()}
        if by in known:
            return float(known[by])
    return measure(by)(prepare(shown_config(study)))


def tokens_of(study: Study) -> int:
    """Tokens that one trial trains on, if it runs to the end."""
    base = study.sweep.base
    return base.steps * base.batch_size * base.length


def _row(name: str, study: Study, by: str, storage: str | None) -> StudyResult:
    record = shown_record(study)
    return StudyResult(
        name=name,
        size=measured_by(study, record, by),
        flops=measured_by(study, record, 'train_flops') * tokens_of(study) * study.sweep.trials,
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
    names: Sequence[str], studies: Sequence[Study], rows: Sequence[StudyResult], by: str, tolerance: float
) -> list[str]:
    reasons = [f'{name} is not finished' for name, study in zip(names, studies, strict=True) if not study.finished()]
    first: Any = configs.load(studies[0].folder / 'sweep.json')
    for name, study in zip(names[1:], studies[1:], strict=True):
        differing = differences(first, configs.load(study.folder / 'sweep.json'))
        others = [line for line in differing if not line.startswith(MODEL)]
        reasons += [f'{name} has another sweep than {names[0]}: {line}' for line in others[:3]]
    if unmatched([row.size for row in rows], tolerance):
        sizes = ', '.join(f'{row.name} {shown_size(row.size)}' for row in rows)
        reasons.append(f'{by} differs by more than {tolerance:.1%}: {sizes}')
    return reasons
