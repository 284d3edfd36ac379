"""`attnlab uncertainty`: what the outputs of a classifier or a language model say of when it does not know."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from attnlab.analysis import calibration, odin, scores
from attnlab.analysis.cascade import Budgeted, Cascade, budgeted, cascade, described, learned_confidence
from attnlab.analysis.glass_box import Judged, judged_table, self_judged
from attnlab.analysis.outputs import AT_ONCE, Outputs, changed, check_asks, one_a_row, outputs, reader, stacked
from attnlab.analysis.question import Question
from attnlab.analysis.risk import LOSSES, Risk, check_decay, check_level, controlled_risk, recent_risk
from attnlab.data.text.tokenizers import load_tokenizer
from attnlab.errors import UserError
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.heads.language import LanguageHead, TiedHead
from attnlab.quantize.layers import matrix_of_inputs
from attnlab.runs.loading import Loaded, load_checked
from attnlab.tables import Column, Interval, Printer, Table, digits, plus_minus
from attnlab.tasks.language import TOKENIZER
from attnlab.tasks.task import Textual, same_rows
from attnlab.train.cost import forward_flops_per_token

COVERAGES = (1.0, 0.9, 0.8, 0.5)
"""Shares of inputs that are answered, of which the accuracy is shown."""

OF_ROWS = ' (rows)'
"""Ends the names of changes that are told by the mean scores of whole rows."""

FOUR = digits('.4f')
"""How numbers of tables are written."""


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """The scores that there are for a run, those of features fitted to another split.

    The classes of predicted tokens are the tokens. `rows` is the Mahalanobis distance of a row's mean vector, where
    rows hold several predictions; `odin_index` is the place in `odin.SIZES` of the size of ODIN's step; `left_out` says
    why there is no other score.
    """

    mahalanobis: scores.Mahalanobis | None = None
    virtual: scores.VirtualLogit | None = None
    conjugate: scores.ConjNorm | None = None
    rows: scores.Mahalanobis | None = None
    odin_index: int | None = None
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def fitted(cls, trained: Outputs, head: Any) -> 'Scores':
        """From outputs on another split, and the head; ViM needs one that is a linear map."""
        virtual, left_out = None, {}
        if (linear := _linear(head)) is not None:
            virtual = scores.VirtualLogit.fitted(trained.features, trained.logits, *linear)
        else:
            left_out['vim'] = f'logits of {type(head).__name__} are no linear map of what it reads'
        rows = None
        if trained.groups is not None:
            means = trained.by_row(trained.features)
            rows = scores.Mahalanobis.fitted(means, np.zeros(len(means), int))
        odin_index = None if trained.odin is None else odin.best_size(trained.odin)
        known = trained.features, trained.labels
        found = scores.Mahalanobis.fitted(*known), virtual, scores.ConjNorm.fitted(*known)
        return cls(*found, rows, odin_index, left_out)

    def of(self, outputs: Outputs) -> dict[str, Float[np.ndarray, 'b']]:
        """Every score of predictions, by name; they are moved by the one size that was chosen.

        Logits of an ensemble are the logarithms of its probabilities, so that scores of their size say nothing.
        """
        together = outputs.members is not None
        found = {
            name: score(outputs.logits)
            for name, score in OF_LOGITS.items()
            if not (together and name in SHIFT_DEPENDENT)
        }
        if outputs.members is not None:
            found['agreement'] = scores.agreement(outputs.members)
        if self.mahalanobis is not None:
            found['mahalanobis'] = self.mahalanobis.score(outputs.features)
        if self.conjugate is not None:
            found['conjnorm'] = self.conjugate.score(outputs.features)
        if self.virtual is not None and not together:
            found['vim'] = self.virtual.score(outputs.features, outputs.logits)
        if self.odin_index is not None and outputs.odin is not None:
            found['odin'] = outputs.odin[0]
        return found

    def of_rows(self, outputs: Outputs, found: Mapping[str, np.ndarray]) -> dict[str, Float[np.ndarray, 'r']]:
        """The scores of whole rows: means of those found of predictions; Mahalanobis that of the mean vector."""
        means = {name: outputs.by_row(score) for name, score in found.items()}
        if self.rows is not None:
            means['mahalanobis'] = self.rows.score(outputs.by_row(outputs.features))
        return means


def _linear(head: Any) -> tuple[Float[np.ndarray, 'd o'], Float[np.ndarray, 'o']] | None:
    """The map to logits and what is added, of a head that is no more than that; those derived from it have others."""
    if type(head) is ClassificationHead and head.linear.bias is not None:
        return np.asarray(matrix_of_inputs(head.linear), np.float64), np.asarray(head.linear.bias[...], np.float64)
    if type(head) in (LanguageHead, TiedHead):
        weight = np.asarray(head.weight[...], np.float64).T
        return weight, np.zeros(weight.shape[1])
    return None


OF_LOGITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    'max_probability': scores.max_probability,
    'max_logit': scores.max_logit,
    'negative_entropy': scores.negative_entropy,
    'energy': scores.energy,
}
"""Scores that need the logits alone."""

SHIFT_DEPENDENT = ('max_logit', 'energy')
"""Those of them that change where one number is added to all logits, which leaves probabilities as they are."""


@dataclasses.dataclass(frozen=True)
class Uncertainty:
    """The results of `analyse_uncertainty`.

    Attributes:
      accuracy: of the predictions that are tested.
      temperature: what logits are best divided by.
      calibration: expected calibration error and cross-entropy, as they are and with that temperature.
      selective: by score, accuracies where the best scored rows are answered, the area under the curve of risk over
        coverage, and the probability that a right answer scores above a wrong one.
      conformal: the level asked for, the threshold, coverage and mean size of sets.
      detection: by kind of changed input and score, the probability that a prediction scores above one of a changed
        row; where rows hold several, also that a whole row does.
      false_positives: likewise, the share of changed rows that pass where 95 % of the others do.
      left_out: by score, why there is none.
      odin_step: of ODIN, in standard deviations of inputs or embeddings, chosen on the split that scores are fitted to;
        `None` without one.
      risk: what is reached where a risk is controlled, and by recent rows; `None` where none is asked for.
      recent_risk: see there.
      of_itself: where rows hold several predictions, how statistics of a model's own probabilities go with how many
        predictions of a row are right, over all rows; empty elsewhere.
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
    false_positives: Mapping[str, Mapping[str, float]]
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    odin_step: float | None = None
    risk: Risk | None = None
    recent_risk: Risk | None = None
    of_itself: Mapping[str, Judged] = dataclasses.field(default_factory=dict)
    cascade: Cascade | None = None
    learned: Cascade | None = None
    budgeted: Budgeted | None = None


