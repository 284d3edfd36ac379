"""Studies side by side: equal effort and equal size, or a heading that says what differs."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from optuna.trial import FrozenTrial, TrialState

from attnlab import config as configs
from attnlab.compare.baselines import Baselines, trivial_scores
from attnlab.compare.costs import matched_cost, shown_size
from attnlab.compare.equality import unmatched
from attnlab.compare.intervals import area, expected_best, over_trials, top_quarter
from attnlab.compare.measures import measure
from attnlab.compare.report.opening import Opening, Scored
from attnlab.compare.runs import SHOWN, task_name
from attnlab.errors import UserError
from attnlab.evals.measured import SHARE, Measured, is_share, of_seeds
from attnlab.runs.record import Record, read_record
from attnlab.sweep.splits import said_of, without_own_split
from attnlab.sweep.study import STATES, Study, read_confirmation, read_study
from attnlab.tables import Column, Interval, Printer, Table, digits
from attnlab.train.run import data_hashes, differences
from attnlab.train.setup import prepare

RATE = 'optimizer.peak_lr'
MODEL = ('base.model', 'base.rounding')
"""What of a sweep may differ between studies that are compared."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One trial.

    Attributes:
      rate: its learning rate.
      seed: of the run.
      state: 'done', 'pruned' or 'failed'.
      value: its final metric; `None` for one that failed.
      steps: how many it ran.
      even: its metric at the last step that every trial of all studies reached; `None` where that is its final one, NaN
        where it ran on and had reported nothing up to there.
      noise: the standard deviation that the finite test set gives its final metric; `None` where it is not known.
    """

    rate: float
    seed: int
    state: str
    value: float | None
    steps: int = 0
    even: float | None = None
    noise: float | None = None

    @property
    def ended(self) -> bool:
        """Whether it came to its end, with a value."""
        return self.state == 'done' and self.value is not None


@dataclasses.dataclass(frozen=True)
class StudyResult:
    """The results of the trials of one study.

    Attributes:
      name: of its folder.
      size: of its model, by the measure asked for.
      flops: of the steps that its trials took, pruned and failed ones too.
      points: its trials.
      goal: 'min' or 'max'.
      confirmed: the winner's values with fresh seeds.
      tokens: that its trials were trained on.
      noise: the standard deviation that the finite test set gives a confirmed value, the root mean square of that
        of the confirming runs, or that of the best trial where these recorded none; `None` where it is not known.
      metric: what the values of trials are of.
      score: what the confirmed ones are of.
      counted: whether the steps that trials took are known; without, there are no tokens, operations and area.
      failed: how many of the runs that confirm the winner failed.
    """

    name: str
    size: float
    flops: float
    points: tuple[Point, ...]
    goal: str
    confirmed: tuple[float, ...]
    tokens: int = 0
    noise: float | None = None
    metric: str = ''
    score: str = ''
    counted: bool = True
    failed: int = 0

    @functools.cached_property
    def statistics(self) -> dict[str, Measured]:
        """Best, expected best, top quarter, area under the learning-rate curve and, where there is one, the
        confirmation.

        Best is the best of those that came to their end, as it is of the study, and of all where none did. Otherwise a
        failed trial counts as the worst of those that did not fail, a pruned one with its value when it was pruned; the
        area uses values at one step, the last that all trials reached, and the worst of these; there is none where a
        trial has no value there. A confirmation of which a run failed is the mean of the others, without an interval.
        Intervals over trials have the noise of the finite test set where it is known of every trial; a failed one has
        the greatest.
        """
        sign = 1.0 if self.goal == 'min' else -1.0
        if all(point.value is None for point in self.points):
            return {}
        rates = [point.rate for point in self.points]
        values = _with_worst([point.value for point in self.points], sign)
        ended = [value for value, point in zip(values, self.points, strict=True) if point.ended] or values
        even = _with_worst(
            [point.value if None in (point.value, point.even) else point.even for point in self.points], sign
        )
        found = {
            'best': Measured(min(ended), None, None, 1, 'one'),
            'expected best': over_trials(expected_best, rates, values, self._noise),
            'top quarter': over_trials(top_quarter, rates, values, self._noise),
        }
        if self.counted and not np.isnan(even).any():
            found['area'] = over_trials(area, rates, even, self._noise)
        if self.confirmed:
            found['confirmed'] = self._of_confirmed(sign)
        found = found if self.goal == 'min' else {name: one.negated() for name, one in found.items()}
        return {
            name: one.within(*SHARE) if is_share(self.score if name == 'confirmed' else self.metric) else one
            for name, one in found.items()
        }

    @property
    def at_an_end(self) -> bool:
        """Whether the best of its trials is at the least or the greatest rate tried, and at none between as good.

        A share of 1 is not: no rate has more.
        """
        sign = 1.0 if self.goal == 'min' else -1.0
        done = [
            (sign * point.value, point.rate)
            for point in self.points
            if point.state == 'done' and point.value is not None
        ]
        rates = {point.rate for point in self.points}
        least = min((value for value, _ in done), default=None)
        if least is None or len(rates) == 1 or (is_share(self.metric) and least == -1.0):
            return False
        return all(rate in (min(rates), max(rates)) for value, rate in done if value == least)

    def _of_confirmed(self, sign: float) -> Measured:
        """The mean of the confirming runs that are done; their spread does not show that others failed."""
        values = [sign * value for value in self.confirmed]
        if self.failed:
            return Measured(float(np.mean(values)), None, None, len(values), 'survivors', self.noise)
        return of_seeds(values, self.noise)

    @property
    def _noise(self) -> list[float] | None:
        """The noise of the test set, by trial; `None` where it is not known of all that did not fail."""
        known = [point.noise for point in self.points if point.value is not None and point.noise is not None]
        if len(known) < sum(point.value is not None for point in self.points):
            return None
        return [max(known) if point.noise is None else point.noise for point in self.points]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Studies side by side.

    Attributes:
      metric: that they are compared by.
      by: the measure that their models are matched by.
      tolerance: within which.
      rows: the studies.
      reasons: what makes them unequal: nothing, if they may be compared.
      sentence: what is best, at what cost, and whether the intervals say so.
      task: what the first was trained on.
      baselines: what trivial predictors reach by the metric that studies are ranked by, by name.
      reported: the metric of confirmed runs, where it is another; empty: `metric`.
      without_own_split: the studies that choose on the examples that they report, under the name of another split.
    """

    metric: str
    by: str
    tolerance: float
    rows: tuple[StudyResult, ...]
    reasons: tuple[str, ...]
    sentence: str = ''
    task: str = ''
    baselines: Baselines = dataclasses.field(default_factory=dict)
    reported: str = ''
    without_own_split: tuple[str, ...] = ()

    @property
    def score(self) -> str:
        """The metric of confirmed runs."""
        return self.reported or self.metric

    @property
    def head(self) -> str:
        """The heading of the table."""
        if self.reasons:
            return f'NOT MATCHED: {"; ".join(self.reasons)}'
        spent = [row.tokens for row in self.rows]
        same = 'same space, trials, seeds and tokens'
        if not all(row.counted for row in self.rows):
            same = 'same space, trials and seeds; tokens spent are not known'
        elif len(set(spent)) > 1:
            same = f'same space, trials and seeds, but {min(spent):.3g} to {max(spent):.3g} tokens spent'
        return f'matched by {self.by} within ±{self.tolerance:.1%}; {same}'

    @property
    def left_out(self) -> str:
        """What the intervals over trials do not have, in a sentence; empty where they have it, or there are none."""
        over = [name for row in self.rows for name, one in row.statistics.items() if _noiseless(one)]
        names = [name for name in RANKS if name in over]
        if not names:
            return ''
        listed = ' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))
        return (
            f'Intervals of {listed} are over trials alone: they leave out the noise of the finite test set, which was '
            'not recorded of every trial.'
        )

    @property
    def on_the_same(self) -> str:
        """Which studies choose and report on the same examples, in a sentence; empty where none does."""
        names = self.without_own_split
        if not names:
            return ''
        every = len(names) == len(self.rows) > 1
        which = 'Every study' if every else ', '.join(names)
        does = 'chooses and reports' if every or len(names) == 1 else 'choose and report'
        return said_of(f'{which} {does}', self.task)

    @property
    def at_an_end(self) -> str:
        """Which studies are best at an end of the rates tried, in a sentence; empty where none is."""
        names = [row.name for row in self.rows if row.at_an_end]
        if not names:
            return ''
        which = 'every study' if len(names) == len(self.rows) > 1 else ', '.join(names)
        return f'Best at an end of the rates tried, beyond which there may be better: {which}.'


