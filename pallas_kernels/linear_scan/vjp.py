"""Differentiation shared by the forms of `linear_scan`: the adjoint of a linear recurrence is one run the other way."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

Outputs = tuple[jax.Array, jax.Array]
"""Every h, `b t d`, and the last one computed, `b d`."""

Scan = Callable[[jax.Array, jax.Array, jax.Array, bool], Outputs]
"""From x, `b t d`, decay, broadcastable to it, state, `b d`, and `reverse` to the outputs."""

Saved = tuple[jax.Array, jax.Array, jax.Array]
"""Three arrays: kept are decay, state and every h; returned are the gradients of x, decay and state."""


def differentiable(scan: Scan) -> Scan:
    """Returns the scan with its gradient. Kept for the backward pass are the decay, the state and every h.

    With `g_t` the gradient of `h_t` where it is read, `r_t = g_t + a_{t+1} r_{t+1}` is its whole gradient; then
    `dx_t = r_t`, `da_t = r_t h_{t-1}` and `dh_0 = a_1 r_1`.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
    def linear_scan(x: jax.Array, decay: jax.Array, state: jax.Array, reverse: bool) -> tuple[jax.Array, jax.Array]:
        return scan(x, decay, state, reverse)

    def save(x: jax.Array, decay: jax.Array, state: jax.Array, reverse: bool) -> tuple[Outputs, Saved]:
        h, final = scan(x, decay, state, reverse)
        return (h, final), (decay, state, h)

    def pull(reverse: bool, saved: Saved, gradients: Outputs) -> Saved:
        decay, state, h = saved
        dh, dfinal = gradients
        first, last, later = (-1, 0, 1) if reverse else (0, -1, -1)
        if h.shape[1] == 0:
            return dh, jnp.zeros_like(decay), dfinal
        # What wraps around meets a state of zero.
        dx, _ = scan(dh.at[:, last].add(dfinal), jnp.roll(decay, later, axis=1), jnp.zeros_like(state), not reverse)
        before = jnp.roll(h, -later, axis=1).at[:, first].set(state)
        constant = [axis for axis, size in enumerate(decay.shape) if size == 1]
        return dx, jnp.sum(dx * before, axis=constant, keepdims=True), decay[:, first] * dx[:, first]

    linear_scan.defvjp(save, pull)
    return linear_scan
