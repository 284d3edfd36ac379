"""The portable form of `short_conv`: a sum of shifted rows, the products with tokens of other documents set to zero.

Rows of one document are not masked: zeros stand before them. A mask of what is zero would cost a pass on a CPU, and
have the compiler round sums otherwise.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import precision
from pallas_kernels.short_conv.vjp import IDENTITY, Convolution, Passes, differentiable


@functools.lru_cache
def form(activation: str, *, packed: bool) -> Convolution:
    """The differentiable form with an activation, for rows of documents or of one; see `reference.short_conv`."""
    forward = functools.partial(_forward, activation=activation, packed=packed)
    return differentiable(Passes(forward, functools.partial(_backward, forward)))


def _forward(
    x: jax.Array, taps: jax.Array, bias: jax.Array | None, reach: jax.Array, *, activation: str, packed: bool
) -> jax.Array:
    dtype = precision.accumulator(x, taps, bias)
    before, t = taps.shape[0] - 1, x.shape[1]
    inputs = jnp.pad(x, ((0, 0), (before, 0), (0, 0))).astype(dtype)
    taps = taps.astype(dtype)
    total = inputs[:, before:] * taps[before][None, None]
    for place in range(before):
        product = inputs[:, place : place + t] * taps[place][None, None]
        if packed:
            product = jnp.where((reach >= before - place)[..., None], product, jnp.zeros_like(product))
        total = total + product
    if bias is not None:
        total = total + jnp.broadcast_to(bias.astype(dtype), total.shape)
    # One rounding, after the activation: those of the terms would be larger than that of the result, and gradients of
    # taps would be summed over tokens that are rounded.
    return (total if activation == IDENTITY else jax.nn.silu(total)).astype(x.dtype)


def _backward(
    forward: Convolution, x: jax.Array, taps: jax.Array, bias: jax.Array | None, reach: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    dtype = precision.accumulator(x, taps, bias)
    wide = taps.astype(dtype), None if bias is None else bias.astype(dtype)
    return jax.vjp(lambda x, taps, bias: forward(x, taps, bias, reach), x, *wide)[1](dy)
