"""Runs to compare: what each reached and what it cost, and in what they are not equal."""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from attnlab.compare.baselines import Baselines, trivial_scores
from attnlab.compare.costs import COSTS, WEIGHTS
from attnlab.compare.equality import CONDITIONS, DATA, Equality, differing, of_conditions, of_kinds, of_measure
from attnlab.config import flatten
from attnlab.errors import UserError, nearest
from attnlab.evals.measured import Kind, Measured, goal_of, is_share
from attnlab.runs.record import Record
from attnlab.train.run import QUANTIZATION, data_hashes
from attnlab.train.setup import ROUNDING, TRACELESS

PREFERRED = ('1x/accuracy', 'all/accuracy', 'bits_per_byte', '1x/loss', 'all/loss', 'loss')
"""How the names of metrics end that serve as the score, the first that a run has."""

IRRELEVANT = ('model', ROUNDING, QUANTIZATION, *TRACELESS)
"""What of a config does not make the conditions unequal: the models that are compared, and what leaves no trace."""


SHOWN = 12
"""Digits of a hash that tell data apart."""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One run in a comparison, or several that differ only in seed (`attnlab.compare.seeds`): plain data.

    Attributes:
      name: of the run.
      task: what it was trained on; runs of one task are compared.
      metric: the name of the score.
      score: its newest value; of several seeds the mean.
      parameters: numbers trained.
      state_bytes: what decoding one sequence keeps at the training length.
      state_bytes_8x: the same at eight times that length.
      flops: floating-point operations of all of the training.
      tokens_per_second: of training; `None` for a run that reported none.
      device: what it ran on.
      finished: whether every step was taken.
      settings: everything in the config but the model, and the beginnings of the hashes of the data.
      low: where the interval of the score over seeds, or over the examples or documents evaluated, begins; `None` for
        none.
      high: where it ends.
      evaluated: how many of them there were.
      baselines: what trivial predictors reach by the metric, by name.
      noise: the standard deviation of the score due to the finite test set; `None` where it is not known.
      scores: of the seeds, where there are several.
      weight_bytes: of parameters and buffers, as they are held and saved.
      quantized: whether it was made by `attnlab quantize`.
      step: how many steps are reported.
    """

    name: str
    task: str
    metric: str
    score: float
    parameters: int
    state_bytes: int
    state_bytes_8x: int
    flops: float
    tokens_per_second: float | None
    device: str
    finished: bool
    settings: Mapping[str, Any]
    low: float | None = None
    high: float | None = None
    evaluated: int = 0
    baselines: Baselines = dataclasses.field(default_factory=dict)
    noise: float | None = None
    scores: tuple[float, ...] = ()
    weight_bytes: int = 0
    quantized: bool = False
    step: int = 0

    @property
    def bits(self) -> float:
        """Bits that are stored for a parameter, on average."""
        return 8 * self.weight_bytes / self.parameters

    @property
    def seeds(self) -> int:
        """How many runs it stands for."""
        return max(1, len(self.scores))

    @property
    def measured(self) -> Measured:
        """The score with its interval, over seeds where there are several, or over what was evaluated."""
        if self.low is None or self.high is None:
            return Measured(self.score, None, None, 1, 'one')
        if self.seeds > 1:
            return Measured(self.score, self.low, self.high, self.seeds, 'range' if self.seeds == 2 else 'seeds')
        kind: Kind = 'examples' if is_share(self.metric) else 'documents'
        return Measured(self.score, self.low, self.high, self.evaluated, kind)

    def titled(self, name: str) -> str:
        """A name for it, with how far it came where it is not finished."""
        return name if self.finished else f'{name} (not finished, step {self.step:,})'

    @property
    def higher(self) -> bool:
        """Whether a higher score is a better one."""
        return goal_of(self.metric) == 'max'

    @property
    def share(self) -> bool:
        """Whether the score is a share, from 0 to 1."""
        return is_share(self.metric)


OF_RUNS = ('parameters', 'state_bytes', 'state_bytes_8x', 'flops', 'tokens_per_second')
"""Costs of every run."""


def costs_of(results: Iterable[RunResult]) -> dict[str, str]:
    """The costs that runs are compared by: fields of a `RunResult`, and what they are called in print."""
    fields = (*OF_RUNS, *WEIGHTS) if any(one.quantized for one in results) else OF_RUNS
    return {field: COSTS[field].name for field in fields}


def curves(record: Record, metric: str) -> dict[str, Sequence[tuple[int, float]]]:
    """The metric and the training loss of a run over steps, where they have more than one value."""
    found = {name: record.curve(name) for name in dict.fromkeys((metric, 'train/loss'))}
    return {name: points for name, points in found.items() if len(points) > 1}


def run_result(record: Record, metric: str | None = None) -> RunResult:
    """A run with its score.

    Raises `UserError` for one that was never evaluated, or not by this metric, and for what cannot be ranked by.
    """
    length = record.config.length
    facts = record.facts
    (name,) = metrics_of([record], metric)
    measured = record.measured(name)
    settings = {key: value for key, value in flatten(record.config).items() if not key.startswith(IRRELEVANT)}
    settings |= {f'{DATA}.{key}': value[:SHOWN] for key, value in data_hashes(facts['data']).items()}
    return RunResult(
        name=record.name,
        task=task_name(record.config.task),
        metric=name,
        score=record.last[name],
        parameters=record.parameters,
        state_bytes=record.state_bytes_at(length),
        state_bytes_8x=record.state_bytes_at(8 * length),
        flops=record.flops_per_token * record.tokens,
        tokens_per_second=record.tokens_per_second,
        device=f'{facts["device_count"]} {facts["device_kind"]}',
        finished=record.finished,
        settings=settings,
        low=measured.low,
        high=measured.high,
        evaluated=measured.n if measured.low is not None else 0,
        baselines=trivial_scores(record.config, name),
        noise=measured.noise,
        weight_bytes=record.weight_bytes,
        quantized=record.quantized,
        step=record.step,
    )


def task_name(task: ConfigDict) -> str:
    """The problem, data set or text of a task's config, by the name of its class or its own."""
    source = next((task[key] for key in ('problem', 'data', 'text') if key in task), task)
    while 'of' in source:
        source = source.of
    return source.name if 'name' in source else source.target.rpartition('.')[2]


