"""`attnlab uncertainty`: what a classifier's outputs say of when it does not know."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from attnlab.analysis import calibration, odin, scores
from attnlab.analysis.cascade import Cascade, cascade
from attnlab.errors import UserError
from attnlab.files import write_json
from attnlab.models.heads.classification import ClassificationHead
from attnlab.runs.loading import Loaded, load_run
from attnlab.tables import Column, Interval, Printer, Table, digits, plus_minus
from attnlab.tasks.long_range import Classification
from attnlab.train.cost import flops_per_token
from attnlab.train.run import check_data

COVERAGES = (1.0, 0.9, 0.8, 0.5)
"""Shares of inputs that are answered, of which the accuracy is shown."""

ROWS = 512
"""Rows that are looked at where no number is asked for."""

AT_ONCE = 32
"""Rows of a call."""


@dataclasses.dataclass(frozen=True, eq=False)
class Outputs:
    """What a classifier makes of rows, in float64: vectors that the head reads, logits, and the true labels.

    `moved` are logits after steps towards surer inputs, by their size (`attnlab.analysis.odin`), if there are any.
    """

    features: Float[np.ndarray, 'b d']
    logits: Float[np.ndarray, 'b o']
    labels: Int[np.ndarray, 'b']
    moved: Float[np.ndarray, 'n b o'] | None = None

    def part(self, first: int, step: int) -> 'Outputs':
        """Every `step`-th row from one on."""
        every = slice(first, None, step)
        moved = None if self.moved is None else self.moved[:, every]
        return Outputs(self.features[every], self.logits[every], self.labels[every], moved)

    @property
    def right(self) -> Bool[np.ndarray, 'b']:
        """Whether the likeliest class is the label."""
        return scores.right(self.logits, self.labels)


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """The scores that there are for a classifier, those of features fitted to training."""

    mahalanobis: scores.Mahalanobis
    virtual: scores.VirtualLogit | None
    size: int | None = None
    """The place in `odin.SIZES` of the size of ODIN's step; `None` without one."""

    @classmethod
    def fitted(cls, trained: Outputs, head: Any) -> 'Scores':
        """From outputs on training, and the head; ViM needs one that is a linear map."""
        virtual = None
        if isinstance(head, ClassificationHead) and head.linear.bias is not None:
            weight, bias = (np.asarray(each, np.float64) for each in (head.linear.matrix(), head.linear.bias[...]))
            virtual = scores.VirtualLogit.fitted(trained.features, trained.logits, weight, bias)
        size = None if trained.moved is None else odin.best_size(trained.moved)
        return cls(scores.Mahalanobis.fitted(trained.features, trained.labels), virtual, size)

    def of(self, outputs: Outputs) -> dict[str, Float[np.ndarray, 'b']]:
        """Every score of rows, by name; they are moved by the one size that was chosen."""
        found = {name: score(outputs.logits) for name, score in OF_LOGITS.items()}
        found['mahalanobis'] = self.mahalanobis.score(outputs.features)
        if self.virtual is not None:
            found['vim'] = self.virtual.score(outputs.features, outputs.logits)
        if self.size is not None and outputs.moved is not None:
            found['odin'] = odin.odin(outputs.moved[0])
        return found


OF_LOGITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    'max_probability': scores.max_probability,
    'max_logit': scores.max_logit,
    'negative_entropy': scores.negative_entropy,
    'energy': scores.energy,
}
"""Scores that need the logits alone."""


