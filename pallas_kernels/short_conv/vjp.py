"""Differentiation of `short_conv`, and which inputs a token reaches: arguments alone are kept, sums computed again."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

IDENTITY = 'identity'

ACTIVATIONS = (IDENTITY, 'silu')
"""The activations of a sum, by name."""

Convolution = Callable[[jax.Array, jax.Array, jax.Array | None, jax.Array], jax.Array]
"""From x, `b t d`, taps, `w d`, the bias, `d` or `None`, and reach, `b t` or `1 t`; the result is of the type of x."""


class Passes(NamedTuple):
    """Both passes of a form.

    Attributes:
      forward: from x, taps, bias and reach to y.
      backward: from these and the gradient of y to those of x, in its type, and of taps and bias, in float32 at least.
    """

    forward: Convolution
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array | None]]


def differentiable(passes: Passes) -> Convolution:
    """Returns the convolution with its gradient, for which the arguments alone are kept.

    With `c_t` the sum of a token and `g_t = f'(c_t) dy_t`, `dx_t = sum_j a_{w-1-j} g_{t+j}` over the later tokens of
    its document, `da_i = sum_t g_t x_{t-w+1+i}` over those whose document reaches so far, and `dc = sum_t g_t`.
    """

    @jax.custom_vjp
    def short_conv(x: jax.Array, taps: jax.Array, bias: jax.Array | None, reach: jax.Array) -> jax.Array:
        return passes.forward(x, taps, bias, reach)

    def save(x: jax.Array, taps: jax.Array, bias: jax.Array | None, reach: jax.Array) -> tuple[jax.Array, Any]:
        return passes.forward(x, taps, bias, reach), (x, taps, bias, reach)

    def pull(saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None, None]:
        _, taps, bias, _ = saved
        dx, dtaps, dbias = passes.backward(*saved, dy)
        dbias = None if bias is None or dbias is None else dbias.astype(bias.dtype)
        return dx, dtaps.astype(taps.dtype), dbias, None

    short_conv.defvjp(save, pull)
    return short_conv


def reach_of(runs: jax.Array | None, t: int, w: int) -> jax.Array:
    """How many tokens before each, at most `w - 1`, belong to its run of `b t`: int32 `b t`, without runs `1 t`."""
    if runs is None:
        return jnp.minimum(jnp.arange(t, dtype=jnp.int32), w - 1)[None]
    # Runs are numbered from 0, and padding belongs to none.
    padded = jnp.pad(runs, ((0, 0), (w - 1, 0)), constant_values=-1)
    same = [padded[:, w - 1 - lag : w - 1 - lag + t] == runs for lag in range(1, w)]
    return sum((met.astype(jnp.int32) for met in same), start=jnp.zeros(runs.shape, jnp.int32))
