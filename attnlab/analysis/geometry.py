"""What successive layers do to the clouds of hidden states: how linear, how far, of how many dimensions."""

import numpy as np
from jaxtyping import Float, Shaped

FEWEST = 10
"""Points of which an intrinsic dimension is said at least."""


def linearity(before: Shaped[np.ndarray, 'n d'], after: Shaped[np.ndarray, 'n f']) -> float:
    """`1 - min_A |X A - Y|_F^2`, both centred and of norm one: 1 where a linear map makes one of the other.

    With `n` points in `d` dimensions, unrelated ones reach about `d / n`; and a small change of large states is linear
    whatever it is, wherefore the change alone is asked about too. Razzhigaev et al. 2024,
    https://arxiv.org/abs/2405.12250, where this is called the Procrustes similarity.
    """
    return float(1 - np.sum(np.square(token_nonlinearity(before, after))))


def token_nonlinearity(before: Shaped[np.ndarray, 'n d'], after: Shaped[np.ndarray, 'n f']) -> Float[np.ndarray, 'n']:
    """`|A x_i - y_i|` of every token, for the linear map A that serves all of them best, X and Y as for `linearity`.

    Its squares add up to what is not linear. Razzhigaev et al. 2025, https://arxiv.org/abs/2502.15007.
    """
    x, y = (_normalised(each) for each in (before, after))
    found, *_ = np.linalg.lstsq(x, y, rcond=None)
    return np.linalg.norm(x @ found - y, axis=1)


def mean_cosine(before: Shaped[np.ndarray, 'n d'], after: Shaped[np.ndarray, 'n d']) -> float:
    """The mean cosine of states with themselves a layer later."""
    x, y = (np.asarray(each, np.float64) for each in (before, after))
    sizes = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return float(np.mean(np.sum(x * y, axis=1) / np.where(sizes > 0, sizes, 1)))


def intrinsic_dimension(points: Shaped[np.ndarray, 'n d']) -> float:
    """The number of dimensions of which neighbourhoods are, from distances to the two nearest points of each.

    `mu = r_2 / r_1` is distributed as `F = 1 - mu^-dimension`: the slope of `-log(1 - F)` over `log mu` through the
    origin, of the least fifth of the ratios. It underestimates large dimensions. Points that occur twice count once.
    Facco et al. 2017, https://arxiv.org/abs/1803.06992. NaN of fewer than ten.
    """
    x = np.unique(np.asarray(points, np.float64), axis=0)
    x = x - x.mean(axis=0)
    if len(x) < FEWEST:
        return float('nan')
    squares = np.sum(np.square(x), axis=1)
    distances = np.maximum(squares[:, None] + squares - 2 * x @ x.T, 0)
    np.fill_diagonal(distances, np.inf)
    first, second = np.sqrt(np.partition(distances, 1, axis=1)[:, :2]).T
    known = (first > 0) & (second > first)
    ratios = np.sort(second[known] / first[known])
    count = len(ratios)
    share = (np.arange(count) + 1) / count
    if count < FEWEST:
        return float('nan')
    kept = count // 5
    horizontal, vertical = np.log(ratios[:kept]), -np.log1p(-share[:kept])
    return float(horizontal @ vertical / (horizontal @ horizontal))


def _normalised(points: Shaped[np.ndarray, 'n d']) -> Float[np.ndarray, 'n d']:
    x = np.asarray(points, np.float64)
    x = x - x.mean(axis=0)
    size = np.linalg.norm(x)
    return x / (size if size > 0 else 1)
