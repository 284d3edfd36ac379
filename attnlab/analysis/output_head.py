"""Statistics of what predicts: how isotropic its matrix and the hidden states are, and what rank the data ask for."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Shaped
from scipy.optimize import minimize

STEPS = 100
"""The most steps of a refit."""


def singular_shares(matrix: Shaped[np.ndarray, 'n d']) -> Float[np.ndarray, ' r']:
    """Singular values over their sum, the greatest first."""
    values = np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False)
    return values / values.sum()


def singular_entropy(matrix: Shaped[np.ndarray, 'n d']) -> float:
    """`log r + sum_i p_i log p_i` in nats, of the r singular values over their sum: 0 if all are equal, `log r` if one.

    Godey, de la Clergerie and Sagot 2024, https://arxiv.org/abs/2404.07647.
    """
    shares = singular_shares(matrix)
    return float(np.log(len(shares)) - _entropy(shares))


def effective_rank(matrix: Shaped[np.ndarray, 'n d']) -> float:
    """`exp(-sum_i p_i log p_i)` of the singular values over their sum. Roy and Vetterli 2007."""
    return float(np.exp(_entropy(singular_shares(matrix))))


def directions_for(matrix: Shaped[np.ndarray, 'n d'], share: float) -> int:
    """The fewest singular directions that hold this share of the sum of squares."""
    squares = np.square(singular_shares(matrix))
    reached = np.cumsum(squares) / squares.sum()
    return int(np.searchsorted(reached, share * (1 - 1e-12)) + 1)


def anisotropy(hidden: Shaped[np.ndarray, 'n d'], *, centred: bool = False) -> float:
    """The mean cosine of two different hidden states; `centred`: after their mean is subtracted.

    A mean that all share makes it near 1, whatever else they hold. From the sum of all directions, whose square holds
    every pair twice, and every direction with itself. Godey, de la Clergerie and Sagot 2024,
    https://arxiv.org/abs/2404.07647.
    """
    hidden = np.asarray(hidden, np.float64)
    hidden = hidden - hidden.mean(axis=0) if centred else hidden
    norms = np.linalg.norm(hidden, axis=1, keepdims=True)
    directions = hidden / np.where(norms > 0, norms, 1)
    count = len(hidden)
    return float((np.square(directions.sum(axis=0)).sum() - np.square(directions).sum()) / (count * (count - 1)))


def log_probabilities(
    contexts: Int[np.ndarray, ' n'], targets: Int[np.ndarray, ' n'], outputs: int, *, added: float = 1.0
) -> Float[np.ndarray, 'c o']:
    """`log((count(c, w) + added) / (count(c) + added o))` of every target after every context that occurs."""
    seen, places = np.unique(contexts, return_inverse=True)
    counts = np.full((len(seen), outputs), added)
    np.add.at(counts, (places, targets), 1)
    return np.log(counts / counts.sum(axis=1, keepdims=True))


class Refit(NamedTuple):
    """A matrix of some rank in the place of a head's, and its losses in nats.

    Attributes:
      rank: how many factors it has.
      fitted: the mean loss of the hidden states that it was fitted to.
      held_out: of others.
    """

    rank: int
    fitted: float
    held_out: float


class Predictions(NamedTuple):
    """Hidden states and what was to be predicted from them."""

    hidden: Float[np.ndarray, 'n d']
    targets: Int[np.ndarray, ' n']


def refits(
    start: Float[np.ndarray, 'o d'], fitted: Predictions, held_out: Predictions, ranks: Sequence[int]
) -> list[Refit]:
    """Softmax losses of the best `W = A B` of each rank found on frozen hidden states, `A` of shape `o r`.

    By L-BFGS from the singular directions of `start`, in float32. Factors beyond the rank start at zero and stay there,
    for their gradients are zero, so that one program serves all ranks.
    """
    left, values, right = np.linalg.svd(np.asarray(start, np.float64), full_matrices=False)
    shapes = left.shape, right.shape

    @jax.jit
    def mean_loss(left: Array, right: Array, hidden: Array, targets: Array) -> Array:
        logarithms = jax.nn.log_softmax((hidden @ right.T) @ left.T)
        return -jnp.mean(jnp.take_along_axis(logarithms, targets[:, None], axis=1))

    gradients = jax.jit(jax.value_and_grad(mean_loss, argnums=(0, 1)))

    def factors(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first, second = np.split(flat.astype(np.float32), [left.size])
        return first.reshape(shapes[0]), second.reshape(shapes[1])

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        loss, slopes = gradients(*factors(flat), *fitted)
        return float(loss), np.concatenate([np.asarray(each, np.float64).ravel() for each in slopes])

    found = []
    for rank in ranks:
        roots = np.sqrt(np.where(np.arange(len(values)) < rank, values, 0))
        first = np.concatenate([(left * roots).ravel(), (right * roots[:, None]).ravel()])
        best = minimize(value, first, jac=True, method='L-BFGS-B', options={'maxiter': STEPS})
        found.append(Refit(rank, float(best.fun), float(mean_loss(*factors(best.x), *held_out))))
    return found


def _entropy(shares: Float[np.ndarray, ' r']) -> float:
    return float(-np.sum(shares * np.log(np.where(shares > 0, shares, 1))))
