"""Differentiation shared by the Pallas forms of `delta_rule`: the arguments of a form, and its gradients.

A form works with heads before time, and returns gradients for every head separately.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state import differentiation
from pallas_kernels.matrix_state.differentiation import Outputs, decays_of_steps, heads_first


class Arrays(NamedTuple):
    """The arguments of a form, or their gradients.

    Attributes:
      q: `b hq t k`; as a gradient `b h t k`, as those of k and v.
      k: `b hk t k`.
      v: `b hv t v`.
      beta: float32, `b h t`.
      log_decay: float32, `b h t k`, of size 1 for a batch, heads or key channels that share it; or `None`. As a
        gradient it has full size, except for key channels that share it.
      state: float32, `b h k v`.
      starts: bool `b t`, the tokens that forget the past; or `None`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    log_decay: jax.Array | None
    state: jax.Array
    starts: jax.Array | None


Forward = Callable[[Arrays, float, bool], tuple[Outputs, Any]]
"""From the arguments, the scale of the outputs, and whether there will be a backward pass, to the outputs and the
residuals of the form."""

Backward = Callable[[Arrays, float, Any, Outputs], Arrays]
"""From the arguments, the scale, the residuals, and the gradients of the outputs to those of the arguments."""


def differentiable(forward: Forward, backward: Backward) -> Callable[..., Outputs]:
    """Returns the form on the arguments of `reference.delta_rule`.

    The arguments and the residuals of the form are kept for the backward pass.
    """
    core = differentiation.core(forward, backward)

    def delta_rule(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        beta: jax.Array,
        log_decay: jax.Array | None,
        state: jax.Array,
        starts: jax.Array | None,
        scale: float,
    ) -> Outputs:
        if 0 in (*q.shape, v.shape[3]):
            return jnp.zeros((*q.shape[:2], state.shape[1], v.shape[3]), v.dtype), state
        operands = jnp.result_type(q, k, v)
        q, k, v = (heads_first(array.astype(operands)) for array in (q, k, v))
        decay = decays_of_steps(log_decay, q.shape[2])
        o, final = core(float(scale), Arrays(q, k, v, heads_first(beta), decay, state, starts))
        return jnp.moveaxis(o, 1, 2), final

    return delta_rule