def _with_worst(values: Sequence[float | None], sign: float) -> list[float]:
    """Values times the sign, the greatest of them where there is none."""
    worst = max(sign * value for value in values if value is not None)
    return [worst if value is None else sign * value for value in values]


def _noiseless(one: Measured) -> bool:
    return one.kind == 'trials' and one.noise is None


def compare(folders: Sequence[pathlib.Path], by: str, tolerance: float, storage: str | None = None) -> Comparison:
    """Reads studies. Raises `UserError` for a folder that is none, or two of one name."""
    return compare_studies(open_studies(folders, storage), by, tolerance, storage)


def open_studies(folders: Sequence[pathlib.Path], storage: str | None = None) -> list[Study]:
    """Opens studies to compare. Raises `UserError` for a folder that is none, or two of one name."""
    studies = [read_study(folder, storage) for folder in folders]
    names = [name_of(study) for study in studies]
    if len(set(names)) != len(names):
        raise UserError(f'two of the studies are called the same: {", ".join(names)}')
    return studies


def name_of(study: Study) -> str:
    """The name of its folder."""
    return study.folder.absolute().name


def compare_studies(studies: Sequence[Study], by: str, tolerance: float, storage: str | None) -> Comparison:
    """Compares open studies."""
    names = [name_of(study) for study in studies]
    step = _common_step(studies)
    rows = tuple(_row(name, study, by, storage, step) for name, study in zip(names, studies, strict=True))
    sweep, shown = studies[0].sweep, shown_config(studies[0])
    found = Comparison(
        metric=sweep.metric,
        by=by,
        tolerance=tolerance,
        rows=rows,
        reasons=tuple(_reasons(names, studies, rows, by, tolerance)),
        task=task_name(sweep.base.task),
        baselines=trivial_scores(sweep.base, ranked_metric(rows, sweep.metric, sweep.score)),
        reported=sweep.reported,
        without_own_split=tuple(
            name for name, study in zip(names, studies, strict=True) if without_own_split(study.sweep)
        ),
    )
    records = [shown_record(study) for study in studies]
    costs = [{} if record is None else _costs(study, record) for study, record in zip(studies, records, strict=True)]
    matched = matched_cost(by, shown.length)
    return with_sentence(found, costs, [cost for cost in NAMED if cost == matched])


