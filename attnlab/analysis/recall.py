"""What the states of a linear system tell of its input at best: a linear read of them in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attnlab.nn.systems import System

NOISE = 1e-6
"""Of a read, as a share of the greatest variance of a direction of states: about what float32 leaves of them.

A signal without high frequencies follows from its last few tokens exactly, so that without noise every system would
recall all of it.
"""


def responses(system: System, channels: int, steps: int) -> Float[np.ndarray, 't s']:
    """What an input one, to all channels, has left in every state `0, 1, ...` tokens later."""
    first = jnp.ones((1, 1, channels), jnp.float32)

    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, after = system(x, None, state)
        assert after is not None
        return after, after.reshape(-1)

    inputs = jnp.concatenate([first[None], jnp.zeros((steps - 1, *first.shape), first.dtype)])
    _, states = jax.jit(lambda state: jax.lax.scan(step, state, inputs))(system.init_state(1, first.dtype))
    return np.asarray(states, np.float64)


def unrecalled(
    response: Float[np.ndarray, 't s'], covariance: Float[np.ndarray, ' t'], noise: float = NOISE
) -> Float[np.ndarray, ' t']:
    """The share of the variance of the input `j` tokens ago that no linear read of the states tells.

        e(j) = 1 - c_j^T (G + s I)^-1 c_j / r_0,    c_j = K^T R e_j,    G = K^T R K

    of states that hold `K^T u`, u the inputs from the last on, each scaled to a response of length one, and `R` their
    covariance, Toeplitz of `r`; `s` is `noise` times the greatest eigenvalue of `G`. Of white noise, without noise of
    the read, the shares that are told sum to the number of states, or of tokens if these are fewer: Jaeger 2002, "Short
    term memory in echo state networks"; White, Lee and Sompolinsky 2004, https://doi.org/10.1103/PhysRevLett.92.148102.
    """
    scaled, shared = _scaled(response), _toeplitz(covariance)
    shared = shared @ scaled
    return _untold(scaled.T @ shared, shared, covariance[0], noise)


def unrecalled_throughout(
    response: Float[np.ndarray, 't s'], covariance: Float[np.ndarray, ' t'], lag: int, noise: float = NOISE
) -> float:
    """The same of the input `lag` tokens ago, of one read for all tokens that have one: the mean over these.

    At token t states hold the response to its t + 1 inputs alone, so that `G` and `c` are means over t.
    """
    scaled, apart = _scaled(response), _toeplitz(covariance)
    tokens = range(lag, len(covariance))
    shared = [apart[: t + 1, : t + 1] @ scaled[: t + 1] for t in tokens]
    memory = np.mean([scaled[: t + 1].T @ each for t, each in zip(tokens, shared, strict=True)], axis=0)
    asked = np.mean([each[lag] for each in shared], axis=0)
    return float(_untold(memory, asked[None], covariance[0], noise)[0])


def _scaled(response: Float[np.ndarray, 't s']) -> Float[np.ndarray, 't s']:
    """States differ in size by their step, and what they tell does not."""
    return response / np.maximum(np.linalg.norm(response, axis=0), np.finfo(np.float64).tiny)


def _toeplitz(covariance: Float[np.ndarray, ' t']) -> Float[np.ndarray, 't t']:
    return covariance[np.abs(np.arange(len(covariance))[:, None] - np.arange(len(covariance))[None])]


def _untold(
    memory: Float[np.ndarray, 's s'], asked: Float[np.ndarray, 'n s'], variance: float, noise: float
) -> Float[np.ndarray, ' n']:
    variances, directions = np.linalg.eigh(memory)
    told = (asked @ directions) ** 2 / (np.maximum(variances, 0) + max(noise * variances[-1], np.finfo(float).tiny))
    return np.clip(1 - told.sum(axis=1) / variance, 0.0, 1.0)
