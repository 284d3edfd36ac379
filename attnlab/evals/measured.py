"""A number with its 95 % interval, and the kind and number of values that the interval is over."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from attnlab.tables import with_ends

Kind = Literal['one', 'survivors', 'range', 'seeds', 'documents', 'examples', 'trials']
"""What an interval is over: `one` value has none, nor have `survivors`, the seeds that are left where others failed:
their spread does not show the failures; the `range` is the minimum and maximum of two seeds, not a confidence interval;
`seeds` by Student's t; `documents` and `trials` by Student's t of a deviation over bootstrap resamples; `examples` by
Wilson's interval."""

BARE: tuple[Kind, ...] = ('one', 'survivors')
"""The kinds that have no interval."""

RESAMPLES = 1000
"""Draws of a bootstrap."""

NORMAL = 1.959964
"""The half width of a normal interval at 95 %, in standard deviations."""

SHARE = (0.0, 1.0)
"""The bounds of a share, such as an accuracy."""

HIGHER = ('accuracy', 'exact_match', 'precision', 'recall', 'f1', 'auroc')
"""Endings of the names of metrics that are shares, and for which higher is better."""


RATIOS = ('si_snr', 'si_snr_improvement')
"""Endings of the names of metrics for which higher is better, and that are no shares."""

LOWER = (
    *('loss', 'bits_per_byte', 'perplexity', 'divergence', 'excess', 'error', 'crps'),
    *('mse', 'mae', 'mase', 'mse_original', 'mae_original', 'spectral_distance', 'false_alarms'),
)
"""Endings of the names of metrics for which lower is better."""


def goal_of(metric: str) -> str | None:
    """'max' for a metric for which higher is better, 'min' where lower is; `None` where its name does not say."""
    name = metric.partition('@')[0]
    return 'max' if name.endswith((*HIGHER, *RATIOS)) else 'min' if name.endswith(LOWER) else None


def is_share(metric: str) -> bool:
    """Whether a metric is a share, from 0 to 1, for which higher is better."""
    return metric.endswith(HIGHER)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A mean or another statistic, with its interval at 95 %.

    Attributes:
      mean: the value.
      low: the lower end of the interval; `None` for the kinds that have none.
      high: the upper end.
      n: the number of seeds, documents, examples or trials.
      kind: which of these it is over.
      noise: the standard deviation due to the finite test set, included in the interval; `None` where it is not known.

    Raises:
      ValueError: for an interval over nothing, with one end only, or that does not contain the value.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    kind: Kind
    noise: float | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None) or (self.low is None) != (self.kind in BARE):
            raise ValueError(f'an interval over {self.kind} from {self.low} to {self.high}')
        if self.low is not None and self.high is not None and not self.low <= self.mean <= self.high:
            raise ValueError(f'{self.mean} is not between {self.low} and {self.high}')

    @property
    def half_width(self) -> float | None:
        """Half of the interval's width; `None` where there is none."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def text(self, digits: int) -> str:
        """See `attnlab.tables.with_ends`; of two seeds `value (least to most)`, of one the value alone."""
        value = f'{self.mean:.{digits}f}'
        if self.low is None or self.high is None:
            return value
        if self.kind == 'range':
            return f'{value} ({self.low:.{digits}f} to {self.high:.{digits}f})'
        return with_ends(self.mean, self.low, self.high, digits)

    def negated(self) -> 'Measured':
        """The same with the opposite sign."""
        low = None if self.high is None else 0.0 - self.high
        high = None if self.low is None else 0.0 - self.low
        return dataclasses.replace(self, mean=0.0 - self.mean, low=low, high=high)

    def within(self, least: float, most: float) -> 'Measured':
        """The same with an interval that ends at the bounds of the quantity, such as 0 and 1."""
        if self.low is None or self.high is None:
            return self
        low, high = min(max(self.low, least), self.mean), max(min(self.high, most), self.mean)
        return dataclasses.replace(self, low=low, high=high)

    def scaled(self, factor: float) -> 'Measured':
        """The same in another unit; `factor` is positive."""
        ends = (None if end is None else end * factor for end in (self.low, self.high, self.noise))
        low, high, noise = ends
        return dataclasses.replace(self, mean=self.mean * factor, low=low, high=high, noise=noise)


def of_seeds(values: Sequence[float] | np.ndarray, noise: float | None = None) -> Measured:
    """The mean over seeds.

        mean +- sqrt((t_{n-1} s / sqrt(n))^2 + (1.96 noise)^2)

    with `t` the 0.975 quantile of Student's distribution and `s` the unbiased deviation of the `n` values. All seeds
    are evaluated on one test set, so that its noise, a standard deviation, does not shrink with their number. Two
    seeds give their minimum and maximum, called a range, since `t_1` is 12.7; one gives no interval.
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


def of_examples(right: float, labels: float, products: Float[np.ndarray, '3'], examples: int) -> Measured:
    """The share of labels that a model gets right on a finite test set, with Wilson's interval.

        (p + z^2 / 2m +- z sqrt(p (1 - p) / m + z^2 / 4m^2)) / (1 + z^2 / m),   z = 1.96

    with `p = right / labels`, and `m` the number of independent labels that would be as noisy as these, which come in
    examples: `m = p (1 - p) / v`, where `v` is the variance of the ratio over examples, of the `products` that
    `attnlab.metrics.proportion` has. `m` is at most `labels`, and `examples` where all labels are right or all wrong.

    Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953. Nothing asked is NaN, without an interval.
    """
    if not labels:
        return Measured(float('nan'), None, None, 0, 'one')
    p = right / labels
    squares, crossed, sizes = products
    variance = (squares - 2 * p * crossed + p * p * sizes) * examples**2 / (max(examples - 1, 1) * labels**2)
    m = min(p * (1 - p) / variance, labels) if variance > 0 and 0 < p < 1 else examples
    square = NORMAL**2
    middle = (p + square / (2 * m)) / (1 + square / m)
    half = NORMAL * np.sqrt(p * (1 - p) / m + square / (4 * m * m)) / (1 + square / m)
    low, high = max(0.0, float(middle - half)), min(1.0, float(middle + half))
    return Measured(p, min(low, p), max(high, p), examples, 'examples', (high - low) / (2 * NORMAL))


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
