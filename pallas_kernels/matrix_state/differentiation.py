"""Differentiation of the Pallas forms of cores whose state is a matrix, from arguments to gradients.

A form works with decays spread over time, with heads before time or after it, and returns gradients for every head
separately. It multiplies by the scale what it reads, and in the backward pass the gradients of that: queries are as
they were given.
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
      q: `b hq t k`; as a gradient `b h t k`, as those of all that heads may share.
      k: `b hk t k`.
      v: `b hv t v`.
      vectors: what the rule has besides of key channels, each `b hn t k`; of `linear_attention` none, nor numbers.
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


def differentiable(passes: Passes, heads_axis: int = 1) -> Callable[..., Outputs]:
    """Returns the form on `q, k, v, vectors, numbers, log_decay, state, starts, scale`, time before heads.

    `heads_axis` is that of the arrays of steps that the passes take and return: before time, 1, or after, 2. The
    arguments and the residuals of the form are kept for the backward pass. `starts` has no gradient.
    """
    core = _core(passes, heads_axis)

    def laid(array: jax.Array) -> jax.Array:
        return jnp.moveaxis(array, 2, heads_axis)

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
        decay = None if log_decay is None else laid(_of_steps(log_decay, q.shape[1]))
        q, k, v, *others = (laid(array.astype(operands)) for array in (q, k, v, *vectors))
        by_head = tuple(laid(array) for array in numbers)
        o, final = core(float(scale), Arrays(q, k, v, tuple(others), by_head, decay, state, starts))
        return jnp.moveaxis(o, heads_axis, 2), final

    return form


def _core(passes: Passes, heads_axis: int) -> Callable[[float, Arrays], Outputs]:
    def run(scale: float, arrays: Arrays) -> Outputs:
        return passes.forward(arrays, scale, False)[0]

    def save(scale: float, arrays: Arrays) -> tuple[Outputs, tuple[Arrays, Any]]:
        outputs, kept = passes.forward(arrays, scale, True)
        return outputs, (arrays, kept)

    def pull(scale: float, saved: tuple[Arrays, Any], gradients: Outputs) -> tuple[Arrays]:
        arrays, kept = saved
        found = passes.backward(arrays, scale, kept, gradients)
        # Nothing shares the state, so that its axes do not matter.
        summed = functools.partial(heads.summed, heads=heads_axis)
        return (jax.tree.map(summed, arrays._replace(starts=None), found._replace(starts=None)),)

    differentiable = jax.custom_vjp(run, nondiff_argnums=(0,))
    differentiable.defvjp(save, pull)
    return differentiable


def _of_steps(log_decay: jax.Array, t: int) -> jax.Array:
    """Log decays, `b t h k`, those of all steps where they are one."""
    size, _, *rest = log_decay.shape
    return jnp.broadcast_to(log_decay, (size, t, *rest))


def scaled(scale: float, array: jax.Array) -> jax.Array:
    """In the type of the array, multiplied in float32."""
    return (scale * array.astype(jnp.float32)).astype(array.dtype)