def metrics_of(records: Sequence[Record], wanted: str | None = None) -> list[str]:
    """The score of every run: the one that is wanted or, by task, the first of the usual ones that all runs have.

    Raises `UserError` for a run that was never evaluated, without what is wanted, or with no score that others have.
    """
    if wanted is not None:
        return [_wanted(record, wanted) for record in records]
    tasks = [task_name(record.config.task) for record in records]
    groups = {task: [one for one, of in zip(records, tasks, strict=True) if of == task] for task in tasks}
    shared = {task: _shared(task, group) for task, group in groups.items()}
    return [shared[task] for task in tasks]


def _shared(task: str, records: Sequence[Record]) -> str:
    known = _usual(records[0])
    for record in records[1:]:
        own = _usual(record)
        left = [name for name in known if name in own]
        if not left:
            raise UserError(
                f'runs on {task} have no score in common: {record.folder} has {", ".join(own)}, and those before it '
                f'{", ".join(known)}; compare them apart, or by --metric'
            )
        known = left
    return known[0]


def _usual(record: Record) -> list[str]:
    """The usual scores that a run has, the first to be taken first. Raises `UserError` for a run without any."""
    evaluated = _evaluated(record)
    usual = [name for ending in PREFERRED for name in evaluated if name.partition('/')[2] == ending]
    if usual:
        return usual
    scores = _scores(evaluated)
    listed = f'choose --metric from {", ".join(scores)}' if scores else f'it has {", ".join(evaluated)}'
    raise UserError(f'{record.folder} has none of the usual scores: {listed}')


def _wanted(record: Record, wanted: str) -> str:
    evaluated = _evaluated(record)
    if wanted not in evaluated:
        raise UserError(f'{record.folder} has no metric {wanted!r}{nearest(wanted, evaluated)}')
    if wanted not in (scores := _scores(evaluated)):
        raise UserError(
            f'--metric is {wanted}, of which neither more nor less is known to be better, so that runs cannot be '
            f'ranked by it; {record.folder} has {", ".join(scores) or "no score"}'
        )
    return wanted


def _evaluated(record: Record) -> list[str]:
    """The metrics of a run. Raises `UserError` for one that was never evaluated."""
    evaluated = [name for name in record.last if not name.startswith('train/')]
    if not evaluated:
        raise UserError(f'{record.folder} has not been evaluated yet')
    return evaluated


