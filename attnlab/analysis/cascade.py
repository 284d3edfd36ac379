"""Two classifiers, the second of which is asked where the first is not sure: accuracy over cost."""

import dataclasses

import numpy as np
from jaxtyping import Float, Shaped
from scipy.special import softmax

from attnlab.analysis.calibration import Estimate, bootstrapped
from attnlab.analysis.scores import max_probability, negative_entropy
from attnlab.errors import UserError

RATES = tuple(tenth / 10 for tenth in range(11))
"""Shares of inputs that are handed on, of which the accuracy is said."""


@dataclasses.dataclass(frozen=True)
class Cascade:
    """What a cascade reaches.

    Attributes:
      rates: shares of inputs that are handed on, the least sure first.
      thresholds: the confidence below which they are.
      accuracy: of the first classifier on those it keeps and the second on the others.
      by_chance: where as many are handed on whatever they are.
      cost: of the first on all and the second on these, in units of the second on all.
      gain: by how much the accuracy exceeds that by chance, on average over all rates, with its interval.
    """

    rates: tuple[float, ...]
    thresholds: tuple[float, ...]
    accuracy: tuple[float, ...]
    by_chance: tuple[float, ...]
    cost: tuple[float, ...]
    gain: Estimate


def cascade(
    confidence: Float[np.ndarray, 'b'],
    first: Shaped[np.ndarray, 'b'],
    second: Shaped[np.ndarray, 'b'],
    relative_cost: float,
) -> Cascade:
    """The rule of confidence: input `i` is handed on if `confidence_i` is below a threshold.

    It is the best rule where the second classifier is right as often whatever the first one's confidence (Jitkrittum et
    al. 2023, https://arxiv.org/abs/2307.02764). Of inputs with one confidence any are handed on first: what is said is
    the mean over their orders.

    Args:
      confidence: of the first classifier.
      first: whether it is right, or of an input of several predictions what share of them is.
      second: the same of the second one.
      relative_cost: of an answer of the first, that of the second being one.
    """
    count = len(confidence)
    accuracy = _accuracies(confidence, first, second)
    by_chance = np.linspace(accuracy[0], accuracy[-1], count + 1)
    limits = np.append(np.sort(confidence), np.nextafter(np.max(confidence), np.inf))
    places = [round(rate * count) for rate in RATES]
    shares = [place / count for place in places]
    return Cascade(
        rates=tuple(shares),
        thresholds=tuple(float(limits[place]) for place in places),
        accuracy=tuple(float(accuracy[place]) for place in places),
        by_chance=tuple(float(by_chance[place]) for place in places),
        cost=tuple(relative_cost + share for share in shares),
        gain=bootstrapped(lambda each: _gain(_accuracies(confidence[each], first[each], second[each])), count),
    )


def learned_confidence(
    known: Float[np.ndarray, 'b f'],
    first: Shaped[np.ndarray, 'b'],
    second: Shaped[np.ndarray, 'b'],
    new: Float[np.ndarray, 'c f'],
    ridge: float = 1e-2,
) -> Float[np.ndarray, 'c']:
    """Minus what handing on is expected to gain, learned from inputs that both classifiers have answered.

    Least squares of `1[second right] - 1[first right]` on what `described` says of inputs (Diff-01 of Jitkrittum et al.
    2023, whose regression is a small network). It is better than confidence where the second classifier is right more
    often for some classes than for others.
    """
    gain = second.astype(float) - first.astype(float)
    centre = known.mean(axis=0)
    apart = known - centre
    penalty = ridge * len(known) * np.eye(known.shape[1])
    slope = np.linalg.solve(apart.T @ apart + penalty, apart.T @ (gain - gain.mean()))
    return -(gain.mean() + (new - centre) @ slope)


def described(logits: Float[np.ndarray, 'b o']) -> Float[np.ndarray, 'b f']:
    """The probabilities of a classifier, the largest, and their negative entropy."""
    others = np.stack([max_probability(logits), negative_entropy(logits)], axis=1)
    return np.concatenate([softmax(logits, axis=1), others], axis=1)


@dataclasses.dataclass(frozen=True)
class Budgeted:
    """What a cascade with a budget reaches on inputs that its threshold was not chosen on.

    Attributes:
      threshold: the confidence below which inputs are handed on; -infinity where the budget is for none.
      share: of inputs that are, which the budget may end before all of these.
      cost: of an input on average, in units of the second classifier.
      accuracy: of the first on those it keeps and the second on the others.
    """

    threshold: float
    share: float
    cost: float
    accuracy: float


def budgeted(
    chosen: Float[np.ndarray, 'b'],
    confidence: Float[np.ndarray, 'c'],
    first: Shaped[np.ndarray, 'c'],
    second: Shaped[np.ndarray, 'c'],
    relative_cost: float,
    budget: float,
) -> Budgeted:
    """The highest threshold that keeps a budget, by the `chosen` inputs, and what it gives on others.

    An input is below the k-th least sure of n others like it with a probability of at most `k / (n + 1)`, so that the
    k-th is the threshold where `relative_cost + k / (n + 1)` is within the budget: it is kept on average over inputs.
    Of these inputs the least sure are handed on, as many as are below it and no more than the budget has left, so that
    it is never exceeded; of inputs with one confidence any are, and accuracy is the mean over their orders.

    Raises `UserError` for a budget that the first classifier alone exceeds.
    """
    if budget < relative_cost:
        raise UserError(
            f'the budget is {budget:g} of what the second run costs; the first alone costs {relative_cost:.3g} of it'
        )
    limits = np.concatenate([[-np.inf], np.sort(chosen), [np.inf]])
    threshold = limits[_within(budget, relative_cost, len(chosen) + 1)]
    on = min(int(np.sum(confidence < threshold)), _within(budget, relative_cost, len(confidence)))
    share = on / len(confidence)
    accuracy = float(_accuracies(confidence, first, second)[on])
    return Budgeted(float(threshold), share, relative_cost + share, accuracy)


def _within(budget: float, relative_cost: float, count: int) -> int:
    """How many of `count` inputs the second classifier can be asked about."""
    return int(np.sum(relative_cost + np.arange(1, count + 1) / count <= budget))


def _accuracies(
    confidence: Float[np.ndarray, 'b'], first: Shaped[np.ndarray, 'b'], second: Shaped[np.ndarray, 'b']
) -> Float[np.ndarray, 'c']:
    """Where none, one, two and so on up to all inputs are handed on."""
    order = np.argsort(confidence, kind='stable')
    _, tied = np.unique(confidence, return_inverse=True)
    sizes = np.bincount(tied)
    ours, theirs = ((np.bincount(tied, right) / sizes)[tied][order] for right in (first, second))
    kept = ours.sum() - np.concatenate([[0], np.cumsum(ours)])
    return (kept + np.concatenate([[0], np.cumsum(theirs)])) / len(order)


def _gain(accuracy: Float[np.ndarray, 'c']) -> float:
    by_chance = np.linspace(accuracy[0], accuracy[-1], len(accuracy))
    return float(np.trapezoid(accuracy - by_chance, dx=1 / (len(accuracy) - 1)))
