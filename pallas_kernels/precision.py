"""The types cores compute in."""

import jax
import jax.numpy as jnp


def accumulator(*arrays: jax.Array | None) -> jnp.dtype:
    """The type of statistics, accumulators and states: the promoted type of the arrays, and float32 at least."""
    return jnp.result_type(jnp.float32, *(array.dtype for array in arrays if array is not None))
