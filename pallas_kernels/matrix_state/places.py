"""The places of steps in a chunk: which come before, after, or in the same block."""

import jax
import jax.numpy as jnp


def steps_before(like: jax.Array) -> jax.Array:
    """A mask, bool `c c`, of the steps before each; dimensions are those of `like`, `... c k`."""
    row, column = _places(like)
    return column < row


def steps_after(like: jax.Array) -> jax.Array:
    """Marks the steps after each."""
    row, column = _places(like)
    return column > row


def same_block(like: jax.Array, size: int) -> jax.Array:
    """Marks the steps in the same block of so many, a power of two."""
    row, column = _places(like)
    return (row ^ column) < size


def _places(like: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (1,) * (like.ndim - 2) + (like.shape[-2],) * 2
    return count(shape, -2), count(shape, -1)


def count(shape: tuple[int, ...], axis: int) -> jax.Array:
    """The places along an axis."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis % len(shape))
