"""In which type numbers are summed up."""

import jax.numpy as jnp
from jax.typing import DTypeLike


def wide_dtype(dtype: DTypeLike) -> DTypeLike:
    """The type of sums, statistics and states of numbers of type `dtype`: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)
