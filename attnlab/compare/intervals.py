"""Numbers that say how good a recipe is, and how sure that is: never one lucky run.

All are of the trials of one study, smaller being better; for a goal of 'max' the caller changes signs.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

Numbers = np.ndarray
RESAMPLES = 1000


@dataclasses.dataclass(frozen=True)
class Interval:
    """A statistic and its 95% bootstrap interval.

    Percentiles of the statistic of trials drawn with replacement. Efron 1979, https://doi.org/10.1214/aos/1176344552.
    """

    value: float
    low: float
    high: float

    def negated(self) -> 'Interval':
        """The same, larger being better."""
        return Interval(-self.value, -self.high, -self.low)


def best(rates: Numbers, values: Numbers) -> float:
    """The least value: what one lucky trial reaches."""
    return float(values.min())


def top_quarter(rates: Numbers, values: Numbers) -> float:
    """The median of the best quarter of the trials, at least one."""
    return float(np.median(np.sort(values)[: math.ceil(len(values) / 4)]))


def area(rates: Numbers, values: Numbers) -> float:
    """The mean value over the logarithm of the learning rate: how much it matters to tune it.

    Values at one rate are averaged, and the curve through them is integrated by trapezoids and divided by its width.
    """
    found, places = np.unique(np.log(rates), return_inverse=True)
    means = np.bincount(places, values) / np.bincount(places)
    return float(means[0] if len(found) == 1 else np.trapezoid(means, found) / (found[-1] - found[0]))


def mean(rates: Numbers, values: Numbers) -> float:
    """The mean value."""
    return float(values.mean())


def bootstrap(
    statistic: Callable[[Numbers, Numbers], float], rates: Sequence[float], values: Sequence[float], seed: int = 0
) -> Interval:
    """The statistic with its interval; a pure function of its arguments."""
    x, y = np.asarray(rates, np.float64), np.asarray(values, np.float64)
    draws = np.random.default_rng(seed).integers(len(y), size=(RESAMPLES, len(y)))
    low, high = np.percentile([statistic(x[draw], y[draw]) for draw in draws], (2.5, 97.5))
    return Interval(statistic(x, y), float(low), float(high))
