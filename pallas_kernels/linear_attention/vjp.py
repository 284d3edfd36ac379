"""Differentiation shared by the Pallas forms of `linear_attention`.

A form works with decays spread over time and gradients for every head separately, with heads before time or after it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state import heads


class Arrays(NamedTuple):
    """The arguments of a form, or their gradients; with heads after time where the form says so.

    Attributes:
      q: scaled, `b hq t k`; as a gradient `b h t k`, as those of k and v.
      k: `b hk t k`.
      v: `b hv t v`.
      log_decay: float32, `b h t k`, of size 1 for a batch, heads or key channels that share it; or `None`. As a
        gradient it has full size, except for key channels that share it.
      state: float32, `b h k v`.
      starts: bool `b t`, the tokens that forget the past; or `None`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array | None
    state: jax.Array
    starts: jax.Array | None


Outputs = tuple[jax.Array, jax.Array]
"""o, `b h t v`, and the last state, `b h k v`."""

Forward = Callable[[Arrays, bool], tuple[Outputs, Any]]
"""From the arguments, and whether there will be a backward pass, to the outputs and the residuals of the form."""

Backward = Callable[[Arrays, Any, Outputs], Arrays]
"""From the arguments, the residuals, and the gradients of the outputs to those of the arguments."""


def differentiable(forward: Forward, backward: Backward, heads_axis: int = 1) -> Callable[..., Outputs]:
    """Returns the form on the arguments of `reference.linear_attention`, q not scaled, followed by the scale.

    `heads_axis` is that of the arrays that the form takes and returns: before time, 1, or after, 2. The arguments and
    the residuals of the form are kept for the backward pass.
    """

    @jax.custom_vjp
    def run(arrays: Arrays) -> Outputs:
        return forward(arrays, False)[0]

    def save(arrays: Arrays) -> tuple[Outputs, tuple[Arrays, Any]]:
        outputs, kept = forward(arrays, True)
        return outputs, (arrays, kept)

    def pull(saved: tuple[Arrays, Any], gradients: Outputs) -> tuple[Arrays]:
        arrays, kept = saved
        found = backward(arrays, kept, gradients)
        # Nothing shares the state, so that its axes do not matter.
        summed = functools.partial(heads.summed, heads=heads_axis)
        return (jax.tree.map(summed, arrays._replace(starts=None), found._replace(starts=None)),)

    run.defvjp(save, pull)

    def linear_attention(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        log_decay: jax.Array | None,
        state: jax.Array,
        starts: jax.Array | None,
        scale: float,
    ) -> Outputs:
        if 0 in (*q.shape, v.shape[3]):
            return jnp.zeros((*q.shape[:2], state.shape[1], v.shape[3]), v.dtype), state
        operands = jnp.result_type(q, k, v)
        q = (q.astype(jnp.float32) * scale).astype(operands)
        if log_decay is not None:
            size, _, *rest = log_decay.shape
            log_decay = jnp.moveaxis(jnp.broadcast_to(log_decay, (size, q.shape[1], *rest)), 2, heads_axis)
        q, k, v = (jnp.moveaxis(array.astype(operands), 2, heads_axis) for array in (q, k, v))
        o, final = run(Arrays(q, k, v, log_decay, state, starts))
        return jnp.moveaxis(o, heads_axis, 2), final

    return linear_attention
