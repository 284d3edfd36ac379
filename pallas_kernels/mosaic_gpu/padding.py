"""Arrays padded to whole tiles."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def to_multiples(array: jax.Array, multiples: Sequence[int], fill: int = 0) -> jax.Array:
    """Pads the end of each axis to a multiple of a number, with `fill`."""
    return to_shape(array, [-(-size // part) * part for size, part in zip(array.shape, multiples, strict=True)], fill)


def to_shape(array: jax.Array, shape: Sequence[int], fill: int = 0) -> jax.Array:
    """Pads the end of each axis to a length, with `fill`."""
    behind = [(0, whole - size) for size, whole in zip(array.shape, shape, strict=True)]
    return jnp.pad(array, behind, constant_values=fill)
