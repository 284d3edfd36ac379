"""The operands shared by heads, or by rows of a batch."""

import jax
import jax.numpy as jnp


def summed(argument: jax.Array, gradient: jax.Array) -> jax.Array:
    """The gradient of an argument, `b h ...`, summed over the heads, or the rows of the batch, that share it."""
    b, h, *rest = argument.shape
    groups = gradient.reshape(b, gradient.shape[0] // b, h, gradient.shape[1] // h, *rest)
    return jnp.sum(groups, axis=(1, 3)).astype(argument.dtype)
