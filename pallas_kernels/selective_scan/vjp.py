"""Differentiation shared by the forms of `selective_scan`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Operands(NamedTuple):
    """The arrays of a call: x, dt `b t d`; A `d n`; B, C `b t n`; state `b d n`."""

    x: jax.Array
    dt: jax.Array
    A: jax.Array
    B: jax.Array
    C: jax.Array
    state: jax.Array


Outputs = tuple[jax.Array, jax.Array]
"""y without the skip, `b t d`, and the last state, `b d n`."""

Forward = Callable[[Operands, jax.Array | None, bool], tuple[Outputs, Any]]
"""From a call, and the tokens that forget the past, bool `b t`, to its outputs, and the states at the start of
its chunks if they are kept."""

Backward = Callable[[Operands, jax.Array | None, Any, Outputs], Operands]
"""From a call, its chunk states and the gradients of its outputs to the gradients of its operands."""

Saved = tuple[Operands, jax.Array | None, Any]
"""A call, and the states at the start of its chunks."""


def differentiable(forward: Forward, backward: Backward) -> Callable[[Operands, jax.Array | None], Outputs]:
    """Returns the form as a function `(operands, starts) -> outputs` with its gradient.

    The operands and one state per chunk are kept for the backward pass; the states within a chunk are recomputed, one
    chunk at a time, so that `b t d n` is never stored (Gu and Dao, 2023, arXiv 2312.00752).
    """

    @jax.custom_vjp
    def selective_scan(operands: Operands, starts: jax.Array | None) -> Outputs:
        return forward(operands, starts, False)[0]

    def save(operands: Operands, starts: jax.Array | None) -> tuple[Outputs, Saved]:
        outputs, states = forward(operands, starts, True)
        return outputs, (operands, starts, states)

    def pull(saved: Saved, gradients: Outputs) -> tuple[Operands, None]:
        operands, starts, states = saved
        return backward(operands, starts, states, gradients), None

    selective_scan.defvjp(save, pull)
    return selective_scan
