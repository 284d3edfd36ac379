"""Computations token by token whose intermediate values are too large to be stored for all tokens at once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from attnlab.functional import sequence

TOKENS = 128
"""The number of tokens of every row that are computed at once."""


def over_tokens(function: Callable[..., Array], *arrays: Array) -> Array:
    """`function(*arrays)` of arrays `b t ...`, a result `b t`, over `TOKENS` tokens of every row at a time.

    Its intermediate values are computed again in the backward pass. Rows are not divided, nor is time where devices
    divide it. Arrays whose leading dimensions are not `b t` are not divided at all.
    """
    if arrays[-1].ndim != 2 or arrays[-1].shape[1] <= TOKENS or sequence.divided():
        return jax.checkpoint(function)(*arrays)
    leading = tuple(jnp.swapaxes(array, 0, 1)[:, :, None] for array in arrays)
    result = jax.lax.map(lambda each: jax.checkpoint(function)(*each), leading, batch_size=TOKENS)
    return jnp.swapaxes(result[..., 0], 0, 1)
