"""Scores and visibility of one block of queries and keys."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.problem import Operands, Rule


def scores(rule: Rule, block: Operands, rows: jax.Array, columns: jax.Array, keys: int) -> tuple[jax.Array, jax.Array]:
    """Returns the scores, `b g r t s` with `r = h / g` query heads a group, and which of them are visible.

    `rows` holds the positions of the queries among the keys, `t`; `columns` those of the keys, `s`, of which the ones from
    `keys` on are padding. Visibility has five dimensions too, of size 1 where it does not vary.
    """
    b, t, h, _ = block.q.shape
    g = block.k.shape[2]
    q = block.q.reshape(b, t, g, h // g, -1)
    values = jnp.einsum('btgrk,bsgk->bgrts', q * rule.scale, block.k)
    cap = rule.weights.soft_cap
    if cap is not None:
        values = cap * jnp.tanh(values / cap)

    distance = (rows[:, None] - columns[None, :])[None, None, None]
    visible = _visible(rule, block, distance, columns[None, None, None, None, :], keys)
    if block.bias is not None:
        bias = _grouped(block.bias, g, h)
        visible &= bias > -jnp.inf
        values += jnp.where(visible, bias, 0)
    if block.slopes is not None:
        values -= block.slopes.reshape(1, g, h // g, 1, 1) * jnp.abs(distance).astype(values.dtype)
    if block.query_forget is not None:
        values += _grouped(jnp.moveaxis(block.query_forget, 1, 2)[..., None], g, h)
        values -= _grouped(jnp.moveaxis(block.key_forget, 1, 2)[:, :, None, :], g, h)
    return values, visible


def _visible(rule: Rule, block: Operands, distance: jax.Array, columns: jax.Array, keys: int) -> jax.Array:
    visible = columns < keys
    if rule.causal:
        visible &= distance >= 0
    if rule.window is not None:
        visible &= (jnp.abs(distance) < rule.window) | (columns < rule.sinks)
    if block.query_segments is not None:
        visible &= block.query_segments[:, None, None, :, None] == block.key_segments[:, None, None, None, :]
    return visible


def _grouped(array: jax.Array, g: int, h: int) -> jax.Array:
    """Splits the heads of an array `b h t s`, or its single one, into groups: `b g r t s`."""
    b, heads, t, s = array.shape
    return array.reshape((b, 1, 1, t, s) if heads == 1 else (b, g, h // g, t, s))