@dataclasses.dataclass(frozen=True)
class UncertaintyRequest:
    """What is asked of a run.

    Attributes:
      split: what is reported; `None`: what the run evaluates on.
      rows: so many of it, evenly spaced; `None`: enough for about 4,096 predictions.
      fitted_split: another, to which means, covariance and directions of features are fitted.
      fitted: so many rows of that, likewise.
      alpha: how often conformal sets may lack the label.
      risk: a name among those of `attnlab.analysis.risk`, whose risk is controlled; `None`: none is.
      level: how much of a new row may be lost, in expectation.
      second: a run to which rows are handed on of which the first is not sure; `None`: none is.
      budget: what a row may cost in the mean, in units of the second run; `None`: no threshold is chosen.
      members: further runs, whose mean probabilities are what is said of.
      decay: makes sets, and the setting of a risk, also of recent rows that choose, each counting by this factor less
        than the one after it; `None`: does not.
      ema: averages of parameters are taken, of members and of the second run too.
      other_data: data that have changed are taken.
    """

    split: str | None = None
    rows: int | None = None
    fitted_split: str = 'train'
    fitted: int | None = None
    alpha: float = 0.1
    risk: str | None = None
    level: float = 0.1
    second: pathlib.Path | None = None
    budget: float | None = None
    members: Sequence[pathlib.Path] = ()
    decay: float | None = None
    ema: bool = False
    other_data: bool = False

    def check(self, rows: int) -> None:
        """Raises `UserError` for a decay or a level that is none, or that so few rows cannot promise."""
        if self.decay is not None:
            check_decay(self.decay)
        if self.risk is not None:
            check_level(self.level, (rows + 1) // 2, self.decay)

    def record(self, fitted: int) -> dict[str, Any]:
        """What is written down of it, `fitted` the rows that there were, beside what every question has."""
        return {
            'fitted_split': self.fitted_split,
            'fitted_rows': fitted,
            'ensemble': [str(member) for member in self.members],
            'cascade_with': None if self.second is None else str(self.second),
            'budget': self.budget,
            'decay': self.decay,
            'asked': {
                'alpha': self.alpha,
                'risk': self.risk,
                'risk_level': None if self.risk is None else self.level,
            },
        }


def analyse_uncertainty(
    workdir: pathlib.Path, printer: Printer, asked: UncertaintyRequest, *, step: int | None = None
) -> Uncertainty:
    """Scores, calibrates and tests a run that predicts classes or tokens; writes `analysis/<step>-uncertainty.json`.

    Even-numbered rows set the temperature, the conformal threshold and the setting of a risk; numbers are computed on
    the odd-numbered rows where nothing else is said. Of a cascade all rows are asked, for nothing is chosen on them,
    but for a rule that is learned, and the threshold of a budget.

    What is written of an ensemble is `analysis/<step>-uncertainty-ensemble.json`.

    Raises `UserError` for a run that predicts neither, for changed data unless they are to be taken, a split or
    rows that do not exist, fewer than four rows, scores fitted to the examples that are reported, an alpha or a level
    outside of (0, 1), a level that so few rows cannot promise, a second run of other labels or another tokenizer,
    members of other data or classes, and with `ema` runs without averages.
    """
    loaded = _run(workdir, step, asked.other_data, ema=asked.ema)
    task = loaded.setup.task
    split = task.evaluated_split if asked.split is None else asked.split
    _check_fitted(task, asked.fitted_split, split)
    rows = stacked(loaded, split, asked.rows, 4)
    fitted = stacked(loaded, asked.fitted_split, asked.fitted, 2)
    count = len(rows['tokens'])
    asked.check(count)
    scored, run = _scored(loaded, fitted)
    others = [_member(member, workdir, loaded, asked.other_data) for member in asked.members]
    readers = [reader(other) for other in others]

    def all_of(batch: Mapping[str, np.ndarray]) -> Outputs:
        return run(batch).together([read(batch) for read in readers])

    of_rows, of_changed = all_of(rows), {name: all_of(each) for name, each in changed(rows, fitted)}
    found = examined(of_rows.part(0, 2), of_rows.part(1, 2), scored, asked.alpha, of_changed)
    found = _beyond(found, asked, of_rows, one_a_row(task))
    found = _handed_on(found, asked, workdir, [loaded, *others], rows, of_rows, split)
    question = Question(workdir, loaded, split, count, other_data=asked.other_data)
    record = {**question.record(), **asked.record(len(fitted['tokens']))}
    suffix = f'-uncertainty{"-ensemble" if asked.members else ""}'
    question.report(printer, suffix, record, dataclasses.asdict(found), tables(found, question.title))
    return found


def _check_fitted(task: Any, fitted_split: str, split: str) -> None:
    """Raises `UserError` where scores would be fitted to the examples that are reported."""
    if fitted_split == split:
        raise UserError(f'--fitted_split is {split}, which is the split that is reported; scores are fitted to another')
    if same_rows(task, fitted_split, split):
        raise UserError(
            f'--fitted_split is {fitted_split}, whose examples are those of {split}, the split that is reported: the '
            'data have none for validation alone; scores are fitted to others, such as those of train'
        )


def _beyond(found: Uncertainty, asked: UncertaintyRequest, of_rows: Outputs, single: bool) -> Uncertainty:
    """The results with those of rows, where predictions are not `single`, of recent rows and of a risk."""
    if not single:
        by_row = [of_rows.only(int(row)) for row in of_rows.rows]
        of_itself = self_judged([each.logits for each in by_row], [each.labels for each in by_row])
        found = dataclasses.replace(found, of_itself=of_itself)
    if asked.decay is not None:
        conformal = {**found.conformal, **recent(of_rows, asked.alpha, asked.decay)}
        found = dataclasses.replace(found, conformal=conformal)
    if asked.risk is not None:
        found = dataclasses.replace(
            found,
            risk=controlled_risk(of_rows.part(0, 2), of_rows.part(1, 2), asked.risk, asked.level),
            recent_risk=None if asked.decay is None else recent_risk(of_rows, asked.risk, asked.level, asked.decay),
        )
    return found


def _run(workdir: pathlib.Path, step: int | None, other_data: bool, *, ema: bool) -> Loaded:
    """A run whose task asks for classes or tokens."""
    loaded = load_checked(workdir, step, ema=ema, other_data=other_data)
    check_asks(loaded.setup.task, loaded.setup.length)
    return loaded


def _scored(loaded: Loaded, trained: Mapping[str, np.ndarray]) -> tuple[Scores, Callable[..., Outputs]]:
    """Scores fitted to rows, and what reads others, with the one step of ODIN that was chosen on these."""
    model = loaded.model()
    if not hasattr(model, 'embed'):
        scored = Scores.fitted(reader(loaded)(trained), model.head)
        reason = f'{type(model).__name__} has no inputs that could be moved'
        return dataclasses.replace(scored, left_out={**scored.left_out, 'odin': reason}), reader(loaded)
    count = max(1, min(AT_ONCE, len(trained['tokens'])))
    first = {name: array[:count] for name, array in trained.items()}
    unit = float(loaded.setup.jit(functools.partial(odin.spread, loaded.setup))(loaded.variables, first))
    scored = Scores.fitted(reader(loaded, odin.SIZES, unit)(trained), model.head)
    assert scored.odin_index is not None
    return scored, reader(loaded, (odin.SIZES[scored.odin_index],), unit)


def _member(workdir: pathlib.Path, first_dir: pathlib.Path, first: Loaded, other_data: bool) -> Loaded:
    """Another run of an ensemble. Raises `UserError` for one of other data, or with another tokenizer."""
    loaded = _run(workdir, None, other_data, ema=first.ema)
    ours, theirs = first.setup.task.describe(), loaded.setup.task.describe()
    if not other_data and ours != theirs:
        raise UserError(f'{workdir} is of other data than the first run, {theirs} and {ours}; an ensemble is of one')
    _check_together(loaded, workdir, first, first_dir)
    return loaded


def _check_together(loaded: Loaded, workdir: pathlib.Path, first: Loaded, first_dir: pathlib.Path) -> None:
    """Raises `UserError` for a run that does not predict of rows what the first one does."""
    kinds = [type(each.setup.task).__name__ for each in (loaded, first)]
    if one_a_row(loaded.setup.task) != one_a_row(first.setup.task):
        raise UserError(f'{workdir} was trained for {kinds[0]} and {first_dir} for {kinds[1]}; give runs of one task')
    both = (loaded, workdir), (first, first_dir)
    written = [load_tokenizer(place / TOKENIZER).hash for run, place in both if isinstance(run.setup.task, Textual)]
    if len(set(written)) > 1 or len(written) == 1:
        raise UserError(f'{workdir} has another tokenizer than {first_dir}; give runs that read the same tokens')


def recent(outputs: Outputs, alpha: float, decay: float) -> dict[str, float]:
    """Coverage and size of sets where rows come in order: of every other row, by the thresholds of those before it.

    Where rows hold several predictions the coverage is that of a row on average, as a risk that is controlled.
    Raises `UserError` for a decay outside of (0, 1].
    """
    check_decay(decay)
    if outputs.groups is not None:
        found = recent_risk(outputs, 'missed', alpha, decay)
        return {'recent: coverage': 1 - found.risk.value, 'recent: mean size': found.used}
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
    asked: UncertaintyRequest,
    workdir: pathlib.Path,
    firsts: Sequence[Loaded],
    rows: Mapping[str, np.ndarray],
    of_first: Outputs,
    split: str,
) -> Uncertainty:
    """The results with what the run, or all of an ensemble, and a second one reach together, if one is asked.

    What is handed on are rows, whatever is predicted in them: a language model has to read a text to predict its last
    token, so that a token handed on costs nearly as much as all of them. A row of several predictions is as sure as
    their largest probabilities on average, which is the accuracy that a calibrated run expects of it. Costs are
    operations of a forward pass that the definition of a model needs.
    """
    second = asked.second
    if second is None:
        return found
    loaded = _run(second, None, asked.other_data, ema=asked.ema)
    _check_together(loaded, second, firsts[0], workdir)
    # Rows of classifiers may differ in what they hold, such as patches, and are each run's own.
    own = one_a_row(loaded.setup.task)
    of_second = outputs(loaded, stacked(loaded, split, len(of_first.labels), 4) if own else rows)
    if not np.array_equal(of_second.labels, of_first.labels):
        raise UserError(f'{second} has other labels on the {split} split; a cascade is of two runs on the same rows')
    if of_second.logits.shape != of_first.logits.shape:
        raise UserError(
            f'{second} predicts {of_second.logits.shape[1]} classes and {workdir} {of_first.logits.shape[1]}; '
            'a cascade is of two runs that predict the same'
        )
    ran = (*firsts, loaded) if own else [_read_at(each, firsts[0]) for each in (*firsts, loaded)]
    *costs, of_all = map(_operations, ran)
    cost = sum(costs) / of_all
    confidence, ours, theirs = (
        of_first.by_row(each) for each in (scores.max_probability(of_first.logits), of_first.right, of_second.right)
    )
    known = of_first.by_row(described(of_first.logits))
    learned = learned_confidence(known[::2], ours[::2], theirs[::2], known[1::2])
    within = None
    if asked.budget is not None:
        within = budgeted(confidence[::2], confidence[1::2], ours[1::2], theirs[1::2], cost, asked.budget)
    return dataclasses.replace(
        found,
        cascade=cascade(confidence, ours, theirs, cost),
        learned=cascade(learned, ours[1::2], theirs[1::2], cost),
        budgeted=within,
    )


