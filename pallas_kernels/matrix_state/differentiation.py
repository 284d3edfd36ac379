"""Differentiation of the Pallas forms of cores whose chunks are solved by an inverse, from arguments to gradients.

A form works with heads before time, and returns gradients for every head separately.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state import heads


class Arrays(NamedTuple):
    """The arguments of a form, or their gradients.

    Attributes:
      q: `b hq t k`; as a gradient `b h t k`, as those of all that heads may share.
      k: `b hk t k`.
      v: `b hv t v`.
      vectors: what the rule has besides of key channels, each `b hn t k`.
      numbers: what it has of steps, float32, each `b h t`.
      log_decay: float32, `b h t k`, of size 1 for a batch, heads or key channels that share it; or `None`. As a
        gradient it has full size, except for key channels that share it.
      state: float32, `b h k v`.
      starts: bool `b t`, the tokens that forget the past; or `None`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    vectors: tuple[jax.Array, ...]
    numbers: tuple[jax.Array, ...]
    log_decay: jax.Array | None
    state: jax.Array
    starts: jax.Array | None


Outputs = tuple[jax.Array, jax.Array]
"""o, `b h t v`, and the last state, `b h k v`."""


class Passes(NamedTuple):
    """Both passes of a form.

    Attributes:
      forward: from the arguments, the scale of the outputs, and whether there will be a backward pass, to the outputs
        and the residuals of the form.
      backward: from the arguments, the scale, the residuals, and the gradients of the outputs to those of the
        arguments, of every head.
    """

    forward: Callable[[Arrays, float, bool], tuple[Outputs, Any]]
    backward: Callable[[Arrays, float, Any, Outputs], Arrays]


def differentiable(passes: Passes) -> Callable[..., Outputs]:
    """Returns the form on `q, k, v, vectors, numbers, log_decay, state, starts, scale`, time before heads.

    The arguments and the residuals of the form are kept for the backward pass. `starts` has no gradient.
    """
    core = _core(passes)

    def form(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        vectors: tuple[jax.Array, ...],
        numbers: tuple[jax.Array, ...],
        log_decay: jax.Array | None,
        state: jax.Array,
        starts: jax.Array | None,
        scale: float,
    ) -> Outputs:
        if 0 in (*q.shape, v.shape[3]):
            return jnp.zeros((*q.shape[:2], state.shape[1], v.shape[3]), v.dtype), state
        operands = jnp.result_type(q, k, v, *vectors)
        q, k, v, *others = (_heads_first(array.astype(operands)) for array in (q, k, v, *vectors))
        decay = _of_steps(log_decay, q.shape[2])
        by_head = tuple(_heads_first(array) for array in numbers)
        o, final = core(float(scale), Arrays(q, k, v, tuple(others), by_head, decay, state, starts))
        return jnp.moveaxis(o, 1, 2), final

    return form


def _core(passes: Passes) -> Callable[[float, Arrays], Outputs]:
    def run(scale: float, arrays: Arrays) -> Outputs:
        return passes.forward(arrays, scale, False)[0]

    def save(scale: float, arrays: Arrays) -> tuple[Outputs, tuple[Arrays, Any]]:
        outputs, kept = passes.forward(arrays, scale, True)
        return outputs, (arrays, kept)

    def pull(scale: float, saved: tuple[Arrays, Any], gradients: Outputs) -> tuple[Arrays]:
        arrays, kept = saved
        found = passes.backward(arrays, scale, kept, gradients)
        return (jax.tree.map(heads.summed, arrays._replace(starts=None), found._replace(starts=None)),)

    differentiable = jax.custom_vjp(run, nondiff_argnums=(0,))
    differentiable.defvjp(save, pull)
    return differentiable


def _heads_first(array: jax.Array) -> jax.Array:
    """`b t h ...` as `b h t ...`."""
    return jnp.moveaxis(array, 2, 1)


def _of_steps(log_decay: jax.Array | None, t: int) -> jax.Array | None:
    """Log decays, `b t h k`, those of all steps where they are one, with heads first."""
    if log_decay is None:
        return None
    size, _, *rest = log_decay.shape
    return _heads_first(jnp.broadcast_to(log_decay, (size, t, *rest)))
