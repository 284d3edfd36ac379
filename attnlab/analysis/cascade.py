"""Two classifiers, the second of which is asked where the first is not sure: accuracy over cost."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float

from attnlab.analysis.calibration import Estimate, bootstrapped

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
      gain: by how much the accuracy exceeds that by chance, in the mean over all rates, with its interval.
    """

    rates: tuple[float, ...]
    thresholds: tuple[float, ...]
    accuracy: tuple[float, ...]
    by_chance: tuple[float, ...]
    cost: tuple[float, ...]
    gain: Estimate


def cascade(
    confidence: Float[np.ndarray, 'b'],
    first: Bool[np.ndarray, 'b'],
    second: Bool[np.ndarray, 'b'],
    relative_cost: float,
) -> Cascade:
    """The rule of confidence: input `i` is handed on if `confidence_i` is below a threshold.

    It is the best rule where the second classifier is right as often whatever the first one's confidence (Jitkrittum et
    al. 2023, https://arxiv.org/abs/2307.02764). Of inputs with one confidence any are handed on first: what is said is
    the mean over their orders.

    Args:
      confidence: of the first classifier.
      first: whether it is right.
      second: whether the second one is.
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


def _accuracies(
    confidence: Float[np.ndarray, 'b'], first: Bool[np.ndarray, 'b'], second: Bool[np.ndarray, 'b']
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