def _read_at(loaded: Loaded, other: Loaded) -> Loaded:
    """A run whose rows are as long as those of another."""
    return dataclasses.replace(loaded, setup=dataclasses.replace(loaded.setup, length=other.setup.length))


def _operations(loaded: Loaded) -> float:
    """Of a forward pass over a row: a run of few bits has no gradient of weights, and needs as many as another."""
    return forward_flops_per_token(loaded.setup) * loaded.setup.length


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
    pairs = _pairs(scored, scores_of, tested, others)
    left_out = dict(scored.left_out)
    if relative is None:
        left_out['relative'] = f'answers of rows that choose are all {"right" if chosen.right.all() else "wrong"}'
    if chosen.members is not None:
        left_out |= dict.fromkeys(
            (*SHIFT_DEPENDENT, 'vim'), 'of the logits of one run; an ensemble averages probabilities'
        )
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
        detection=_by_kind(pairs, scores.auroc),
        false_positives=_by_kind(pairs, scores.false_positives),
        left_out=left_out,
        odin_step=None if scored.odin_index is None else odin.SIZES[scored.odin_index],
    )


ByScore = Mapping[str, np.ndarray]


def _pairs(
    scored: Scores,
    scores_of: Callable[[Outputs], dict[str, np.ndarray]],
    tested: Outputs,
    others: Mapping[str, Outputs],
) -> dict[str, tuple[ByScore, ByScore]]:
    """By kind of change, the scores of predictions and of what was changed; of rows too if these differ."""
    inside: ByScore = scores_of(tested)
    found = {}
    for kind, each in others.items():
        outside: ByScore = scores_of(each)
        found[kind] = inside, outside
        if tested.groups is not None:
            found[f'{kind}{OF_ROWS}'] = scored.of_rows(tested, inside), scored.of_rows(each, outside)
    return found


