"""The definition of `short_conv`, lag by lag."""

import jax
import jax.numpy as jnp

from pallas_kernels import precision
from pallas_kernels.short_conv.vjp import IDENTITY


def short_conv(
    x: jax.Array, taps: jax.Array, bias: jax.Array | None, reach: jax.Array, *, activation: str
) -> jax.Array:
    """Returns `y_t = f(c + sum_j a_{w-1-j} x_{t-j})` over the lags `j` up to `reach_t`, `b t d` in the type of x."""
    dtype = precision.accumulator(x, taps, bias)
    w, wide = taps.shape[0], x.astype(dtype)
    total = jnp.zeros_like(wide)
    for lag in range(w):
        then = jnp.roll(wide, lag, axis=1)
        total += taps[w - 1 - lag].astype(dtype)[None, None] * jnp.where((reach >= lag)[..., None], then, 0)
    if bias is not None:
        total += bias.astype(dtype)[None, None]
    return (total if activation == IDENTITY else total * jax.nn.sigmoid(total)).astype(x.dtype)
