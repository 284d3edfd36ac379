"""The three matrix products of attention, written for the routines that CPUs have.

Groups are their only batch dimension, and of two factors the smaller one is transposed.
"""

import jax
import jax.numpy as jnp


def over_channels(left: jax.Array, right: jax.Array, precision: jax.lax.PrecisionLike = None) -> jax.Array:
    """`b g r t k, b g s k -> b g r t s`, in float32 or wider."""
    products = jnp.einsum(
        'bgmk,bgsk->bgms',
        _merge(left),
        right,
        precision=precision,
        preferred_element_type=jnp.result_type(jnp.float32, left),
    )
    return products.reshape(*left.shape[:-1], right.shape[2])


def over_keys(matrix: jax.Array, vectors: jax.Array) -> jax.Array:
    """`b g r t s, b g s v -> b g r t v`."""
    return jnp.einsum('bgms,bgsv->bgmv', _merge(matrix), vectors).reshape(*matrix.shape[:-1], vectors.shape[3])


def over_queries(matrix: jax.Array, vectors: jax.Array) -> jax.Array:
    """`b g r t s, b g r t v -> b g s v`."""
    # The barrier keeps the compiler from fusing the transposition into the product, for which it has no fast routine.
    transposed = jax.lax.optimization_barrier(_merge(vectors).swapaxes(2, 3))
    return jnp.einsum('bgvm,bgms->bgvs', transposed, _merge(matrix)).swapaxes(2, 3)


def _merge(array: jax.Array) -> jax.Array:
    b, g, r, t, last = array.shape
    return array.reshape(b, g, r * t, last)
