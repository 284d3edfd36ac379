"""Directions of a window in which the steps of the training rows are not correlated."""

import dataclasses
import functools

import numpy as np
from jaxtyping import Float

from attnlab.data.series.columns import EVERY, Columns
from attnlab.data.series.series import Series
from attnlab.data.series.windows import scaled
from attnlab.errors import UserError

LEAST = 1e-4
"""The variance of a step, scaled, below which a variate is left out."""


@dataclasses.dataclass(frozen=True)
class TrainingBasis:
    """The eigenvectors of the correlations between the steps of a window, over the training rows of a series.

        R = mean over variates of corr(x_{t+1} .. x_{t+n}),   R q_i = l_i q_i,   l_1 >= l_2 >= ...

    Row i of the matrix is q_i, so that `Q x` are uncorrelated numbers and `Q^T Q = I`. Yue et al. 2025,
    https://arxiv.org/abs/2505.08550, whose released matrices of the ETT files are of rows of validation too.

    Attributes:
      data: the series.
      columns: which are forecast; those are the variates.
    """

    data: Series
    columns: Columns = EVERY

    def rows(self, steps: int) -> Float[np.ndarray, 'n n']:
        """The matrix for windows of `steps` steps, float32.

        Raises `UserError` for fewer training rows than twice as many, and where no variate changes.
        """
        return _basis(self.data, self.columns, steps)


@functools.lru_cache(maxsize=8)
def _basis(data: Series, columns: Columns, steps: int) -> Float[np.ndarray, 'n n']:
    train = scaled(data, columns).split('train').astype(np.float64)
    if len(train) < 2 * steps:
        raise UserError(f'a basis of {steps} steps needs {2 * steps} training rows; the series has {len(train)}')
    return np.linalg.eigh(correlations(train, steps))[1].T[::-1].astype(np.float32)


def correlations(rows: Float[np.ndarray, 'n v'], steps: int) -> Float[np.ndarray, 'm m']:
    """The correlations of the steps of all windows, the mean over variates; those that stand still are left out.

    Sums over windows of `x_{t+i} x_{t+j}` follow from those of `i - 1` and `j - 1`, so that windows are not stored.
    Raises `UserError` where none is left.
    """
    windows = len(rows) - steps + 1
    found = [one for variate in rows.T if (one := _covariance(variate, windows, steps)).diagonal().min() >= LEAST]
    if not found:
        raise UserError('no variate changes in the training rows; there are no correlations of their steps')
    deviations = [np.sqrt(one.diagonal()) for one in found]
    every = [one / np.outer(each, each) for one, each in zip(found, deviations, strict=True)]
    return np.mean(every, axis=0)


def _covariance(x: Float[np.ndarray, 'n'], windows: int, steps: int) -> Float[np.ndarray, 'm m']:
    products = np.empty((steps, steps))
    products[0] = np.correlate(x, x[:windows], 'valid')
    products[:, 0] = products[0]
    for i in range(1, steps):
        entering = x[windows + i - 1] * x[windows : windows + steps - 1]
        products[i, 1:] = products[i - 1, :-1] + entering - x[i - 1] * x[: steps - 1]
    means = np.convolve(x, np.ones(windows), 'valid') / windows
    return products / windows - np.outer(means, means)
