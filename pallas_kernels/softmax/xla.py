"""The portable form of `softmax`: the definition, with the gradient computed from the weights."""

import jax
import jax.numpy as jnp

from pallas_kernels import precision
from pallas_kernels.softmax import reference, vjp


def backward(y: jax.Array, dy: jax.Array) -> jax.Array:
    """Returns `y (dy - sum(dy y))`, `*b o`."""
    wide, dwide = (array.astype(precision.accumulator(y)) for array in (y, dy))
    return (wide * (dwide - jnp.sum(dwide * wide, axis=-1, keepdims=True))).astype(y.dtype)


softmax = vjp.differentiable(reference.softmax, backward)
