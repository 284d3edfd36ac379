"""The definition of `softmax_topk`."""

import jax
import jax.numpy as jnp

from pallas_kernels import precision
from pallas_kernels.softmax import reference as softmax


def softmax_topk(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the weights of the k largest entries of `x`, `*b o`, and their indices, both `*b k`."""
    _, indices = largest(x, k)
    weights = softmax.softmax(x.astype(precision.accumulator(x)), None)
    return jnp.take_along_axis(weights, indices, axis=-1).astype(x.dtype), indices


def largest(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest numbers of the last axis, of equal ones the first, and their indices; -0 equals 0."""
    scores, indices = jax.lax.top_k(jnp.where(x == 0, 0, x), k)
    return scores, indices
