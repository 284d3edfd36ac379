"""Scores and visibility of one block of queries and keys."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.maps import Block
from pallas_kernels.attention.problem import Operands, Rule


class Place(NamedTuple):
    """The position of a block.

    Attributes:
      rows: positions of its queries among the keys, `t`.
      columns: positions of its keys, `s`.
      end: the position from which on keys are padding.
    """

    rows: jax.Array
    columns: jax.Array
    end: int


def scores(rule: Rule, products: jax.Array, block: Operands, place: Place) -> Block:
    """Returns the scores of a block from its scaled products of queries and keys, `b g r t s`.

    Visibility has the same dimensions, of size 1 where it does not vary.
    """
    cap = rule.weights.soft_cap
    values = products if cap is None else cap * jnp.tanh(products / cap)
    seen = visible(rule, block, place)
    if block.bias is not None:
        values += jnp.where(seen, block.bias, 0)
    if block.slopes is not None:
        values -= block.slopes * jnp.abs(_distance(place)).astype(values.dtype)
    if block.query_forget is not None and block.key_forget is not None:
        values += block.query_forget - block.key_forget
    if block.query_rest is not None and block.key_rest is not None:
        values += block.query_rest - block.key_rest
    return Block(values, seen, _columns(place))


def visible(rule: Rule, block: Operands, place: Place) -> jax.Array:
    """Which keys of a block its queries may see, `b g r t s`, of size 1 where it does not vary."""
    columns, distance = _columns(place), _distance(place)
    seen = columns < place.end
    if rule.causal:
        seen &= distance >= 0
    if rule.window is not None:
        seen &= (jnp.abs(distance) < rule.window) | (columns < rule.sinks)
    if block.query_segments is not None:
        seen &= block.query_segments == block.key_segments
    if block.bias is not None:
        seen &= block.bias != -jnp.inf
    if block.chosen is not None and block.key_blocks is not None:
        seen &= _among(block.chosen, block.key_blocks, block.dtype())
    return seen


def _among(chosen: jax.Array, key_blocks: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Which keys are in blocks that a query chose, `b g 1 t s`: by a product, as a gather moves a number a pair."""
    numbers = jnp.arange(chosen.shape[-1], dtype=key_blocks.dtype)[None, :, None]
    inside = key_blocks[:, 0, 0] == numbers
    inside = jnp.broadcast_to(inside, (chosen.shape[0], *inside.shape[1:]))
    return jnp.einsum('bgrtn,bns->bgrts', chosen.astype(dtype), inside.astype(dtype)) > 0


def _columns(place: Place) -> jax.Array:
    return place.columns[None, None, None, None, :]


def _distance(place: Place) -> jax.Array:
    return place.rows[None, None, None, :, None] - _columns(place)