@dataclasses.dataclass(frozen=True)
class Uncertainty:
    """The results of `analyse_uncertainty`.

    Attributes:
      accuracy: of the rows that are tested.
      temperature: what logits are best divided by.
      calibration: expected calibration error and cross-entropy, as they are and with that temperature.
      selective: by score, accuracies where the best scored rows are answered, the area under the curve of risk over
        coverage, and the probability that a right answer scores above a wrong one.
      conformal: the level asked for, the threshold, coverage and mean size of sets.
      detection: by kind of changed input and score, the probability that a row scores above a changed one.
      step: of ODIN, in standard deviations of inputs or embeddings, chosen on training; `None` without one.
      cascade: with another run, what they reach together; `None` without one.
    """

    accuracy: float
    temperature: float
    calibration: Mapping[str, Mapping[str, Any]]
    selective: Mapping[str, Mapping[str, float]]
    conformal: Mapping[str, float]
    detection: Mapping[str, Mapping[str, float]]
    step: float | None = None
    cascade: Cascade | None = None


def analyse_uncertainty(
    workdir: pathlib.Path,
    printer: Printer,
    *,
    step: int | None = None,
    split: str | None = None,
    rows: int | None = None,
    fitted: int | None = None,
    alpha: float = 0.1,
    second: pathlib.Path | None = None,
    other_data: bool = False,
) -> Uncertainty:
    """Scores, calibrates and tests a classifier, and writes `analysis/<step>-uncertainty.json`.

    Every other one of the first `rows` rows of a split, 512 or all if not given, chooses the temperature and the
    threshold of conformal sets; all numbers are of those between. Means, covariance and directions of features are of
    the first `fitted` rows of training, likewise. With the run `second`, of the same rows, it is said what is reached
    where rows of which the first is not sure are handed on to it; all rows are asked, for nothing is chosen on them.

    Raises `UserError` for a run that is no classifier of rows, for changed data unless `other_data` allows them, a
    split or rows that do not exist, fewer than four rows, an alpha outside of (0, 1), and a second run of other labels.
    """
    loaded, task = classifier(workdir, step, other_data)
    split = task.evaluated_split if split is None else split
    asked, trained = (stacked(loaded, *each) for each in ((split, rows, 4), ('train', fitted, 2)))
    rows, fitted = len(asked['label']), len(trained['label'])
    first = {name: array[:AT_ONCE] for name, array in trained.items()}
    unit = loaded.setup.jit(functools.partial(odin.spread, loaded.setup, task))(loaded.variables, first)
    scored = Scores.fitted(outputs(loaded, task, trained, unit), loaded.model().head)
    sizes = () if scored.size is None else (odin.SIZES[scored.size],)
    run = functools.partial(outputs, loaded, task, unit=unit, sizes=sizes)
    of_asked = run(asked)
    chosen, tested = of_asked.part(0, 2), of_asked.part(1, 2)
    found = examined(chosen, tested, scored, alpha, {name: run(each) for name, each in changed(asked, trained)})
    if second is not None:
        found = dataclasses.replace(found, cascade=_handed_on(loaded, of_asked, split, second, other_data))
    path = workdir / 'analysis' / f'{loaded.step}-uncertainty.json'
    record = {'step': loaded.step, 'split': split, 'rows': rows, 'fitted_rows': fitted, 'other_data': other_data}
    write_json(path, record | dataclasses.asdict(found))
    for table in tables(found, f'{workdir}, step {loaded.step}, {split}'):
        printer.table(table)
    printer.line(f'written: {path}')
    return found


def classifier(workdir: pathlib.Path, step: int | None, other_data: bool) -> tuple[Loaded, Classification]:
    """A run and its task, which must be of one label a row."""
    loaded = load_run(workdir, step)
    task = loaded.setup.task
    check_data(workdir, task.describe(), other=other_data)
    if not isinstance(task, Classification):
        raise UserError(
            f'{workdir} was trained for {type(task).__name__}; what is analysed here is a classifier, one label a row'
        )
    return loaded, task


def _handed_on(first: Loaded, of_first: Outputs, split: str, second: pathlib.Path, other_data: bool) -> Cascade:
    """What the run and a second one reach together; costs are operations that the definition of a model needs."""
    loaded, task = classifier(second, None, other_data)
    rows = stacked(loaded, split, len(of_first.labels), 4)
    if not np.array_equal(rows['label'], of_first.labels):
        raise UserError(f'{second} has other labels on the {split} split; a cascade is of two runs on the same rows')
    of_second = outputs(loaded, task, rows)
    ours, theirs = (flops_per_token(each.setup) * each.setup.length for each in (first, loaded))
    return cascade(scores.max_probability(of_first.logits), of_first.right, of_second.right, ours / theirs)


