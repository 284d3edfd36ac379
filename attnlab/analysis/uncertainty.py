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
from attnlab.analysis.cascade import Budgeted, Cascade, budgeted, cascade, learned_confidence
from attnlab.config import build
from attnlab.errors import UserError
from attnlab.files import write_results
from attnlab.models.heads.classification import ClassificationHead
from attnlab.runs.loading import Loaded, load_run
from attnlab.tables import Column, Interval, Printer, Table, digits, plus_minus
from attnlab.tasks.long_range import Classification
from attnlab.train.cost import flops_per_token
from attnlab.train.run import check_data, saved_config

COVERAGES = (1.0, 0.9, 0.8, 0.5)
"""Shares of inputs that are answered, of which the accuracy is shown."""

ROWS = 512
"""Rows that are looked at where no number is asked for."""

AT_ONCE = 32
"""Rows of a call."""


@dataclasses.dataclass(frozen=True, eq=False)
class Outputs:
    """What a classifier makes of rows, in float64: vectors that the head reads, logits, and the true labels.

    `moved` are logits after steps towards surer inputs, by their size (`attnlab.analysis.odin`), if there are any;
    `members` the logits of every member of an ensemble, of whose mean probabilities `logits` are. Rows of one of the
    `groups` are not independent of each other; without these all are.
    """

    features: Float[np.ndarray, 'b d']
    logits: Float[np.ndarray, 'b o']
    labels: Int[np.ndarray, 'b']
    moved: Float[np.ndarray, 'n b o'] | None = None
    members: Float[np.ndarray, 'm b o'] | None = None
    groups: Int[np.ndarray, 'b'] | None = None

    def part(self, first: int, step: int) -> 'Outputs':
        """Every `step`-th row from one on."""
        every = slice(first, None, step)
        moved, members = (None if each is None else each[:, every] for each in (self.moved, self.members))
        groups = None if self.groups is None else self.groups[every]
        return Outputs(self.features[every], self.logits[every], self.labels[every], moved, members, groups)

    def together(self, others: Sequence['Outputs']) -> 'Outputs':
        """The outputs of an ensemble with others, of the same rows; features are those of the first.

        Raises `UserError` for others of another number of classes.
        """
        if not others:
            return self
        classes = sorted({each.logits.shape[-1] for each in (self, *others)})
        if len(classes) > 1:
            raise UserError(
                f'members of an ensemble have {" and ".join(map(str, classes))} classes; give runs of one task'
            )
        members = np.stack([self.logits, *(other.logits for other in others)])
        return dataclasses.replace(self, logits=scores.mean_logits(members), members=members)

    @property
    def right(self) -> Bool[np.ndarray, 'b']:
        """Whether the likeliest class is the label."""
        return scores.right(self.logits, self.labels)


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """The scores that there are for a classifier, those of features fitted to training."""

    mahalanobis: scores.Mahalanobis | None = None
    virtual: scores.VirtualLogit | None = None
    conjugate: scores.ConjNorm | None = None
    size: int | None = None
    """The place in `odin.SIZES` of the size of ODIN's step; `None` without one."""

    @classmethod
    def fitted(cls, trained: Outputs, head: Any) -> 'Scores':
        """From outputs on training, and the head; ViM needs one that is a linear map."""
        virtual = None
        # Heads that derive from it have other logits than this map's.
        if type(head) is ClassificationHead and head.linear.bias is not None:
            weight, bias = (np.asarray(each, np.float64) for each in (head.linear.matrix(), head.linear.bias[...]))
            virtual = scores.VirtualLogit.fitted(trained.features, trained.logits, weight, bias)
        size = None if trained.moved is None else odin.best_size(trained.moved)
        known = trained.features, trained.labels
        return cls(scores.Mahalanobis.fitted(*known), virtual, scores.ConjNorm.fitted(*known), size)

    def of(self, outputs: Outputs) -> dict[str, Float[np.ndarray, 'b']]:
        """Every score of rows, by name; they are moved by the one size that was chosen.

        Logits of an ensemble are the logarithms of its probabilities, so that scores of their size say nothing.
        """
        together = outputs.members is not None
        found = {name: score(outputs.logits) for name, score in OF_LOGITS.items() if not (together and name in OF_SIZE)}
        if outputs.members is not None:
            found['agreement'] = scores.agreement(outputs.members)
        if self.mahalanobis is not None:
            found['mahalanobis'] = self.mahalanobis.score(outputs.features)
        if self.conjugate is not None:
            found['conjnorm'] = self.conjugate.score(outputs.features)
        if self.virtual is not None and not together:
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

