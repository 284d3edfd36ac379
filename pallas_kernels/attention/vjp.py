"""Differentiation shared by the forms of `attention`."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax

from pallas_kernels.attention.problem import Operands, Rule


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass besides the operands.

    Attributes:
      output: `b g r t v`.
      statistic: of every row, by the weight map, `b g r t 1`.
      weights: `b g r t s`; `None`: they are computed again.
    """

    output: jax.Array
    statistic: jax.Array
    weights: jax.Array | None = None


Forward = Callable[[Rule, Operands], Kept]
"""From a call to its output, and what is kept."""

Backward = Callable[[Rule, Operands, Kept, jax.Array], Operands]
"""From a call, what was kept, and the gradient of the output to the gradients of the operands."""


def differentiable(forward: Forward, backward: Backward) -> Callable[[Rule, Operands], jax.Array]:
    """Returns the form as a function `(rule, operands) -> output` with its gradient.

    Kept for the backward pass are the operands, the output and one number a row; the weights are computed again (Dao et
    al., 2022, arXiv 2205.14135), unless the forward pass kept them.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def attention(rule: Rule, operands: Operands) -> jax.Array:
        return forward(rule, operands).output

    def save(rule: Rule, operands: Operands) -> tuple[jax.Array, tuple[Operands, Kept]]:
        kept = forward(rule, operands)
        return kept.output, (operands, kept)

    def pull(rule: Rule, saved: tuple[Operands, Kept], doutput: jax.Array) -> tuple[Operands]:
        operands, kept = saved
        if kept.weights is None:
            # Otherwise the compiler would merge this pass with the forward one, and keep the weights after all.
            operands, kept, doutput = jax.lax.optimization_barrier((operands, kept, doutput))
        return (backward(rule, operands, kept, doutput),)

    attention.defvjp(save, pull)
    return attention
