"""Differentiation shared by the forms of `attention`."""

import functools
from collections.abc import Callable

import jax

from pallas_kernels.attention.problem import Operands, Rule

Forward = Callable[[Rule, Operands], tuple[jax.Array, jax.Array]]
"""From a call to its output, `b g r t v`, and the row statistics of its weight map, `b g r t 1`."""

Backward = Callable[[Rule, Operands, jax.Array, jax.Array, jax.Array], Operands]
"""From a call, its output, its row statistics and the gradient of the output to the gradients of the operands."""


def differentiable(forward: Forward, backward: Backward) -> Callable[[Rule, Operands], jax.Array]:
    """Returns the form as a function `(rule, operands) -> output` with its gradient.

    Kept for the backward pass are the operands, the output and one number a row; the weights are computed again (Dao et
    al., 2022, arXiv 2205.14135).
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def attention(rule: Rule, operands: Operands) -> jax.Array:
        return forward(rule, operands)[0]

    def save(rule: Rule, operands: Operands) -> tuple[jax.Array, tuple[Operands, jax.Array, jax.Array]]:
        output, statistic = forward(rule, operands)
        return output, (operands, output, statistic)

    def pull(rule: Rule, saved: tuple[Operands, jax.Array, jax.Array], doutput: jax.Array) -> tuple[Operands]:
        # Without the barrier the compiler would merge this pass with the forward one, and keep the weights after all.
        return (backward(rule, *jax.lax.optimization_barrier((*saved, doutput))),)

    attention.defvjp(save, pull)
    return attention
