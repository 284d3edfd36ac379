"""Whether probabilities of classes are what they say, whom to answer, and sets that hold the label often enough."""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp, softmax, stdtrit

from attnlab.errors import UserError
from attnlab.evals.measured import RESAMPLES, SHARE

BINS = 15


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with the ends of its interval of 95 %; `None` where there is none."""

    value: float
    low: float | None
    high: float | None


def calibration_error(confidence: Float[np.ndarray, 'b'], right: Bool[np.ndarray, 'b']) -> float:
    """The expected calibration error, `sum_i n_i / n |accuracy_i - confidence_i|` over `BINS` bins of equal width.

    Guo et al. 2017, https://arxiv.org/abs/1706.04599. Of few examples it is too large: a calibrated model has about
    `sum_i sqrt(2 / pi n_i p_i (1 - p_i)) / n`.
    """
    places = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    gaps = np.bincount(places, right - confidence, minlength=BINS)
    return float(np.sum(np.abs(gaps)) / len(confidence))


def calibration_interval(
    confidence: Float[np.ndarray, 'b'],
    right: Bool[np.ndarray, 'b'],
    groups: Int[np.ndarray, 'b'] | None = None,
) -> Estimate:
    """The same, with its interval; of examples that are not independent within groups, over groups.

        from e - max(b, 0) - w to e + w, in [0, 1]

    with `w` the half width of `bootstrapped` and `b` the mean of resamples less `e`, about 0.4 of the bias that makes
    `e` too large. In simulations of 100 to 6,400 examples it covers errors of 0.05 and 0.1 in 90 to 97 %, of 0.02 in
    78 to 97 % and of 0, where all of `e` is bias, in 55 to 64 %; `e +- w` in 70 to 96, 24 to 92 and 4 to 7 %, and
    `e - b +- w` in 87 to 95, 78 to 91 and 55 to 64 %.
    """
    members = [np.flatnonzero(groups == each) for each in np.unique(groups)] if groups is not None else None

    def error(chosen: Int[np.ndarray, 'c']) -> float:
        places = chosen if members is None else np.concatenate([members[each] for each in chosen])
        return calibration_error(confidence[places], right[places])

    found, bias = _resampled(error, len(right) if members is None else len(members))
    if found.low is None:
        return found
    return _within(dataclasses.replace(found, low=found.low - max(bias, 0.0)), SHARE)


def bootstrapped(
    statistic: Callable[[Int[np.ndarray, 'b']], float], count: int, bounds: tuple[float, float] = (-np.inf, np.inf)
) -> Estimate:
    """A statistic of `n` examples by their places, with an interval within the `bounds` that it has; none for one.

        value +- t_{n-1} s_b sqrt(n / (n - 1))

    where `s_b` is its deviation over bootstrap resamples, as in `attnlab.evals.measured.of_documents`.
    """
    return _within(_resampled(statistic, count)[0], bounds)


def _resampled(statistic: Callable[[Int[np.ndarray, 'b']], float], count: int) -> tuple[Estimate, float]:
    """The same without bounds, and by how much the statistic is larger of resamples."""
    rng = np.random.default_rng(0)
    value = statistic(np.arange(count))
    if count == 1:
        return Estimate(value, None, None), 0.0
    found = [statistic(rng.integers(0, count, count)) for _ in range(RESAMPLES)]
    width = float(stdtrit(count - 1, 0.975) * np.std(found) * np.sqrt(count / (count - 1)))
    return Estimate(value, value - width, value + width), float(np.mean(found)) - value


def _within(one: Estimate, bounds: tuple[float, float]) -> Estimate:
    """The same with an interval that ends at the bounds."""
    if one.low is None or one.high is None:
        return one
    return dataclasses.replace(one, low=max(one.low, bounds[0]), high=min(one.high, bounds[1]))


def fitted_temperature(logits: Float[np.ndarray, 'b o'], labels: Int[np.ndarray, 'b']) -> float:
    """The T from 1/50 to 50 for which `softmax(f / T)` has the least cross-entropy."""

    def loss(log_temperature: float) -> float:
        warm = logits / np.exp(log_temperature)
        return float(np.mean(logsumexp(warm, axis=1) - warm[np.arange(len(labels)), labels]))

    found = minimize_scalar(loss, bounds=(-np.log(50), np.log(50)), method='bounded', options={'xatol': 1e-8})
    return float(np.exp(found.x))


def cross_entropy(logits: Float[np.ndarray, 'b o'], labels: Int[np.ndarray, 'b']) -> float:
    """`-log p(label)` in nats, on average."""
    return float(np.mean(logsumexp(logits, axis=1) - logits[np.arange(len(labels)), labels]))


def risk_by_coverage(score: Float[np.ndarray, 'b'], right: Bool[np.ndarray, 'b']) -> Float[np.ndarray, 'b']:
    """The share of wrong answers where the `i + 1` inputs of the largest scores are answered, for every `i`.

    Of inputs with one score any are answered first: what is said is the mean over their orders. Its mean is the area
    under the curve (AURC; Geifman et al. 2019, https://arxiv.org/abs/1805.08206).
    """
    order = np.argsort(-score, kind='stable')
    _, tied = np.unique(score, return_inverse=True)
    wrong = (np.bincount(tied, ~right) / np.bincount(tied))[tied]
    return np.cumsum(wrong[order]) / np.arange(1, len(right) + 1)


def conformal_threshold(scores: Float[np.ndarray, 'n'], alpha: float) -> float:
    """The threshold that the score of a new example exceeds with probability `alpha` at most, if exchangeable.

    The `ceil((n + 1)(1 - alpha))`-th smallest of `n` scores; infinite where there are too few. Scores are larger for
    labels that fit less. Vovk et al. 2005; coverage is below `1 - alpha + 1 / (n + 1)` where no scores tie.
    Raises `UserError` for an alpha outside of (0, 1).
    """
    _check_share(alpha)
    # Rounded first: 10 x 0.9 is a little more than 9.
    place = int(np.ceil(np.round((len(scores) + 1) * (1 - alpha), 9)))
    return float(np.sort(scores)[place - 1]) if place <= len(scores) else float('inf')


def weighted_threshold(scores: Float[np.ndarray, 'n'], weights: Float[np.ndarray, 'n'], alpha: float) -> float:
    """The threshold where examples count by weights from 0 to 1 that are fixed beforehand: less the older they are.

    The least score up to which the weights of examples are `1 - alpha` of all, the new example's weight of one counted
    as above all scores; infinite where there are too few. With weights of one it is `conformal_threshold`. Where
    examples drift, a label is missed with probability `alpha + sum_i w_i d_i` at most, `w_i` the share of example `i`
    and `d_i` the distance in total variation of all examples from the same with `i` and the new one exchanged, of
    independent ones at most twice that of these two. Barber et al. 2023, https://arxiv.org/abs/2202.13415;
    for risks Farinhas et al. 2023, https://arxiv.org/abs/2310.01262. Raises `UserError` for an alpha outside of (0, 1).
    """
    _check_share(alpha)
    order = np.argsort(scores, kind='stable')
    shares = np.cumsum(weights[order]) / (np.sum(weights) + 1)
    enough = np.flatnonzero(shares >= 1 - alpha - 1e-12)
    return float(scores[order][enough[0]]) if len(enough) else float('inf')


def misfit(logits: Float[np.ndarray, 'b o']) -> Float[np.ndarray, 'b o']:
    """`1 - p_o`, the score of every class for conformal sets (Sadinle et al. 2019, https://arxiv.org/abs/1609.00451)."""
    return 1 - softmax(logits, axis=1)


def conformal_sets(logits: Float[np.ndarray, 'b o'], threshold: float) -> Bool[np.ndarray, 'b o']:
    """Which classes are in the set of each input."""
    return misfit(logits) <= threshold


def controlled(
    losses: Float[np.ndarray, 'n l'], alpha: float, *, bound: float = 1.0, weights: Float[np.ndarray, 'n'] | None = None
) -> int | None:
    """The first column whose risk is controlled: the expected loss of a new example is `alpha` at most.

        N / (N + 1) R(column) + bound / (N + 1) <= alpha,  R = sum_i w_i losses_i / N,  N = sum_i w_i

    Columns are settings from bold to cautious: losses fall along a row, and are `bound` at most. Weights from 0 to 1
    are fixed beforehand, such as smaller ones for older examples; without them examples are exchangeable. `None` where
    no column will do. Angelopoulos et al. 2022, https://arxiv.org/abs/2208.02814; Farinhas et al. 2023,
    https://arxiv.org/abs/2310.01262. Raises `UserError` for losses that rise, or an alpha outside of (0, 1).
    """
    _check_share(alpha)
    if np.any(np.diff(losses, axis=1) > 0):
        raise UserError('losses must not rise from one column to the next; order settings from bold to cautious')
    weights = np.ones(len(losses)) if weights is None else weights
    total = np.sum(weights)
    risks = (weights @ losses + bound) / (total + 1)
    controlled_columns = np.flatnonzero(risks <= alpha)
    return int(controlled_columns[0]) if len(controlled_columns) else None


def _check_share(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise UserError(f'alpha is {alpha}; it must be above 0 and below 1')
