"""What the states of a linear system tell of its input at best: a linear read of them in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attnlab.nn.systems import System

RELATIVE = 1e-9
"""Directions of states whose variance is below this share of the greatest count as lost to rounding."""


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


def unrecalled(response: Float[np.ndarray, 't s'], covariance: Float[np.ndarray, ' t']) -> Float[np.ndarray, ' t']:
    """The share of the variance of the input so many tokens ago that no linear read of the states tells.

        e(j) = 1 - c_j^T G^+ c_j / r_0,    c_j = K^T R e_j,    G = K^T R K

    of states that hold `K^T u`, u the inputs from the last on, and `R` their covariance, Toeplitz of `r`. Of white
    noise the shares that are told sum to the number of states, or of tokens if these are fewer: Jaeger 2002, "Short
    term memory in echo state networks"; White, Lee and Sompolinsky 2004, https://doi.org/10.1103/PhysRevLett.92.148102.
    """
    size = np.abs(np.arange(len(covariance))[:, None] - np.arange(len(covariance))[None])
    # States differ in size by their step, and what they tell does not.
    scaled = response / np.maximum(np.linalg.norm(response, axis=0), np.finfo(np.float64).tiny)
    shared = covariance[size] @ scaled
    variances, directions = np.linalg.eigh(scaled.T @ shared)
    kept = variances > RELATIVE * variances[-1]
    told = (shared @ directions[:, kept]) ** 2 / variances[kept]
    return np.clip(1 - told.sum(axis=1) / covariance[0], 0.0, 1.0)
