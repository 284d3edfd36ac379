"""Scores and visibility of one block of queries and keys."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.problem import Operands, Rule


class Place(NamedTuple):
    """Where a block lies.

    Attributes:
      rows: positions of its queries among the keys, `t`.
      columns: positions of its keys, `s`.
      end: from which position on keys are padding.
    """

    rows: jax.Array
    columns: jax.Array
    end: int


def scores(rule: Rule, products: jax.Array, block: Operands, place: Place) -> tuple[jax.Array, jax.Array]:
    """Returns the scores of a block from its scaled products of queries and keys, `b g r t s`, and which are visible.

    Visibility has the same dimensions, of size 1 where it does not vary.
    """
    cap = rule.weights.soft_cap
    values = products if cap is None else cap * jnp.tanh(products / cap)
    columns = place.columns[None, None, None, None, :]
    distance = place.rows[None, None, None, :, None] - columns

    visible = columns < place.end
    if rule.causal:
        visible &= distance >= 0
    if rule.window is not None:
        visible &= (jnp.abs(distance) < rule.window) | (columns < rule.sinks)
    if block.query_segments is not None:
        visible &= block.query_segments == block.key_segments
    if block.bias is not None:
        visible &= block.bias > -jnp.inf
        values += jnp.where(visible, block.bias, 0)
    if block.slopes is not None:
        values -= block.slopes * jnp.abs(distance).astype(values.dtype)
    if block.query_forget is not None and block.key_forget is not None:
        values += block.query_forget - block.key_forget
    return values, visible
