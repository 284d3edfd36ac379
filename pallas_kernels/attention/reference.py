"""The definition of `attention`: every score at once."""

import jax
import jax.numpy as jnp

from pallas_kernels import precision
from pallas_kernels.attention.problem import Operands, Rule


def attention(rule: Rule, operands: Operands) -> jax.Array:
    """Returns `o_i = sum_j w_ij v_j`, `b t h v`."""
    q, k, v = (
        array.astype(precision.accumulator(*operands.floating())) for array in (operands.q, operands.k, operands.v)
    )
    t, s, h, g = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    k, v = jnp.repeat(k, h // g, axis=2), jnp.repeat(v, h // g, axis=2)

    scores = rule.scale * jnp.einsum('bthk,bshk->bhts', q, k)
    if rule.weights.soft_cap is not None:
        scores = rule.weights.soft_cap * jnp.tanh(scores / rule.weights.soft_cap)

    i = jnp.arange(t)[:, None] + s - t
    j = jnp.arange(s)[None, :]
    visible = jnp.ones((t, s), bool)
    if rule.causal:
        visible &= j <= i
    if rule.window is not None:
        visible &= (jnp.abs(i - j) < rule.window) | (j < rule.sinks)
    visible = visible[None, None]
    if operands.query_segments is not None:
        visible &= operands.query_segments[:, None, :, None] == operands.key_segments[:, None, None, :]
    if operands.bias is not None:
        visible &= operands.bias > -jnp.inf
        scores += jnp.where(visible, operands.bias, 0)
    if operands.slopes is not None:
        scores -= operands.slopes[None, :, None, None] * jnp.abs(i - j)[None, None]
    if operands.query_forget is not None:
        scores += jnp.moveaxis(operands.query_forget, 1, 2)[:, :, :, None]
        scores -= jnp.moveaxis(operands.key_forget, 1, 2)[:, :, None, :]

    weights = rule.weights.weights(scores, jnp.broadcast_to(visible, scores.shape))
    return jnp.einsum('bhts,bshv->bthv', weights, v).astype(operands.v.dtype)