def _by_kind(
    pairs: Mapping[str, tuple[ByScore, ByScore]], measure: Callable[[np.ndarray, np.ndarray], float]
) -> dict[str, dict[str, float]]:
    return {kind: {name: measure(ours[name], theirs[name]) for name in ours} for kind, (ours, theirs) in pairs.items()}


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


def tables(found: Uncertainty, title: str) -> Iterator[Table]:
    """What is printed."""
    yield _calibration_table(found, title)
    yield _selective_table(found.selective)
    columns = [Column(name, FOUR, right=True) for name in found.conformal]
    yield Table('conformal', columns, [tuple(found.conformal.values())], 'conformal sets of classes')
    if found.risk is not None:
        yield _risk_table(found.risk, found.recent_risk)
    if found.cascade is not None:
        yield _cascade_table('cascade', 'confidence', found.cascade)
    if found.learned is not None:
        yield _cascade_table('learned', 'a learned rule', found.learned)
    if found.budgeted is not None:
        columns = [Column(name, FOUR, right=True) for name in ('if below', 'handed on', 'cost', 'accuracy')]
        caption = 'cascade within the budget, on rows it was not chosen on'
        yield Table('budget', columns, [dataclasses.astuple(found.budgeted)], caption)
    if found.of_itself:
        yield judged_table(found.of_itself)
    if found.left_out:
        yield Table('left out', [Column('score'), Column('because')], list(found.left_out.items()), 'left out')
    for name, by_kind, caption in (
        ('detection', found.detection, 'probability of scoring above what was changed'),
        ('false positives', found.false_positives, 'share of what was changed that passes where 95 % of the rest does'),
    ):
        if by_kind:
            columns = [Column('score'), *(Column(kind, FOUR, right=True) for kind in by_kind)]
            rows = [(score, *(one[score] for one in by_kind.values())) for score in found.selective]
            yield Table(name, columns, rows, caption)


