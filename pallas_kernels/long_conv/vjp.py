"""Differentiation of `long_conv`: arguments alone are kept."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Convolution = Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]
"""From x, `b t d`, kernel, `w d`, and runs, `b t`, to results in float32 at least."""

Gradients = Callable[[jax.Array, jax.Array, jax.Array | None, jax.Array], tuple[jax.Array, jax.Array]]
"""From these and the gradient of the result to those of x and of kernel, in their types."""


def differentiable(forward: Convolution, backward: Gradients) -> Convolution:
    """Returns the convolution with gradients that keep x, kernel and runs alone for the backward pass.

    It is linear in x and in the kernel, so that each gradient is a product with the other.
    """

    @jax.custom_vjp
    def long_conv(x: jax.Array, kernel: jax.Array, runs: jax.Array | None) -> jax.Array:
        return forward(x, kernel, runs)

    def save(x: jax.Array, kernel: jax.Array, runs: jax.Array | None) -> tuple[jax.Array, Any]:
        return forward(x, kernel, runs), (x, kernel, runs)

    def pull(saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        x, kernel, runs = saved
        dx, dkernel = backward(x, kernel, runs, dy)
        return dx, dkernel, None

    long_conv.defvjp(save, pull)
    return long_conv


def reversible(forward: Convolution, taps_gradient: Callable[..., jax.Array]) -> Convolution:
    """Returns the convolution of a kernel, the gradient of x being that of rows from their ends.

    `taps_gradient` has the arguments of `Gradients`. Sums of gradients of the result are rounded to the type of x, so
    that they need no more digits than it has.
    """

    def backward(x: jax.Array, kernel: jax.Array, runs: jax.Array | None, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        dy, back = dy.astype(x.dtype), None if runs is None else jnp.flip(runs, 1)
        dx = jnp.flip(forward(jnp.flip(dy, 1), kernel, back), 1).astype(x.dtype)
        return dx, taps_gradient(x, kernel, runs, dy)

    return differentiable(forward, backward)


def recomputed(forward: Convolution) -> Convolution:
    """Returns the convolution with the gradients that JAX finds, transforms made again, which take four times x."""

    def backward(x: jax.Array, kernel: jax.Array, runs: jax.Array | None, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.vjp(lambda x, kernel: forward(x, kernel, runs), x, kernel)[1](dy)

    return differentiable(forward, backward)