OF_SIZE = ('max_logit', 'energy')
"""Those of them that change where one number is added to all logits, which leaves probabilities as they are."""


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
      learned: the same by a rule that is learned on the rows that choose, on the others.
      budgeted: the same within a budget, with a threshold chosen on those rows; `None` without one.
    """

    accuracy: float
    temperature: float
    calibration: Mapping[str, Mapping[str, Any]]
    selective: Mapping[str, Mapping[str, float]]
    conformal: Mapping[str, float]
    detection: Mapping[str, Mapping[str, float]]
    step: float | None = None
    cascade: Cascade | None = None
    learned: Cascade | None = None
    budgeted: Budgeted | None = None


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
    budget: float | None = None,
    members: Sequence[pathlib.Path] = (),
    decay: float | None = None,
    ema: bool = False,
    other_data: bool = False,
) -> Uncertainty:
    """Scores, calibrates and tests a classifier, and writes `analysis/<step>-uncertainty.json`.

    Every other one of the first `rows` rows of a split, 512 or all if not given, chooses the temperature and the
    threshold of conformal sets; all numbers are of those between. Means, covariance and directions of features are of
    the first `fitted` rows of training, likewise. With the run `second`, of the same rows, it is said what is reached
    where rows of which the first is not sure are handed on to it; all rows are asked, for nothing is chosen on them,
    but for a rule that is learned, and the threshold of a `budget`. With `members` mean probabilities of an ensemble
    are what is said of. With `decay` sets are also made of recent rows that choose, each counting by this factor less
    than the one after it. With `ema` averages of parameters are taken, of members and of the second run too.

    What is written of an ensemble is `analysis/<step>-uncertainty-ensemble.json`.

    Raises `UserError` for a run that is no classifier of rows, for changed data unless `other_data` allows them, a
    split or rows that do not exist, fewer than four rows, an alpha outside of (0, 1), a second run of other labels,
    members of other data or classes, and with `ema` runs without averages.
    """
    loaded, task = classifier(workdir, step, other_data, ema=ema)
    split = task.evaluated_split if split is None else split
    asked, trained = (stacked(loaded, *each) for each in ((split, rows, 4), ('train', fitted, 2)))
    rows, fitted = len(asked['label']), len(trained['label'])
    first = {name: array[:AT_ONCE] for name, array in trained.items()}
    unit = loaded.setup.jit(functools.partial(odin.spread, loaded.setup, task))(loaded.variables, first)
    scored = Scores.fitted(outputs(loaded, task, trained, unit), loaded.model().head)
    sizes = () if scored.size is None else (odin.SIZES[scored.size],)
    run = functools.partial(outputs, loaded, task, unit=unit, sizes=sizes)
    others = [_member(member, loaded, other_data) for member in members]

    def all_of(batch: Mapping[str, np.ndarray]) -> Outputs:
        return run(batch).together([outputs(other, task, batch, sizes=()) for other in others])

    of_asked = all_of(asked)
    chosen, tested = of_asked.part(0, 2), of_asked.part(1, 2)
    found = examined(chosen, tested, scored, alpha, {name: all_of(each) for name, each in changed(asked, trained)})
    if decay is not None:
        found = dataclasses.replace(found, conformal={**found.conformal, **recent(of_asked, alpha, decay)})
    if second is not None:
        found = _handed_on(found, [loaded, *others], of_asked, split, second, budget, other_data)
    path = workdir / 'analysis' / f'{loaded.name}-uncertainty{"-ensemble" if members else ""}.json'
    record = {
        'step': loaded.step,
        'split': split,
        'rows': rows,
        'fitted_rows': fitted,
        'ema': ema,
        'other_data': other_data,
        'ensemble': [str(member) for member in members],
        'cascade_with': None if second is None else str(second),
        'budget': budget,
        'decay': decay,
    }
    write_results(path, record | dataclasses.asdict(found))
    for table in tables(found, f'{workdir}, step {loaded.name}, {split}'):
        printer.table(table)
    printer.line(f'written: {path}')
    return found


def classifies(workdir: pathlib.Path) -> bool:
    """Whether a run is a classifier of rows, by its config; raises `UserError` for a folder that is no run."""
    return isinstance(build(saved_config(workdir).task, 'config.task'), Classification)


def classifier(
    workdir: pathlib.Path, step: int | None, other_data: bool, *, ema: bool = False
) -> tuple[Loaded, Classification]:
    """A run and its task, which must be of one label a row."""
    loaded = load_run(workdir, step, ema=ema)
    task = loaded.setup.task
    check_data(workdir, task.describe(), other=other_data)
    if not isinstance(task, Classification):
        raise UserError(
            f'{workdir} was trained for {type(task).__name__}; what is analysed here is a classifier, one label a row'
        )
    return loaded, task


def _member(workdir: pathlib.Path, first: Loaded, other_data: bool) -> Loaded:
    """Another run of an ensemble. Raises `UserError` for one of other data."""
    loaded, task = classifier(workdir, None, other_data, ema=first.ema)
    ours, theirs = first.setup.task.describe(), task.describe()
    if not other_data and ours != theirs:
        raise UserError(f'{workdir} is of other data than the first run, {theirs} and {ours}; an ensemble is of one')
    return loaded


def recent(outputs: Outputs, alpha: float, decay: float) -> dict[str, float]:
    """Coverage and size of sets where rows come in order: of every other row, by the thresholds of those before it.

    Raises `UserError` for a decay outside of (0, 1].
    """
    if not 0 < decay <= 1:
        raise UserError(f'--decay is {decay}; it must be above 0 and at most 1')
    rows = np.arange(len(outputs.labels))
    misfits = calibration.misfit(outputs.logits)
    fits, covered, sizes = misfits[rows, outputs.labels], [], []
    for row in rows[1::2]:
        before = rows[:row:2]
        ages = np.arange(len(before), 0, -1.0)
        threshold = calibration.weighted_threshold(fits[before], decay**ages, alpha)
        covered.append(fits[row] <= threshold)
        sizes.append(np.sum(misfits[row] <= threshold))
    return {'recent: coverage': float(np.mean(covered)), 'recent: mean size': float(np.mean(sizes))}


def _handed_on(
    found: Uncertainty,
    firsts: Sequence[Loaded],
    of_first: Outputs,
    split: str,
    second: pathlib.Path,
    budget: float | None,
    other_data: bool,
) -> Uncertainty:
    """What the run, or all of an ensemble, and a second one reach together.

    Costs are operations that the definition of a model needs.
    """
    loaded, task = classifier(second, None, other_data, ema=firsts[0].ema)
    rows = stacked(loaded, split, len(of_first.labels), 4)
    if not np.array_equal(rows['label'], of_first.labels):
        raise UserError(f'{second} has other labels on the {split} split; a cascade is of two runs on the same rows')
    of_second = outputs(loaded, task, rows)
    cost, right = sum(map(_operations, firsts)) / _operations(loaded), of_second.right
    confidence = scores.max_probability(of_first.logits)
    chosen, tested = of_first.part(0, 2), of_first.part(1, 2)
    learned = learned_confidence(chosen.logits, chosen.right, right[::2], tested.logits)
    within = None
    if budget is not None:
        within = budgeted(confidence[::2], confidence[1::2], tested.right, right[1::2], cost, budget)
    return dataclasses.replace(
        found,
        cascade=cascade(confidence, of_first.right, right, cost),
        learned=cascade(learned, tested.right, right[1::2], cost),
        budgeted=within,
    )


def _operations(loaded: Loaded) -> float:
    """That a row needs."""
    return flops_per_token(loaded.setup) * loaded.setup.length


def examined(
    chosen: Outputs, tested: Outputs, scored: Scores, alpha: float, others: Mapping[str, Outputs]
) -> Uncertainty:
    """What rows that choose, rows that are tested, and changed ones to tell apart from these say of a classifier."""
    temperature = calibration.fitted_temperature(chosen.logits, chosen.labels)
    threshold = calibration.conformal_threshold(
        calibration.misfit(chosen.logits)[np.arange(len(chosen.labels)), chosen.labels], alpha
    )
    sets = calibration.conformal_sets(tested.logits, threshold)
    relative = scores.RelativeUncertainty.fitted(chosen.logits, chosen.right) if _mixed(chosen.right) else None

    def scores_of(outputs: Outputs) -> dict[str, Float[np.ndarray, 'b']]:
        found = scored.of(outputs)
        return found if relative is None else {**found, 'relative': relative.score(outputs.logits)}

    inside = scores_of(tested)
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
            kind: {name: scores.auroc(inside[name], outside) for name, outside in scores_of(each).items()}
            for kind, each in others.items()
        },
        step=None if scored.size is None else odin.SIZES[scored.size],
    )


def _mixed(right: Bool[np.ndarray, 'b']) -> bool:
    """Whether some answers are right and some wrong."""
    return bool(0 < right.sum() < len(right))


def _calibrated(tested: Outputs, temperature: float) -> dict[str, Any]:
    logits = tested.logits / temperature
    error = calibration.calibration_interval(scores.max_probability(logits), tested.right, groups=tested.groups)
    return {'error': dataclasses.asdict(error), 'loss': calibration.cross_entropy(logits, tested.labels)}


def _selective(score: Float[np.ndarray, 'b'], right: Bool[np.ndarray, 'b']) -> dict[str, float]:
    risks = calibration.risk_by_coverage(score, right)
    at = {f'at {share:.0%}': 1 - float(risks[max(int(share * len(risks)), 1) - 1]) for share in COVERAGES}
    # Where all are right or all are wrong there is nothing to tell apart.
    apart = scores.auroc(score[right], score[~right]) if _mixed(right) else float('nan')
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
    for rule, both in (('confidence', found.cascade), ('a learned rule', found.learned)):
        if both is None:
            continue
        gain = Interval(**dataclasses.asdict(both.gain))
        titles = ('handed on', 'if below', 'accuracy', 'by chance', 'cost')
        yield table(
            'cascade' if rule == 'confidence' else 'learned',
            [Column(name, four, right=True, rank=rank) for name, rank in zip(titles, (0, 2, 0, 1, 0), strict=True)],
            list(zip(both.rates, both.thresholds, both.accuracy, both.by_chance, both.cost, strict=True)),
            f'cascade by {rule}, cost in units of the second run; in the mean {plus_minus(gain)} over chance',
        )
    if (within := found.budgeted) is not None:
        columns = [Column(name, four, right=True) for name in ('if below', 'handed on', 'cost', 'accuracy')]
        yield table(
            'budget', columns, [dataclasses.astuple(within)], 'cascade within the budget, on rows it was not chosen on'
        )
    kinds = list(found.detection)
    if not kinds:
        return
    yield table(
        'detection',
        [Column('score'), *(Column(kind, four, right=True) for kind in kinds)],
        [(name, *(found.detection[kind][name] for kind in kinds)) for name in found.selective],
        'probability that a row scores above one that was changed',
    )