def examined(
    chosen: Outputs, tested: Outputs, scored: Scores, alpha: float, others: Mapping[str, Outputs]
) -> Uncertainty:
    """What rows that choose, rows that are tested, and changed ones to tell apart from these say of a classifier."""
    temperature = calibration.fitted_temperature(chosen.logits, chosen.labels)
    threshold = calibration.conformal_threshold(
        calibration.misfit(chosen.logits)[np.arange(len(chosen.labels)), chosen.labels], alpha
    )
    sets = calibration.conformal_sets(tested.logits, threshold)
    inside = scored.of(tested)
    return Uncertainty(
        accuracy=float(np.mean(tested.right)),
        temperature=temperature,
        calibration={
            name: _calibrated(tested, warmth) for name, warmth in (('as it is', 1.0), ('with temperature', temperature))
        },
        selective={name: _selective(score, tested.right) for name, score in inside.items()},
        conformal={
            'asked': 1 - alpha,
            'coverage': float(np.mean(sets[np.arange(len(sets)), tested.labels])),
            'mean size': float(np.mean(np.sum(sets, axis=1))),
            'threshold': threshold,
        },
        detection={
            kind: {name: scores.auroc(inside[name], outside) for name, outside in scored.of(each).items()}
            for kind, each in others.items()
        },
        step=None if scored.size is None else odin.SIZES[scored.size],
    )


def _calibrated(tested: Outputs, temperature: float) -> dict[str, Any]:
    logits = tested.logits / temperature
    error = calibration.calibration_interval(scores.max_probability(logits), tested.right)
    return {'error': dataclasses.asdict(error), 'loss': calibration.cross_entropy(logits, tested.labels)}


def _selective(score: Float[np.ndarray, 'b'], right: Bool[np.ndarray, 'b']) -> dict[str, float]:
    risks = calibration.risk_by_coverage(score, right)
    at = {f'at {share:.0%}': 1 - float(risks[max(int(share * len(risks)), 1) - 1]) for share in COVERAGES}
    # Where all are right or all are wrong there is nothing to tell apart.
    apart = scores.auroc(score[right], score[~right]) if 0 < right.sum() < len(right) else float('nan')
    return {**at, 'area': float(np.mean(risks)), 'right over wrong': apart}


