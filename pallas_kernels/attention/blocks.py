"""Splits a call of `attention` into blocks of queries and keys, and sums the gradients of the blocks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.problem import Operands, Rule
from pallas_kernels.tiling import AttentionTile, visible_tiles

QUERY_AXES = {'q': 3, 'bias': 3, 'query_forget': 3, 'query_rest': 3, 'query_segments': 3, 'chosen': 3}
"""The axis of each operand along which queries run; where it has size 1 the operand is constant and never cut."""

KEY_AXES = {'k': 2, 'v': 2, 'bias': 4, 'key_forget': 4, 'key_rest': 4, 'key_segments': 4, 'key_blocks': 4}
"""The axis of each operand along which keys run."""


def pairs(rule: Rule, t: int, s: int, tile: AttentionTile) -> jax.Array:
    """Lists the blocks of queries and keys, one row `(i, j)` each, of which some query may see some key."""
    tiles = visible_tiles(t, s, tile, causal=rule.causal, window=rule.window, sinks=rule.sinks)
    return jnp.array([(i, j) for i, parts in enumerate(tiles) for part in parts for j in part], jnp.int32)


def pad(operands: Operands, tile: AttentionTile) -> Operands:
    """Pads queries and keys with zeros to whole blocks."""
    return _each(operands, lambda name, array: jnp.pad(array, [(0, -n % c) for n, c in _cuts(name, array, tile)]))


def take(operands: Operands, pair: jax.Array, tile: AttentionTile) -> Operands:
    """The part of padded operands in one block."""

    def part(name: str, array: jax.Array) -> jax.Array:
        sizes = [c for _, c in _cuts(name, array, tile)]
        return jax.lax.dynamic_slice(array, _corner(name, array, pair, tile), sizes)

    return _each(operands, part)


def add(total: Operands, part: Operands, pair: jax.Array, tile: AttentionTile) -> Operands:
    """Adds the gradients of one block to those of the padded operands."""
    here = take(total, pair, tile)

    def put(name: str, array: jax.Array) -> jax.Array:
        sums = getattr(here, name) + getattr(part, name)
        return jax.lax.dynamic_update_slice(array, sums, _corner(name, array, pair, tile))

    return _each(total, put)


def _cuts(name: str, array: jax.Array, tile: AttentionTile) -> list[tuple[int, int]]:
    """For every axis its size, and the size of its blocks."""
    cuts = [(size, size) for size in array.shape]
    for axes, size in ((QUERY_AXES, tile.queries), (KEY_AXES, tile.keys)):
        if name in axes and array.shape[axes[name]] != 1:
            cuts[axes[name]] = (array.shape[axes[name]], size)
    return cuts


def _corner(name: str, array: jax.Array, pair: jax.Array, tile: AttentionTile) -> list[jax.Array]:
    """Where the block starts."""
    corner = [jnp.int32(0)] * array.ndim
    for axes, index, size in ((QUERY_AXES, pair[0], tile.queries), (KEY_AXES, pair[1], tile.keys)):
        if name in axes and array.shape[axes[name]] != 1:
            corner[axes[name]] = index * size
    return corner


def _each(operands: Operands, function: Callable[[str, jax.Array], jax.Array]) -> Operands:
    arrays = {field.name: getattr(operands, field.name) for field in dataclasses.fields(operands)}
    parts: dict[str, Any] = {name: None if array is None else function(name, array) for name, array in arrays.items()}
    return Operands(**parts)
