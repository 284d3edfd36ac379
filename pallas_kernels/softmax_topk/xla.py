"""The portable form of `softmax_topk`."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels import precision
from pallas_kernels.softmax_topk import reference, vjp


def sweep(x: jax.Array, k: int) -> vjp.Largest:
    """Finds the k largest scores, and sums with the first of them subtracted."""
    scores, indices = largest(x, k)
    highest = jnp.where(scores[..., :1] == -math.inf, 0, scores[..., :1])
    return vjp.Largest(scores, indices, jnp.sum(jnp.exp(x.astype(scores.dtype) - highest), axis=-1, keepdims=True))


def largest(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the same as `reference.largest`, the numbers in float32 at least, without sorting the rows.

    XLA on CPUs has a faster algorithm for float32 only, and uses it only if the k largest are the only use of the sort:
    without the barrier, a slice of them would be another.
    """
    wide = x.astype(precision.accumulator(x))
    found = jax.lax.platform_dependent(
        wide, cpu=lambda wide: _largest_of_signed(wide, k), default=lambda wide: reference.largest(wide, k)
    )
    return jax.lax.optimization_barrier(found)


def _largest_of_signed(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The same without a copy of x with unsigned zeros, unless a zero is among the largest: 0 comes before -0."""
    found = tuple(jax.lax.top_k(x, k))
    return jax.lax.cond(jnp.any(found[0] == 0), lambda: reference.largest(x, k), lambda: found)


def replace(array: jax.Array, indices: jax.Array, entries: jax.Array) -> jax.Array:
    """Returns an array `*b o` with the entries `*b k` at the indices."""
    return jnp.put_along_axis(array, indices, entries, axis=-1, inplace=False)


softmax_topk = vjp.differentiable(sweep, replace)
