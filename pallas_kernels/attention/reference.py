"""The definition of `attention`: every score at once."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.problem import Extras, Operands, Rule


def attention(rule: Rule, operands: Operands, extras: Extras) -> jax.Array:
    """Returns `o_i = sum_j w_ij v_j`, `b g r t v`."""
    x = operands.accumulating()
    scores = rule.scale * jnp.einsum('bgrtk,bgsk->bgrts', x.q, x.k)
    t, s = scores.shape[3:]
    i = jnp.arange(t)[:, None] + s - t
    j = jnp.arange(s)[None, :]
    visible = jnp.ones((t, s), bool)
    if rule.causal:
        visible &= j <= i
    if rule.window is not None:
        visible &= (jnp.abs(i - j) < rule.window) | (j < rule.sinks)
    visible = jnp.broadcast_to(visible, scores.shape)
    if x.query_segments is not None:
        visible &= x.query_segments == x.key_segments
    if x.bias is not None:
        visible &= x.bias != -jnp.inf
    if x.chosen is not None and x.key_blocks is not None:
        numbers = jnp.broadcast_to(x.key_blocks, (*x.chosen.shape[:4], s))
        visible &= jnp.take_along_axis(x.chosen, numbers, axis=-1)
    counts = jnp.sum(visible, axis=-1, keepdims=True, dtype=scores.dtype)

    factors = (extras.temperature, rule.weights.query_factor(counts))
    for factor in factors:
        scores = scores if factor is None else scores * factor
    if rule.weights.soft_cap is not None:
        scores = rule.weights.soft_cap * jnp.tanh(scores / rule.weights.soft_cap)
    if x.bias is not None:
        scores += jnp.where(visible, x.bias, 0)
    if x.slopes is not None:
        scores -= x.slopes * jnp.abs(i - j)[None, None, None]
    if x.query_forget is not None and x.key_forget is not None:
        scores += x.query_forget - x.key_forget
    if x.query_rest is not None and x.key_rest is not None:
        scores += x.query_rest - x.key_rest

    if extras.sink_scores is not None:
        sink = jnp.broadcast_to(extras.sink_scores.astype(scores.dtype), (*scores.shape[:-1], 1))
        seen = jnp.any(visible, axis=-1, keepdims=True) & (sink != -jnp.inf)
        scores = jnp.concatenate([scores, jnp.where(seen, sink, 0)], axis=-1)
        visible = jnp.concatenate([visible, seen], axis=-1)
    weights = rule.weights.weights(scores, visible)[..., :s]
    after = rule.weights.output_factor(counts)
    if after is not None:
        weights *= after
    return jnp.einsum('bgrts,bgsv->bgrtv', weights, x.v).astype(operands.v.dtype)
