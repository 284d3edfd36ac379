"""A number with its evidence: an interval at 95 %, what the interval is over, and of how many."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

Kind = Literal['one', 'range', 'seeds', 'documents', 'examples', 'trials']
"""What an interval is over: `one` value has none; the `range` is the least and the most of two seeds, and no interval
of confidence; `seeds` by Student's t; `documents` by bootstrap; `examples` by the binomial; the best of `trials` by
order statistics."""

RESAMPLES = 1000
NORMAL = 1.959964
"""The half width of a normal interval at 95 %, in standard deviations."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A mean or another statistic, with its interval at 95 %.

    Attributes:
      mean: the value.
      low: where the interval begins; `None` for one value, of which there is no interval.
      high: where it ends.
      n: over how many seeds, documents, examples or trials it is.
      kind: over which of them.
      noise: the standard deviation, in the interval, of what the finite test set adds; `None` where it is not known.

    Raises:
      ValueError: for an interval over nothing, an interval without one of its ends, or one that the value is not in.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    kind: Kind
    noise: float | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None) or (self.low is None) != (self.kind == 'one'):
            raise ValueError(f'an interval over {self.kind} from {self.low} to {self.high}')
        if self.low is not None and self.high is not None and not self.low <= self.mean <= self.high:
            raise ValueError(f'{self.mean} is not between {self.low} and {self.high}')

    @property
    def half_width(self) -> float | None:
        """Half of the interval's width; `None` where there is none."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def negated(self) -> 'Measured':
        """The same of the quantity with the other sign."""
        low = None if self.high is None else -self.high
        high = None if self.low is None else -self.low
        return dataclasses.replace(self, mean=-self.mean, low=low, high=high)

    def scaled(self, factor: float) -> 'Measured':
        """The same in another unit; `factor` is positive."""
        ends = (None if end is None else end * factor for end in (self.low, self.high, self.noise))
        low, high, noise = ends
        return dataclasses.replace(self, mean=self.mean * factor, low=low, high=high, noise=noise)


def of_seeds(values: Sequence[float] | np.ndarray, noise: float | None = None) -> Measured:
    """The mean over seeds.

        mean +- sqrt((t_{n-1} s / sqrt(n))^2 + (1.96 noise)^2)

    with `t` the 0.975 quantile of Student's distribution and `s` the unbiased deviation of the `n` values. All seeds
    are evaluated on one test set, so that its noise, a standard deviation, does not shrink with their number. Of two
    seeds it is the least and the most, called a range, since `t_1` is 12.7; of one there is no interval.
    """
    found = np.asarray(values, np.float64)
    mean, n = float(found.mean()), len(found)
    if n == 1 or not np.isfinite(found).all():
        return Measured(mean, None, None, n, 'one', noise)
    if n == 2:
        return Measured(mean, float(found.min()), float(found.max()), 2, 'range', noise)
    spread = stdtrit(n - 1, 0.975) * found.std(ddof=1) / np.sqrt(n)
    half = float(np.hypot(spread, NORMAL * (noise or 0.0)))
    return Measured(mean, mean - half, mean + half, n, 'seeds', noise)


def of_documents(totals: Float[np.ndarray, 'n'], counts: Float[np.ndarray, 'n'], seed: int = 0) -> Measured:
    """The ratio `sum(totals) / sum(counts)` over documents; those without a count are left out.

        ratio +- t_{n-1} s_b sqrt(n / (n - 1))

    where `s_b` is the deviation of the ratio over `RESAMPLES` draws of `n` documents with replacement (Efron 1979,
    https://doi.org/10.1214/aos/1176344552). Percentiles of the draws, which for few documents are too narrow, are not
    used. A pure function of its arguments.
    """
    counted = counts > 0
    totals, counts, n = totals[counted], counts[counted], int(counted.sum())
    mean = float(totals.sum() / counts.sum()) if n else float('nan')
    if n < 2 or not np.isfinite(mean):
        return Measured(mean, None, None, n, 'one')
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    deviation = float(np.std((draws @ totals) / (draws @ counts)) * np.sqrt(n / (n - 1)))
    half = float(stdtrit(n - 1, 0.975)) * deviation
    return Measured(mean, mean - half, mean + half, n, 'documents', deviation)
