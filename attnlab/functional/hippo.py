"""Matrices from which linear state-space models start: HiPPO's, whose states are projections on a basis, and diagonals.

`x' = A x + B u` with `A = V (Lambda - P P^*) V^*`: normal plus low rank. Everything is real and numpy's float64.
Gu et al. 2020, https://arxiv.org/abs/2008.07669; Gu et al. 2023, https://arxiv.org/abs/2206.12037.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Complex, Float

from attnlab.errors import UserError, nearest

BASES = ('legs', 'legt', 'fout')
"""Legendre polynomials of all the past, in time that is warped exponentially; of a window; Fourier's of a window."""

DIAGONALS = ('legs', 'lin', 'inv', 'quad', 'random', 'real')
"""Starts of diagonal systems: that of LegS without its low rank, and eigenvalues in closed form."""

WINDOWS = {'legs': 1.0, 'legt': 2.0, 'fout': 2.0}
"""How long a system remembers, in its own unit of time: LegS weighs the past by `exp(-s)`, others see a window."""


class Modes(NamedTuple):
    """A system in the basis of the eigenvectors of its normal part, one of each conjugate pair.

    Attributes:
      eigenvalues: of the normal part, those with negative imaginary parts, in their order.
      inputs: `V^* B`.
      low_rank: `V^* P`, a row each.
      vectors: V; the state of the system is twice the real part of V times that of the modes.
    """

    eigenvalues: Complex[np.ndarray, ' n']
    inputs: Complex[np.ndarray, ' n']
    low_rank: Complex[np.ndarray, 'r n']
    vectors: Complex[np.ndarray, 's n']


def transition(name: str, states: int) -> tuple[Float[np.ndarray, 'n n'], Float[np.ndarray, ' n']]:
    """Returns A and B of one of `BASES`. Raises `UserError` for another name, or odd `states`."""
    _check(name, BASES, states)
    n = np.arange(states)
    if name == 'fout':
        inputs = np.where(n % 2, 0.0, math.sqrt(2))
        inputs[0] = 1
        turns = np.diag(np.where(n[:-1] % 2, 0.0, -np.pi * (n[:-1] // 2)), 1)
        return turns - turns.T - np.outer(inputs, inputs), inputs
    gains = np.sqrt(2 * n + 1)
    pairs = np.outer(gains, gains)
    if name == 'legs':
        return -np.tril(pairs, -1) - np.diag(n + 1.0), gains
    signs = np.where(n[:, None] >= n[None], 1.0, (-1.0) ** (n[:, None] - n[None]))
    return -pairs * signs / 2, gains / 2


def correction(name: str, states: int) -> Float[np.ndarray, 'r n']:
    """Returns the P of one of `BASES` for which `A + P^T P` is normal. Raises `UserError` as `transition`."""
    _, inputs = transition(name, states)
    n = np.arange(states)
    if name == 'legs':
        return np.sqrt(n + 0.5)[None]
    if name == 'fout':
        return inputs[None]
    gains = np.sqrt(2 * n + 1) / math.sqrt(2)
    return np.stack([gains * (n % 2), gains * (1 - n % 2)])


def modes(name: str, states: int) -> Modes:
    """Returns one of `BASES` as `states / 2` modes. Raises `UserError` as `transition`."""
    A, inputs = transition(name, states)
    P = correction(name, states)
    normal = A + P.T @ P
    decay = np.mean(np.diag(normal))
    turns, vectors = np.linalg.eigh(-1j * (normal - decay * np.eye(states)))
    turns, vectors = turns[: states // 2], vectors[:, : states // 2]
    if abs(turns[-1]) < 1e-6:
        # The eigenvalue zero has two eigenvectors, of which any real one would be its own conjugate.
        vectors[:, -1] = np.concatenate([[1, 1j], np.zeros(states - 2)]) / math.sqrt(2)
    return Modes(decay + 1j * turns, vectors.conj().T @ inputs, P @ vectors.conj(), vectors)


def diagonal(name: str, states: int) -> Modes:
    """Returns one of `DIAGONALS` as `states / 2` modes, or `states` real ones for 'real'; V is not known but of 'legs'.

    Angular speeds of 'random' are to be drawn, exponentials of normal numbers; here all have the median, 1.
    Gu et al. 2022, https://arxiv.org/abs/2206.11893.
    Raises `UserError` for another name, or odd `states`.
    """
    _check(name, DIAGONALS, states)
    if name == 'legs':
        return modes('legs', states)
    n = np.arange(states // 2)
    imaginary = {
        'lin': np.pi * n,
        'inv': states / np.pi * (states / (2 * n + 1) - 1),
        'quad': (1 + 2 * n) ** 2 / np.pi,
        'random': np.ones(len(n)),
    }
    eigenvalues = -1 - np.arange(states) + 0j if name == 'real' else -0.5 - 1j * imaginary[name]
    return Modes(
        eigenvalues,
        np.ones_like(eigenvalues),
        np.zeros((0, len(eigenvalues)), complex),
        np.zeros((0, len(eigenvalues)), complex),
    )


def step_for(name: str, length: int) -> float:
    """The step with which one of `BASES` remembers about `length` steps: its unit of time over that many.

    A longer one forgets the first of them, a much shorter one leaves the window of a finite basis nearly empty.
    Gu et al. 2023, https://arxiv.org/abs/2206.12037. Raises `UserError` for another name.
    """
    _check(name, BASES, 2)
    return WINDOWS[name] / length


def _check(name: str, names: tuple[str, ...], states: int) -> None:
    if name not in names:
        raise UserError(f'a system starts from {name!r}{nearest(name, names)}; it must be one of {", ".join(names)}')
    if states % 2:
        raise UserError(f'state is {states}; a system of conjugate pairs needs an even number of states')