def _scores(names: Sequence[str]) -> list[str]:
    """Those that runs can be ranked by; ends of intervals, counts and thresholds are none."""
    return [name for name in names if goal_of(name) is not None]


def by_task(results: Iterable[RunResult]) -> dict[str, list[RunResult]]:
    """Runs by task, in the order in which tasks first come; the best score of a task first, what is NaN last."""
    found: dict[str, list[RunResult]] = {}
    for one in results:
        found.setdefault(one.task, []).append(one)
    return {task: sorted(group, key=_rank) for task, group in found.items()}


def _rank(one: RunResult) -> tuple[bool, float]:
    return one.score != one.score, -one.score if one.higher else one.score


def equalities(results: Sequence[RunResult], tolerance: float) -> list[Equality]:
    """In what runs of a task are equal: sizes within the tolerance, what their settings make up, and devices."""
    names = [one.name for one in results]
    sizes = {field: title for field, title in costs_of(results).items() if field != 'tokens_per_second'}
    return [
        *(
            of_measure(title, names, [float(getattr(one, field)) for one in results], tolerance, required=True)
            for field, title in sizes.items()
        ),
        *of_conditions(CONDITIONS, differing([one.settings for one in results])),
        of_kinds('score', [one.metric for one in results]),
        of_kinds('device', [one.device for one in results]),
        of_kinds(
            'trained to the last step', ['others are' if one.finished else f'{one.name} is not' for one in results]
        ),
    ]


def equality_summary(found: Sequence[Equality]) -> str:
    """What is matched, in a sentence."""
    return f'matched: {", ".join(one.name for one in found if one.equal) or "nothing"}.'


def unequal(found: Sequence[Equality], results: Sequence[RunResult]) -> list[str]:
    """What is not matched, with the values that differ."""
    values = differing([one.settings for one in results])
    return [f'{one.name} ({_difference(one, values)})' for one in found if not one.equal]


def _difference(one: Equality, values: Mapping[str, Sequence[str | None]]) -> str:
    if one.least is not None and one.most is not None:
        return ' to '.join(f'{x:.3g}' if x > 1e9 else f'{x:,.0f}' for x in (one.least[0], one.most[0]))
    shown = {key: ', '.join(dict.fromkeys(value or 'none' for value in found)) for key, found in values.items()}
    return '; '.join(f'{key}: {shown[key]}' if key in shown else key for key in one.different)


def distinctly_named(results: list[RunResult], folders: Sequence[pathlib.Path]) -> list[RunResult]:
    """Runs named by their folders or, where two of a task share a name, by as much of the path as tells them apart.

    Raises `UserError` for a run that is named twice, by whatever paths.
    """
    names = [one.name for one in results]
    keys = list(zip([one.task for one in results], names, strict=True))
    given: dict[pathlib.Path, pathlib.Path] = {}
    for folder in folders:
        place = folder.resolve()
        if place in given:
            also = '' if given[place] == folder else f', as {given[place]} too'
            raise UserError(f'{folder} is named twice{also}; name every run once')
        given[place] = folder
    return [
        one if keys.count(key) == 1 else dataclasses.replace(one, name=str(folder))
        for one, key, folder in zip(results, keys, folders, strict=True)
    ]


def short_names(group: Sequence[RunResult]) -> list[str]:
    """The names of runs without the words that all begin with: of `mqar-gla` and `mqar-mha`, `gla` and `mha`."""
    names = [one.name for one in group]
    shared = common_beginning(names) if len(names) > 1 else ''
    cut = max(shared.rfind(mark) + 1 for mark in '-_/. ')
    return [name[cut:] or name for name in names]


def baselines_of(group: Sequence[RunResult]) -> dict[str, float]:
    """What trivial predictors reach, by name; of those that differ with the data what the first run has, and said so.

    A run whose data are not at hand knows of none.
    """
    found = {}
    for name in dict.fromkeys(name for one in group for name in one.baselines):
        known = [
            (short, one.baselines[name])
            for short, one in zip(short_names(group), group, strict=True)
            if name in one.baselines
        ]
        (first, value), *others = known
        alike = all(math.isclose(other, value) for _, other in others)
        found[name if alike else f'{name}, data of {first}'] = value
    return found


def common_beginning(names: Sequence[str]) -> str:
    """The letters with which all names begin."""
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return ''.join(letters[0] for letters in alike)
