"""Blocks that queries chose, for kernels: tile by tile, as bits of a word of every query and a bit of every key.

A key is seen if `word & bit` is not zero, and a tile of keys is passed by where all words are. Within a tile the blocks
of the document that began before it are numbered from that of its first key, those of later documents from zero: a
query sees keys of its own document only, so that bits of two documents need not differ.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tiling
from pallas_kernels.attention.problem import Operands, Rule

WORD = 32
"""The blocks of a word of all choices of a query."""

BLOCKS = 30
"""The most blocks of a tile: words are positive."""


class Words(NamedTuple):
    """What queries chose.

    Attributes:
      words: of every query and tile of keys, int32 `b g n t`, with bits of the query's document alone.
      bits: of every key, int32 `b s`; `b` is 1 where there are no documents.
      tile: keys of a tile.
    """

    words: jax.Array
    bits: jax.Array
    tile: int


class Lists(NamedTuple):
    """The tiles of columns that blocks of rows go over.

    Attributes:
      steps: how many, `b g i`.
      tiles: which, in order, and then the others, `b g i j`.
    """

    steps: jax.Array
    tiles: jax.Array


def refusal(rule: Rule, tile: int) -> str | None:
    """The reason why kernels with so many keys in a tile cannot serve a call, or `None`."""
    if rule.block is None or (tile - 2) // rule.block + 2 <= BLOCKS:
        return None
    least = next(block for block in range(rule.block, tile) if (tile - 2) // block + 2 <= BLOCKS)
    return (
        f'blocks have {rule.block} keys; expected at least {least}, of which a tile of {tile} keys meets {BLOCKS} or '
        'fewer'
    )


def words_of(operands: Operands, tile: int) -> Words:
    """The words and bits for tiles of so many keys."""
    assert operands.chosen is not None and operands.key_blocks is not None
    s, numbers = operands.k.shape[2], _tiles(operands.key_blocks[:, 0, 0, 0], tile)
    packed, first, last = _packed(operands.chosen[:, :, 0]), numbers[:, :, :1], numbers[:, :, -1:]
    if operands.query_segments is None or operands.key_segments is None:
        return Words(_from(packed, first, last), _flat(_power(numbers - first), s), tile)
    runs, own = _tiles(operands.key_segments[:, 0, 0, 0], tile), operands.query_segments[:, 0, 0, None, None, :, 0]
    begun = runs == runs[:, :, :1]
    ended = jnp.max(jnp.where(begun, numbers, 0), axis=-1, keepdims=True)
    lowest, highest = runs[:, None, :, :1], runs[:, None, :, -1:]
    # Of the last document a tile may hold the first blocks only, of those between all.
    most = jnp.where(own == highest, jnp.minimum(last, BLOCKS - 1)[:, None], BLOCKS - 1)
    within = jnp.where((lowest < own) & (own <= highest), _power(most + 1) - 1, 0)
    words = jnp.where(own == lowest, _from(packed, first, ended), packed[:, :, :1] & within)
    return Words(words, _flat(_power(jnp.where(begun, numbers - first, numbers)), s), tile)


def _packed(chosen: jax.Array) -> jax.Array:
    """Choices `b g t n` as words of 32 blocks, `b g n/32 t`, and one of zeros behind them.

    Half a word is a product with powers of two, which no unit rounds: a sum of bits along a short dimension is slow.
    """
    n, half = chosen.shape[-1], WORD // 2
    blocks, rows = jnp.arange(n, dtype=jnp.int32)[None], jnp.arange(2 * (-(-n // WORD) + 1), dtype=jnp.int32)[:, None]
    powers = jnp.where(blocks // half == rows, _power(blocks % half), 0)
    # In the order in which callers have choices, which are larger than words.
    factors = powers.astype(jnp.bfloat16), jnp.moveaxis(chosen, 1, 2).astype(jnp.bfloat16)
    halves = jnp.einsum('wn,btgn->wbtg', *factors, preferred_element_type=jnp.float32).astype(jnp.int32)
    return jnp.transpose(halves[::2] | jnp.left_shift(halves[1::2], WORD // 2), (1, 3, 0, 2))


def _from(packed: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    """The words `b g j t` of the blocks from `first` to `last` of every tile, `b j 1`, at most `BLOCKS` of them."""
    word, shift = first[:, None] // WORD, first[:, None] % WORD
    low, high = (jnp.take_along_axis(packed, word + later, axis=2, mode='clip') for later in (0, 1))
    # In two steps: a shift by all bits of a number is not defined.
    whole = jax.lax.shift_right_logical(low, shift) | jnp.left_shift(jnp.left_shift(high, WORD - 1 - shift), 1)
    return whole & (_power(jnp.clip(last - first + 1, 0, BLOCKS)) - 1)[:, None]


def lists_of(rule: Rule, words: Words, sizes: tuple[int, int], tile: tiling.AttentionTile, *, by: int) -> Lists:
    """The tiles of keys of every tile of queries (`by=0`), or of queries of every tile of keys (1), not hidden.

    A tile of keys is that of `words`, or a part of it; `sizes` are the numbers of queries and keys.
    """
    t, s = sizes
    parts = words.tile // tile.keys
    bits = jnp.pad(words.bits, ((0, 0), (0, -s % tile.keys))).reshape(words.bits.shape[0], -1, tile.keys)
    present = jax.lax.reduce(bits, jnp.int32(0), jax.lax.bitwise_or, (2,))
    of_part = jnp.repeat(words.words, parts, axis=2)[:, :, : present.shape[1]] & present[:, None, :, None]
    padded = jnp.pad(of_part, ((0, 0), (0, 0), (0, 0), (0, -t % tile.queries)))
    chosen = jnp.any(padded.reshape(*of_part.shape[:3], -1, tile.queries) != 0, axis=-1)
    visited = chosen & _visible(rule, t, s, tile).T[None, None]
    visited = visited.swapaxes(2, 3) if by == 0 else visited
    return Lists(jnp.sum(visited, axis=-1, dtype=jnp.int32), jnp.argsort(~visited, axis=-1).astype(jnp.int32))


def _visible(rule: Rule, t: int, s: int, tile: tiling.AttentionTile) -> jax.Array:
    """Whether some query of a tile may see some key of one by their positions, tiles of queries first."""
    found = tiling.visible_tiles(t, s, tile, causal=rule.causal, window=rule.window, sinks=rule.sinks)
    ends = jnp.array([(sinks.stop, near.start, near.stop) for sinks, near in found], jnp.int32)
    sinks, first, end = (column[:, None] for column in ends.T)
    tiles = jnp.arange(-(-s // tile.keys), dtype=jnp.int32)[None]
    return (tiles < sinks) | ((first <= tiles) & (tiles < end))


def _tiles(array: jax.Array, tile: int) -> jax.Array:
    """`b s` as `b n tile`, padded with the last number."""
    return jnp.pad(array, ((0, 0), (0, -array.shape[1] % tile)), mode='edge').reshape(array.shape[0], -1, tile)


def _flat(tiles: jax.Array, s: int) -> jax.Array:
    return tiles.reshape(tiles.shape[0], -1)[:, :s]


def _power(exponents: jax.Array) -> jax.Array:
    return jnp.left_shift(jnp.int32(1), exponents)
