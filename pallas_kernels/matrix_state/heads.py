"""The operands shared by heads, or by rows of a batch."""

import jax
import jax.numpy as jnp


def summed(argument: jax.Array, gradient: jax.Array, heads: int = 1) -> jax.Array:
    """The gradient of an argument, summed over the heads, an axis, or the rows of the batch, that share it."""
    b, h = argument.shape[0], argument.shape[heads]
    axes = gradient.shape
    groups = gradient.reshape(b, axes[0] // b, *axes[1:heads], h, axes[heads] // h, *axes[heads + 1 :])
    return jnp.sum(groups, axis=(1, heads + 2)).astype(argument.dtype)
