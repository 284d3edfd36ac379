"""Differentiation of `long_conv`: arguments alone are kept, and transforms computed again."""

from collections.abc import Callable
from typing import Any

import jax

Convolution = Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]
"""From x, `b t d`, kernel, `w d`, and runs, `b t`."""


def recomputed(forward: Convolution) -> Convolution:
    """Returns the convolution with gradients that keep x, kernel and runs alone for the backward pass.

    It is linear in x and in the kernel, so that each gradient is a product with the other; transforms of both, which
    take four times their memory, are made again.
    """

    @jax.custom_vjp
    def long_conv(x: jax.Array, kernel: jax.Array, runs: jax.Array | None) -> jax.Array:
        return forward(x, kernel, runs)

    def save(x: jax.Array, kernel: jax.Array, runs: jax.Array | None) -> tuple[jax.Array, Any]:
        return forward(x, kernel, runs), (x, kernel, runs)

    def pull(saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        x, kernel, runs = saved
        dx, dkernel = jax.vjp(lambda x, kernel: forward(x, kernel, runs), x, kernel)[1](dy)
        return dx, dkernel, None

    long_conv.defvjp(save, pull)
    return long_conv
