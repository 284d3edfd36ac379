"""Going over the keys of every query: all at once, or block by block."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tiling
from pallas_kernels.attention import blocks, products
from pallas_kernels.attention.maps import Block
from pallas_kernels.attention.problem import Operands, Rule
from pallas_kernels.attention.scores import Place, scores


class Part(NamedTuple):
    """The operands of some queries and keys, and their positions."""

    operands: Operands
    place: Place


def over_keys(
    rule: Rule, operands: Operands, update: Callable[[Part, Any, Any], Any], empty: Any, rows: Any = ()
) -> Any:
    """Returns the reduction over the keys of every query, a tree of arrays `b g r t ...`.

    `update(part, rows, known)` adds the keys of one block. The initial value for every query is `empty`, a tree of
    arrays `...`. `rows` is a tree of further arrays `b g r t ...`, of which `update` is given the part of the block.
    """
    b, g, r, t, _ = operands.q.shape
    s = operands.k.shape[2]
    known = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (b, g, r, t, *leaf.shape)), empty)
    if s == 0:
        return known
    cut = tile(operands)
    if cut is None:
        return update(whole(operands), rows, known)
    padded = blocks.pad(operands, cut)
    known, rows = (jax.tree.map(lambda array: pad_rows(array, cut), tree) for tree in (known, rows))

    def step(known: Any, pair: jax.Array) -> tuple[Any, None]:
        here, given = (jax.tree.map(lambda array: take_rows(array, pair, cut), tree) for tree in (known, rows))
        here = update(part(padded, pair, t, s, cut), given, here)
        return jax.tree.map(lambda array, rows: _put_rows(array, rows, pair, cut), known, here), None

    known, _ = jax.lax.scan(step, known, blocks.pairs(rule, t, s, cut))
    return jax.tree.map(lambda array: array[:, :, :, :t], known)


def tile(operands: Operands) -> tiling.AttentionTile | None:
    """The size of the blocks; `None`: a single one."""
    return tiling.attention(operands.q.shape[3], operands.k.shape[2])


def whole(operands: Operands) -> Part:
    """All queries and keys as one block."""
    t, s = operands.q.shape[3], operands.k.shape[2]
    return Part(operands, Place(jnp.arange(t) + s - t, jnp.arange(s), s))


def part(padded: Operands, pair: jax.Array, t: int, s: int, tile: tiling.AttentionTile) -> Part:
    """The block `pair` of `blocks.pairs` of a call with `t` queries and `s` keys, padded to whole blocks."""
    rows = pair[0] * tile.queries + jnp.arange(tile.queries) + s - t
    return Part(blocks.take(padded, pair, tile), Place(rows, pair[1] * tile.keys + jnp.arange(tile.keys), s))


def block(rule: Rule, part: Part, exact: bool = False) -> Block:
    """The scores of a block; if `exact`, as kernels compute them, whatever XLA rounds the factors of products to."""
    x = part.operands.accumulating()
    if not exact:
        return scores(rule, products.over_channels(rule.scale * x.q, x.k), x, part.place)
    # Factors of 16 bits are multiplied as they are: scaled first, they would be rounded once more.
    found = products.over_channels(part.operands.q, part.operands.k, 'highest')
    return scores(rule, rule.scale * found.astype(x.q.dtype), x, part.place)


def pad_rows(array: jax.Array, tile: tiling.AttentionTile) -> jax.Array:
    """An array `b g r t ...` padded with zeros to whole blocks."""
    return jnp.pad(array, ((0, 0),) * 3 + ((0, -array.shape[3] % tile.queries), (0, 0)))


def take_rows(array: jax.Array, pair: jax.Array, tile: tiling.AttentionTile) -> jax.Array:
    """The queries of a block, out of an array `b g r t ...`."""
    return jax.lax.dynamic_slice_in_dim(array, pair[0] * tile.queries, tile.queries, axis=3)


def _put_rows(array: jax.Array, part: jax.Array, pair: jax.Array, tile: tiling.AttentionTile) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, part, pair[0] * tile.queries, axis=3)
