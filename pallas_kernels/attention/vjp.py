"""Differentiation shared by the forms of `attention`."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention import around, survey
from pallas_kernels.attention.maps import Statistics
from pallas_kernels.attention.problem import Extras, Operands, Rule


class Residuals(NamedTuple):
    """The residuals of the forward pass, besides the operands.

    Attributes:
      output: `b g r t v`, in the type `output_type`, or for kernels on Hopper in that of the values.
      statistics: of every row, those of the weight map, `b g r t 1` each.
      companion: the sum of the values by the map's second weights, like the output; `None`: it has none.
      weights: `b g r t s`; `None`: they are computed again.
    """

    output: jax.Array
    statistics: Statistics
    companion: jax.Array | None = None
    weights: jax.Array | None = None


Forward = Callable[[Rule, Operands, Statistics], Residuals]
"""From a call and its surveyed statistics, none for most maps, to its output and residuals."""

Backward = Callable[[Rule, Operands, Residuals, jax.Array], Operands]
"""From a call, its residuals and the gradient of the output to the gradients of the operands."""


class Passes(NamedTuple):
    """The two passes of a form.

    Attributes:
      forward: the first.
      backward: the second.
      exact: whether they multiply queries and keys without rounding these, as kernels do.
    """

    forward: Forward
    backward: Backward
    exact: bool = False


Form = Callable[[Rule, Operands, Extras], jax.Array]
"""A form of `attention`, differentiable."""


def differentiable(forward: Forward, backward: Backward, exact: bool = False) -> Form:
    """Returns the form with its gradient and the common parts of `around`.

    The operands, the output, the statistics of the weight map, one to six numbers a row, and its companion, if any, are
    kept for the backward pass; the weights are recomputed (Dao et al., 2022, arXiv 2205.14135), unless the forward pass
    kept them. A sink changes the output and the statistics that are kept, and nothing else.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def core(rule: Rule, operands: Operands, sink: jax.Array | None) -> jax.Array:
        return save(rule, operands, sink)[0]

    def save(
        rule: Rule, operands: Operands, sink: jax.Array | None
    ) -> tuple[jax.Array, tuple[Operands, Residuals, jax.Array | None, jax.Array | None]]:
        kept = forward(rule, operands, survey.statistics(rule, operands, exact=exact))
        kept, weight = (kept, None) if sink is None else _with_sink(rule, kept, sink)
        return kept.output, (operands, kept, sink, weight)

    def pull(
        rule: Rule, saved: tuple[Operands, Residuals, jax.Array | None, jax.Array | None], doutput: jax.Array
    ) -> tuple[Operands, jax.Array | None]:
        operands, kept, sink, weight = saved
        if kept.weights is None:
            # Otherwise the compiler would merge this pass with the forward one, and keep the weights after all.
            operands, kept, doutput = jax.lax.optimization_barrier((operands, kept, doutput))
        gradients = backward(rule, operands, kept, doutput)
        if sink is None or weight is None:
            return gradients, None
        delta, _ = deltas(kept, doutput)
        return gradients, around.sink_gradient(weight, delta, sink)

    core.defvjp(save, pull)
    return functools.partial(around.attention, core)


def output_type(rule: Rule, operands: Operands) -> jnp.dtype:
    """The type of the output, which is the values', or if `around` has yet to multiply it that of accumulators.

    In float16 a sum over thousands of keys is out of range where its mean is not.
    """
    count = jax.ShapeDtypeStruct((), operands.dtype())
    if rule.weights.counts_keys and jax.eval_shape(rule.weights.output_factor, count) is not None:
        return operands.dtype()
    return operands.v.dtype


def deltas(kept: Residuals, doutput: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns `delta` and `companion_delta` of every row, `b g r t 1`, as `WeightMap.score_gradient` takes them."""
    dtype = jnp.result_type(jnp.float32, doutput)
    doutput = doutput.astype(dtype)
    delta = jnp.sum(kept.output * doutput, axis=-1, keepdims=True)
    return delta, None if kept.companion is None else jnp.sum(kept.companion * doutput, axis=-1, keepdims=True)


def _with_sink(rule: Rule, kept: Residuals, sink: jax.Array) -> tuple[Residuals, jax.Array]:
    """What is kept, with a sink of every head, and the weights of the sinks, `b g r t 1`."""
    statistics, share, weight = rule.weights.merge_sink(kept.statistics, sink.astype(kept.statistics[0].dtype))
    weights = None if kept.weights is None else kept.weights * share
    return Residuals((kept.output * share).astype(kept.output.dtype), statistics, kept.companion, weights), weight