def _calibration_table(found: Uncertainty, title: str) -> Table:
    columns = [
        Column('logits'),
        Column('temperature', FOUR, right=True),
        Column('calibration error', plus_minus, right=True),
        Column('nats', FOUR, right=True),
    ]
    temperatures = zip(found.calibration.items(), (1.0, found.temperature), strict=True)
    rows = [(name, warmth, Interval(**one['error']), one['loss']) for (name, one), warmth in temperatures]
    return Table('calibration', columns, rows, f'{title}: accuracy {found.accuracy:.4f}')


def _selective_table(selective: Mapping[str, Mapping[str, float]]) -> Table:
    names = list(next(iter(selective.values())))
    columns = [Column('score'), *(Column(name, FOUR, right=True, rank=rank) for rank, name in enumerate(names))]
    rows = [(name, *(one[each] for each in names)) for name, one in selective.items()]
    return Table('selective', columns, rows, 'accuracy of the best scored rows; area under risk by coverage')


def _cascade_table(name: str, rule: str, both: Cascade) -> Table:
    ranks = {'handed on': 0, 'if below': 2, 'accuracy': 0, 'by chance': 1, 'cost': 0}
    columns = [Column(title, FOUR, right=True, rank=rank) for title, rank in ranks.items()]
    rows = list(zip(both.rates, both.thresholds, both.accuracy, both.by_chance, both.cost, strict=True))
    gain = plus_minus(Interval(**dataclasses.asdict(both.gain)))
    caption = f'cascade by {rule}, cost in units of the second run; in the mean {gain} over chance'
    return Table(name, columns, rows, caption)


def _risk_table(found: Risk, of_recent: Risk | None) -> Table:
    columns = [
        Column('chosen by'),
        Column('setting', FOUR, right=True),
        Column('risk', plus_minus, right=True),
        Column(LOSSES[found.loss].name, FOUR, right=True),
    ]
    both = {'all rows that choose': found} | ({} if of_recent is None else {'recent ones': of_recent})
    rows = [(by, one.setting, Interval(**dataclasses.asdict(one.risk)), one.used) for by, one in both.items()]
    return Table('risk', columns, rows, f'risk of {found.loss}, of a row, {found.level:g} at most in expectation')
