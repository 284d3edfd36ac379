"""Differentiation of the Pallas forms of cores whose chunks are solved by an inverse, from arguments to gradients.

A form works with heads before time, and returns gradients for every head separately.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state import heads

Outputs = tuple[jax.Array, jax.Array]
"""o, `b h t v`, and the last state, `b h k v`."""


def core[Arrays](
    forward: Callable[[Arrays, float, bool], tuple[Outputs, Any]],
    backward: Callable[[Arrays, float, Any, Outputs], Arrays],
) -> Callable[[float, Arrays], Outputs]:
    """Returns the differentiable function of the scale of the outputs and the arguments.

    These, a named tuple of arrays with heads on their second axis, and the residuals of the form are kept for the
    backward pass. `starts`, where documents begin, has no gradient.

    Args:
      forward: from the arguments, the scale, and whether there will be a backward pass, to the outputs and the
        residuals of the form.
      backward: from the arguments, the scale, the residuals, and the gradients of the outputs to those of the
        arguments, of every head.
    """

    def run(scale: float, arrays: Arrays) -> Outputs:
        return forward(arrays, scale, False)[0]

    def save(scale: float, arrays: Arrays) -> tuple[Outputs, tuple[Arrays, Any]]:
        outputs, kept = forward(arrays, scale, True)
        return outputs, (arrays, kept)

    def pull(scale: float, saved: tuple[Arrays, Any], gradients: Outputs) -> tuple[Arrays]:
        arrays, kept = saved
        found = backward(arrays, scale, kept, gradients)
        return (jax.tree.map(heads.summed, _without_starts(arrays), _without_starts(found)),)

    differentiable = jax.custom_vjp(run, nondiff_argnums=(0,))
    differentiable.defvjp(save, pull)
    return differentiable


def _without_starts(arrays: Any) -> Any:
    return arrays._replace(starts=None)


def heads_first(array: jax.Array) -> jax.Array:
    """`b t h ...` as `b h t ...`."""
    return jnp.moveaxis(array, 2, 1)


def decays_of_steps(log_decay: jax.Array | None, t: int) -> jax.Array | None:
    """Log decays, `b t h k`, those of all steps where they are one, with heads first."""
    if log_decay is None:
        return None
    size, _, *rest = log_decay.shape
    return heads_first(jnp.broadcast_to(log_decay, (size, t, *rest)))
