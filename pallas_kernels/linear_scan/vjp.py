"""Differentiation shared by the forms of `linear_scan`: the adjoint of a recurrence is one in the other direction."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import precision

Step = Callable[[Any, Any, Any], tuple[Any, Any]]
"""One step of a recurrence, from its carry, a decay and an input to the next carry and an output.

The next carry is the decay times the carry, plus a term that does not depend on the carry.
"""


def advance(h: Any, decay: Any, x: Any) -> tuple[Any, Any]:
    """The step of `h_t = a_t h_{t-1} + x_t`; output and carry are the same."""
    h = decay * h + x
    return h, h


def retreat(carried: Any, decay: Any, dh: Any) -> tuple[Any, Any]:
    """The step of its adjoint, `r_t = g_t + a_{t+1} r_{t+1}`: the output is r, the carry `a_t r_t`."""
    r = dh + carried
    return decay * r, r


Outputs = tuple[jax.Array, jax.Array]
"""The output of every step, `b t d`, and the last carry, `b d`."""

Scan = Callable[[jax.Array, jax.Array, jax.Array, bool, Step], Outputs]
"""From x, `b t d`, decay, broadcastable to it, the carry before the first step, `b d`, `reverse` and the step."""

Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Decay, state, every h, and the type of x."""

Operands = tuple[jax.Array, jax.Array, jax.Array]
"""x, decay and state, or their gradients."""


def differentiable(scan: Scan) -> Callable[[jax.Array, jax.Array, jax.Array, bool], Outputs]:
    """Returns the scan with its gradient. The decay, the state and every h are kept for the backward pass.

    With `g_t` the gradient of `h_t` where it is read, `r_t = g_t + a_{t+1} r_{t+1}` is its total gradient; then
    `dx_t = r_t`, `da_t = r_t h_{t-1}` and `dh_0 = a_1 r_1`.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
    def linear_scan(x: jax.Array, decay: jax.Array, state: jax.Array, reverse: bool) -> Outputs:
        return scan(x, decay, state, reverse, advance)

    def save(x: jax.Array, decay: jax.Array, state: jax.Array, reverse: bool) -> tuple[Outputs, Saved]:
        h, final = scan(x, decay, state, reverse, advance)
        return (h, final), (decay, state, h, jnp.zeros(0, x.dtype))

    def pull(reverse: bool, saved: Saved, gradients: Outputs) -> Operands:
        decay, state, h, like = saved
        dh, dfinal = gradients
        dx, dstate = scan(dh, decay, dfinal, not reverse, retreat)
        if h.shape[1] == 0:
            return dx.astype(like.dtype), jnp.zeros_like(decay), dstate
        wide = precision.accumulator(dx, h)
        ddecay = dx.astype(wide) * shifted(h, state, reverse).astype(wide)
        constant = [axis for axis, size in enumerate(decay.shape) if size == 1]
        return dx.astype(like.dtype), jnp.sum(ddecay, axis=constant, keepdims=True).astype(decay.dtype), dstate

    linear_scan.defvjp(save, pull)
    return linear_scan


def shifted(h: jax.Array, state: jax.Array, reverse: bool) -> jax.Array:
    """The h before every step, `b t d`: the state, then all h except the last one computed."""
    state = state[:, None].astype(h.dtype)
    return jnp.concatenate([h[:, 1:], state] if reverse else [state, h[:, :-1]], axis=1)