NAMED = ('state_bytes', 'flops')
"""What the sentence may name beside a score: bytes of state at the training length, operations of training a trial."""


def with_sentence(
    comparison: Comparison, costs: Sequence[Mapping[str, float | None]], matched: Sequence[str] = ()
) -> Comparison:
    """The comparison with its sentence, from its rows and what each of them costs, by the names of `NAMED`.

    `matched` are the costs that were made equal, which are not named.
    """
    statistic = scored(comparison.rows)
    entries = [
        Scored(row.name, row.statistics[statistic], {name: cost[name] for name in NAMED if name in cost})
        for row, cost in zip(comparison.rows, costs, strict=True)
        if row.statistics
    ]
    opening = Opening(
        name='score',
        entries=entries,
        looks={},
        metric=scored_metric(comparison.rows, comparison.metric, comparison.score),
        higher=comparison.rows[0].goal == 'max',
        share=is_share(ranked_metric(comparison.rows, comparison.metric, comparison.score)),
        task=comparison.task,
        matched=matched,
        tolerance=comparison.tolerance,
        baselines=comparison.baselines,
    )
    return dataclasses.replace(comparison, sentence=opening.sentence)


def scored(rows: Sequence[StudyResult]) -> str:
    """The statistic that studies are ranked by."""
    return 'confirmed' if all('confirmed' in row.statistics for row in rows if row.statistics) else 'best'


