"""Softmax regression, and how close a step of its weights is to a change of its data.

    min_x 1/2 |f(x) - b|^2,   f(x) = softmax(A x)

A step of gradient descent moves the weights `x`; a layer of attention moves the data `A` and leaves the weights as they
are. Either is as if the target `b` had been another one: `f(x) - (b + shift) = f(moved x) - b`. Li et al. 2023, "The
Closeness of In-Context Learning and Weight Shifting for Softmax Regression", https://arxiv.org/abs/2304.13276, bound
both shifts by a multiple of the move. All in float64, in `O(n d)` operations.
"""

import dataclasses

import numpy as np
from jaxtyping import Float
from scipy.special import softmax

from attnlab.errors import UserError

Weights = Float[np.ndarray, ' d']
Rows = Float[np.ndarray, 'n d']


@dataclasses.dataclass(frozen=True, eq=False)
class SoftmaxRegression:
    """The problem of rows `A` and a target `b`, a distribution over them.

    Raises `UserError` for a target that has not one number a row.
    """

    rows: Rows
    target: Float[np.ndarray, ' m']

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.target):
            raise UserError(
                f'target has {len(self.target)} numbers; it must have one for each of {len(self.rows)} rows'
            )

    def predicted(self, x: Weights) -> Float[np.ndarray, ' n']:
        """`f(x) = softmax(A x)`."""
        return softmax(self.rows @ x)

    def loss(self, x: Weights) -> float:
        """`1/2 |f(x) - b|^2`."""
        return float(np.square(self.predicted(x) - self.target).sum() / 2)

    def gradient(self, x: Weights) -> Weights:
        """`A^T (diag(f) - f f^T) (f - b)`."""
        f = self.predicted(x)
        return self.rows.T @ _along(f, f - self.target)

    def hessian_times(self, x: Weights, v: Weights) -> Weights:
        """The second derivative of the loss, times a vector: `J = diag(f) - f f^T`, `u = J A v`, `c = f - b` in

        `A^T (u c - u (f^T c) - f (u^T c) + J u)`, products of vectors element by element where no transpose stands.
        """
        f = self.predicted(x)
        c, u = f - self.target, _along(f, self.rows @ v)
        return self.rows.T @ (u * c - u * (f @ c) - f * (u @ c) + _along(f, u))

    def stepped(self, x: Weights, rate: float) -> Weights:
        """The weights after one step of gradient descent."""
        return x - rate * self.gradient(x)

    def shift_of_weights(self, x: Weights, moved: Weights) -> Float[np.ndarray, ' n']:
        """What is added to the target where the weights move: `f(x) - f(moved)`."""
        return self.predicted(x) - self.predicted(moved)

    def shift_of_data(self, x: Weights, rows: Rows) -> Float[np.ndarray, ' n']:
        """What is added to the target where the data move to other rows, of as many numbers."""
        return self.predicted(x) - softmax(rows @ x)

    def rows_like(self, x: Weights, moved: Weights) -> Rows:
        """The data nearest to `A` that predict with `x` what `A` predicts with moved weights:

        `A + A (moved - x) x^T / |x|^2`, each row moved along `x` alone. Raises `UserError` for weights that are zero.
        """
        length = float(x @ x)
        if length == 0:
            raise UserError('weights that are zero predict the same of all data; give others')
        return self.rows + np.outer(self.rows @ (moved - x), x) / length


def _along(f: Float[np.ndarray, ' n'], v: Float[np.ndarray, ' n']) -> Float[np.ndarray, ' n']:
    """`(diag(f) - f f^T) v`, the derivative of softmax along `v`."""
    return f * v - f * (f @ v)
