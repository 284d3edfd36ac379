"""The definition of `softmax`."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels import precision


def softmax(x: jax.Array, where: jax.Array | None) -> jax.Array:
    """Returns `exp(x) / sum(exp(x))` over the selected entries of the last axis; `x` and `where` are `*b o`."""
    scores = x.astype(precision.accumulator(x))
    if where is not None:
        scores = jnp.where(where, scores, -math.inf)
    highest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-math.inf))
    empty = highest == -math.inf
    weights = jnp.exp(scores - jnp.where(empty, 0, highest))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return (weights / jnp.where(empty, 1, total)).astype(x.dtype)