def _costs(study: Study, record: Record) -> dict[str, float | None]:
    """Bytes of state at the training length, and operations of the training of the trial that represents the study."""
    return {
        'state_bytes': measured_by(study, record, _state(study)),
        'flops': measured_by(study, record, 'train_flops') * tokens_of(study),
    }


def _state(study: Study) -> str:
    return f'state_bytes@{shown_config(study).length}'


def ranked_metric(rows: Sequence[StudyResult], metric: str, score: str) -> str:
    """The metric that studies are ranked by, of that of trials and that of confirmed runs."""
    return score if scored(rows) == 'confirmed' else metric


def scored_metric(rows: Sequence[StudyResult], metric: str, reported: str) -> str:
    """What the score of studies is called, by the metric of trials and that of confirmed runs."""
    return f'confirmed {reported}' if scored(rows) == 'confirmed' else f'best trial’s {metric}'


def study_table(comparison: Comparison) -> Table:
    """A row a study, then one a trivial predictor, its score in the column that studies are ranked by.

    Trials are counted as done, pruned and failed.
    """
    columns = (
        Column('study'),
        Column(comparison.by, _size, right=True, rank=1),
        Column('FLOPs', digits('.3g'), right=True, rank=3),
        Column('tokens', digits('.3g'), right=True, rank=4),
        Column('trials', rank=5),
        *(Column(name, _statistic, True, rank, True, _interval) for name, rank in RANKS.items()),
    )
    rows: list[tuple[Any, ...]] = [
        (row.name, row.size, *_spent(row), '/'.join(counts(row)), *(row.statistics.get(name) for name in RANKS))
        for row in comparison.rows
    ]
    empty = [None] * (len(columns) - 1 - len(RANKS))
    rows += [
        (f'({name})', *empty, *(value if statistic == scored(comparison.rows) else None for statistic in RANKS))
        for name, value in comparison.baselines.items()
    ]
    return Table('studies', columns, rows, comparison.head, warning=bool(comparison.reasons))


def print_comparison(comparison: Comparison, printer: Printer, *, strict: bool = False) -> None:
    """Prints the table; with `strict`, raises `UserError` instead where the rows are not matched."""
    if strict and comparison.reasons:
        raise UserError(f'the studies are not matched: {"; ".join(comparison.reasons)}')
    for said in filter(None, (comparison.sentence, comparison.on_the_same)):
        printer.line(f'{said}\n')
    printer.table(study_table(comparison))
    confirmed = f', confirmed runs by {comparison.reported}' if comparison.reported else ''
    printer.line(
        f'{comparison.metric}{confirmed}; tokens and FLOPs of the steps taken; trials done/pruned/failed; best: one '
        'trial; expected best: of a quarter of the trials; top quarter: median of the best quarter; area: mean over '
        'log learning rate, at equal steps; these with intervals over trials (bootstrap, 88 to 96% in simulation) and '
        "the noise of the test set; confirmed: Student's t at 95% over seeds, and that noise; for two seeds, their "
        'range; for one seed, or where others failed, no interval'
    )
    for said in filter(None, (comparison.left_out, comparison.at_an_end)):
        printer.line(said)


