"""Parts common to all implementations of `attention`: factors, counts of keys, the learned sink."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import precision
from pallas_kernels.attention import sweep
from pallas_kernels.attention.problem import MASKS, Extras, Operands, Rule
from pallas_kernels.attention.scores import visible

Core = Callable[[Rule, Operands, jax.Array | None], jax.Array]
"""From a call and the scores of the sinks to the output, differentiable."""


def attention(core: Core, rule: Rule, operands: Operands, extras: Extras) -> jax.Array:
    """Returns the output of `core` with temperatures and the factors of the weight map applied outside of it."""
    counts = key_counts(rule, operands) if rule.weights.counts_keys else None
    factor = query_factor(rule, extras, counts)
    if factor is not None:
        # In the type of accumulators, in which the gradient of the factor, a sum over channels and queries, is too.
        scaled = operands.q.astype(precision.accumulator(operands.q, factor)) * factor
        operands = operands.replace(q=scaled.astype(operands.q.dtype))
    output = core(rule, operands, extras.sink_scores)
    after = None if counts is None else rule.weights.output_factor(counts)
    # Only now is it rounded: the factor brings it into the range of 16 bits.
    return output if after is None else (output * after).astype(operands.v.dtype)


def query_factor(rule: Rule, extras: Extras, counts: jax.Array | None) -> jax.Array | None:
    """The factor of the products of every query, `b g r t 1`; `None`: one."""
    own = None if counts is None else rule.weights.query_factor(counts)
    if own is None or extras.temperature is None:
        return extras.temperature if own is None else own
    return own * extras.temperature


def key_counts(rule: Rule, operands: Operands) -> jax.Array:
    """Returns how many keys every query sees, `b g r t 1`, of size 1 where it does not vary, in accumulators' type."""
    t, s = operands.q.shape[3], operands.k.shape[2]
    if operands.query_segments is None and operands.bias is None and operands.chosen is None:
        return _counts_by_position(rule, t, s).astype(operands.dtype())[None, None, None, :, None]

    def update(part: sweep.Part, rows: tuple[()], known: jax.Array) -> jax.Array:
        seen = visible(rule, part.operands, part.place)
        shape = (*known.shape[:4], part.place.columns.shape[0])
        return known + jnp.sum(jnp.broadcast_to(seen, shape), axis=-1, keepdims=True, dtype=known.dtype)

    return sweep.over_keys(rule, _mask_alone(operands), update, jnp.zeros(1, operands.dtype()))


def _counts_by_position(rule: Rule, t: int, s: int) -> jax.Array:
    """The same where only positions matter, `t`."""
    position = jnp.arange(t) + s - t
    last = jnp.clip(position + 1, 0, s) if rule.causal else jnp.full(t, s)
    if rule.window is None:
        return last
    end = jnp.clip(position + rule.window, 0, last)
    start = jnp.clip(position - rule.window + 1, 0, end)
    sinks = jnp.minimum(rule.sinks, last)
    twice = jnp.maximum(jnp.minimum(sinks, end) - start, 0)
    return end - start + sinks - twice


def _mask_alone(operands: Operands) -> Operands:
    """Operands of the same lengths and one channel, of size 1 where masks do not vary."""
    masks = [array for array in (operands.bias, operands.query_segments, operands.chosen) if array is not None]
    b, g, r = (max(array.shape[axis] for array in masks) for axis in range(3))
    t, s = operands.q.shape[3], operands.k.shape[2]
    q, k = jnp.zeros((b, g, r, t, 1)), jnp.zeros((b, g, s, 1))
    return Operands(q, k, k, bias=operands.bias, **{name: getattr(operands, name) for name in MASKS})


def sink_gradient(weight: jax.Array, delta: jax.Array, like: jax.Array) -> jax.Array:
    """The gradient of the scores of the sinks, `1 g r 1 1`: that of a softmax whose sink has the value zero."""
    total = -jnp.sum(weight * delta, axis=(0, 3), keepdims=True)
    return total.astype(precision.accumulator(like)).astype(like.dtype)