def outputs(
    loaded: Loaded,
    task: Classification,
    rows: Mapping[str, np.ndarray],
    unit: jax.Array | None = None,
    sizes: tuple[float, ...] = odin.SIZES,
) -> Outputs:
    """What a run makes of rows, some at a time; what is missing of the last call is its first rows again.

    With the `unit` of steps, what it makes of them after steps of these sizes as well.
    """

    @loaded.setup.jit
    def call(variables: nnx.State, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        model = nnx.merge(loaded.setup.graphdef, variables)
        vectors = task.vectors(model, batch, None)
        found = vectors, model.logits(vectors)
        return found if unit is None else (*found, odin.moved(loaded.setup, task, variables, batch, unit, sizes))

    count = len(rows['label'])
    found = []
    for begin in range(0, count, AT_ONCE):
        places = np.arange(begin, begin + min(AT_ONCE, count)) % count
        found.append(jax.device_get(call(loaded.variables, {name: array[places] for name, array in rows.items()})))
    features, logits, *moved = (
        np.concatenate(each, axis=-2).astype(np.float64)[..., :count, :] for each in zip(*found, strict=True)
    )
    return Outputs(features, logits, np.asarray(rows['label']), *moved)


def changed(
    rows: Mapping[str, np.ndarray], trained: Mapping[str, np.ndarray], seed: int = 0
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """The rows with inputs that are not of the data, by what was done to them; padding stays.

    `noise` is uniform between the least and the largest input of training, `shuffled` has the inputs of each row in
    another order; of real numbers there are `inverted` ones, reflected about the middle of that range, and five times
    as large ones, on which scores of the outputs of ReLU networks are worse than chance (Ulmer and Cina 2020,
    https://arxiv.org/abs/2012.05329).
    """
    rng, x, there = np.random.default_rng(seed), rows['tokens'], rows['segments'] > 0
    known = trained['tokens'][trained['segments'] > 0]
    low, high = known.min(), known.max()
    real = np.issubdtype(x.dtype, np.floating)
    noise = rng.uniform(low, high, x.shape) if real else rng.integers(low, high + 1, x.shape)
    made = {'noise': noise.astype(x.dtype), 'shuffled': x.copy()}
    for row, places in zip(made['shuffled'], map(np.flatnonzero, there), strict=True):
        row[places] = row[rng.permutation(places)]
    if real:
        made |= {'inverted': low + high - x, 'five times': 5 * x}
    mask = there.reshape(*there.shape, *(1,) * (x.ndim - there.ndim))
    for name, tokens in made.items():
        yield name, {**rows, 'tokens': np.where(mask, tokens, x)}


def stacked(loaded: Loaded, split: str, count: int | None, least: int) -> dict[str, np.ndarray]:
    """The first rows of a split as one batch, `ROWS` of them or all there are if no number is given."""
    source = loaded.setup.task.source(split, loaded.setup.length)
    count = min(ROWS, len(source)) if count is None else count
    if count < least:
        raise UserError(f'rows is {count} of the {split} split; there must be at least {least}')
    if count > len(source):
        raise UserError(f'rows is {count}; the {split} split has {len(source)} rows')
    rows = [source[index] for index in range(count)]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def tables(found: Uncertainty, title: str) -> Iterator[Table]:
    """What is printed."""
    four = digits('.4f')

    def table(name: str, columns: Sequence[Column], rows: Sequence[tuple[Any, ...]], caption: str) -> Table:
        return Table(name, columns, rows, caption)

    error = Column('calibration error', plus_minus, right=True)
    columns = [Column('logits'), Column('temperature', four, right=True), error, Column('nats', four, right=True)]
    temperatures = zip(found.calibration.items(), (1.0, found.temperature), strict=True)
    yield table(
        'calibration',
        columns,
        [(name, warmth, Interval(**one['error']), one['loss']) for (name, one), warmth in temperatures],
        f'{title}: accuracy {found.accuracy:.4f}',
    )
    names = list(next(iter(found.selective.values())))
    yield table(
        'selective',
        [Column('score'), *(Column(name, four, right=True, rank=rank) for rank, name in enumerate(names))],
        [(name, *(one[each] for each in names)) for name, one in found.selective.items()],
        'accuracy of the best scored rows; area under risk by coverage',
    )
    columns = [Column(name, four, right=True) for name in found.conformal]
    yield table('conformal', columns, [tuple(found.conformal.values())], 'conformal sets of classes')
    if (both := found.cascade) is not None:
        gain = Interval(**dataclasses.asdict(both.gain))
        titles = ('handed on', 'if below', 'accuracy', 'by chance', 'cost')
        yield table(
            'cascade',
            [Column(name, four, right=True, rank=rank) for name, rank in zip(titles, (0, 2, 0, 1, 0), strict=True)],
            list(zip(both.rates, both.thresholds, both.accuracy, both.by_chance, both.cost, strict=True)),
            f'cascade, cost in units of the second run; in the mean {plus_minus(gain)} over chance',
        )
    kinds = list(found.detection)
    yield table(
        'detection',
        [Column('score'), *(Column(kind, four, right=True) for kind in kinds)],
        [(name, *(found.detection[kind][name] for kind in kinds)) for name in found.selective],
        'probability that a row scores above one that was changed',
    )