RANKS = {'best': 0, 'expected best': 2, 'top quarter': 6, 'area': 7, 'confirmed': 0}
"""The statistics, with their ranks as columns."""


def _size(size: float | None) -> str:
    return '' if size is None else shown_size(size)


def _statistic(one: Measured | float | None) -> str:
    return shown_interval(one) if isinstance(one, Measured) else '' if one is None else f'{one:.4g}'


def _interval(one: Measured | float | None) -> Interval | None:
    if isinstance(one, Measured):
        return Interval(one.mean, one.low, one.high)
    return None if one is None else Interval(one, None, None)


def counts(row: StudyResult) -> list[str]:
    """How many of its trials were done, pruned and failed."""
    return [str(sum(point.state == state for point in row.points)) for state in STATES.values()]


def _spent(row: StudyResult) -> tuple[float | None, int | None]:
    """Its operations and tokens, where these are known."""
    return (row.flops, row.tokens) if row.counted else (None, None)


COLUMNS = tuple(RANKS)


def shown_interval(one: Measured) -> str:
    """A number and its interval; without one, and of two seeds, of how many seeds it is."""
    if one.low is None:
        failed = ', others failed' if one.kind == 'survivors' else ''
        return f'{one.mean:.4g} (n={one.n}{failed})'
    few = ' (range of 2)' if one.kind == 'range' else ''
    return f'{one.mean:.4g} [{one.low:.4g}, {one.high:.4g}]{few}'


def shown_config(study: Study) -> ConfigDict:
    """The config of the trial that represents the study: its best, or the base config before there is one."""
    best = study.best()
    return study.sweep.base if best is None else study.sweep.config(best.number, study.drawn(best))


def shown_record(study: Study) -> Record | None:
    """The record of that trial, or of another where it left none; `None` before any has started."""
    best = study.best()
    numbers = [trial.number for trial in study.trials()]
    for number in numbers if best is None else [best.number, *numbers]:
        if (record := recorded(study.workdir(number))) is not None:
            return record
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
    """Tokens that the trial which represents the study trains on, if it runs to the end."""
    config = shown_config(study)
    return int(config.steps * config.batch_size * config.length)


def _common_step(studies: Sequence[Study]) -> int:
    """The last step at which no trial that did not fail had ended."""
    kept = (TrialState.COMPLETE, TrialState.PRUNED)
    return min((_steps(study, one) for study in studies for one in study.trials() if one.state in kept), default=0)


def _steps(study: Study, trial: FrozenTrial) -> int:
    """How many steps a trial ran: all, or up to its last report."""
    if trial.state == TrialState.COMPLETE:
        return int(study.setting(trial, 'steps'))
    if trial.last_step is not None:
        return trial.last_step
    record = recorded(study.workdir(trial.number))
    return 0 if record is None else record.step


def _row(name: str, study: Study, by: str, storage: str | None, step: int) -> StudyResult:
    record = shown_record(study)
    ended = [trial for trial in study.trials() if trial.state.is_finished()]
    points = tuple(_point(study, trial, step) for trial in ended)
    tokens = [
        point.steps * study.setting(trial, 'batch_size') * study.setting(trial, 'length')
        for point, trial in zip(points, ended, strict=True)
    ]
    usual = measured_by(study, record, 'train_flops')
    records = [recorded(study.workdir(trial.number)) for trial in ended]
    each = [usual if one is None else one.flops_per_token for one in records]
    confirmed, failed, noise = _confirmed(study, storage)
    noise = _noise(record, study.sweep.score) if noise is None else noise
    return StudyResult(
        name=name,
        size=measured_by(study, record, by),
        flops=float(sum(flops * count for flops, count in zip(each, tokens, strict=True))),
        points=points,
        goal=study.sweep.goal,
        confirmed=confirmed,
        tokens=sum(tokens),
        noise=noise,
        metric=study.sweep.metric,
        score=study.sweep.score,
        failed=failed,
    )


def _noise(record: Record | None, metric: str) -> float | None:
    """What the finite test set adds to the metric of a run, as a standard deviation."""
    return None if record is None or metric not in record.last else record.measured(metric).noise


def recorded(workdir: pathlib.Path) -> Record | None:
    """The record of a run; `None` of one that never started, or is gone."""
    return read_record(workdir) if (workdir / 'run.json').exists() else None


def _point(study: Study, trial: FrozenTrial, step: int) -> Point:
    rate = study.setting(trial, RATE)
    steps, reports = _steps(study, trial), trial.intermediate_values
    before = max((at for at in reports if at <= step), default=None)
    even = reports[before] if before is not None else None if steps <= step else math.nan
    seed = study.sweep.seed(trial.number)
    noise = _noise(recorded(study.workdir(trial.number)), study.sweep.metric)
    return Point(float(rate), seed, STATES[trial.state], trial.value, steps, even, noise)


def _confirmed(study: Study, storage: str | None) -> tuple[tuple[float, ...], int, float | None]:
    """The values of the confirming runs that are done, how many failed, and the noise that those done recorded."""
    confirmation = read_confirmation(study, storage)
    if confirmation is None:
        return (), 0, None
    trials = confirmation.trials()
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE and trial.value is not None]
    found = [_noise(recorded(confirmation.workdir(trial.number)), study.sweep.score) for trial in done]
    known = [noise for noise in found if noise is not None]
    noise = float(np.sqrt(np.mean(np.square(known)))) if known else None
    values = tuple(trial.value for trial in done if trial.value is not None)
    return values, sum(trial.state == TrialState.FAIL for trial in trials), noise


def _reasons(
    names: Sequence[str], studies: Sequence[Study], rows: Sequence[StudyResult], by: str, tolerance: float
) -> list[str]:
    reasons = [f'{name} is not finished' for name, study in zip(names, studies, strict=True) if not study.finished()]
    reasons += _not_confirmed(studies, rows)
    first: Any = configs.load(studies[0].folder / 'sweep.json')
    for name, study in zip(names[1:], studies[1:], strict=True):
        differing = differences(first, configs.load(study.folder / 'sweep.json'))
        others = [line for line in differing if not line.startswith(MODEL)]
        reasons += [f'{name} has another sweep than {names[0]}: {line}' for line in others[:3]]
    reasons += _other_data(names, [shown_record(study) for study in studies])
    if unmatched([row.size for row in rows], tolerance):
        sizes = ', '.join(f'{row.name} {shown_size(row.size)}' for row in rows)
        reasons.append(f'{by} differs by more than {tolerance:.1%}: {sizes}')
    return reasons


def _not_confirmed(studies: Sequence[Study], rows: Sequence[StudyResult]) -> list[str]:
    """A line for each finished study of whose confirming runs some failed, or are yet to end."""
    lines = []
    for study, row in zip(studies, rows, strict=True):
        asked, done = study.sweep.confirm, len(row.confirmed)
        if study.finished() and done < asked:
            left = asked - done - row.failed
            lines.append(
                f'{row.name}: {done} of {asked} confirming runs are done ({row.failed} failed, {left} not finished)'
            )
    return lines


def _other_data(names: Sequence[str], records: Sequence[Record | None]) -> list[str]:
    """A line for each study whose data, by the hashes its runs recorded, are others than those of the first known."""
    known = [
        (name, data_hashes(record.facts['data']))
        for name, record in zip(names, records, strict=True)
        if record is not None
    ]
    reasons = []
    for name, hashes in known[1:]:
        first, before = known[0]
        other = [key for key in sorted(before.keys() | hashes.keys()) if before.get(key) != hashes.get(key)]
        if other:
            here, there = (one.get(other[0], 'none')[:SHOWN] for one in (hashes, before))
            reasons.append(f'{name} has other data than {first}: {other[0]} is {here}, not {there}')
    return reasons
