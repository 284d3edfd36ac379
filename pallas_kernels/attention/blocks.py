"""Cutting the operands of `attention` into blocks of queries and keys, and adding the gradients of blocks up."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.attention.problem import Operands, Rule
from pallas_kernels.tiling import AttentionTile

AXES = {
    'q': (1, None),
    'k': (None, 1),
    'v': (None, 1),
    'bias': (2, 3),
    'slopes': (None, None),
    'query_forget': (1, None),
    'key_forget': (None, 1),
    'query_segments': (1, None),
    'key_segments': (None, 1),
}
"""The axes of every operand along which queries and keys run; of size 1, they broadcast and are never cut."""


def pairs(rule: Rule, t: int, s: int, tile: AttentionTile) -> jax.Array:
    """Lists the blocks of queries and keys, one row `(i, j)` each, of which some query may see some key."""
    found = []
    for i in range(0, t, tile.queries):
        first, last = i + s - t, min(i + tile.queries, t) - 1 + s - t
        for j in range(0, s, tile.keys):
            end = min(j + tile.keys, s) - 1
            gap = max(first - end, j - last, 0)
            near = rule.window is None or gap < rule.window or j < rule.sinks
            if near and not (rule.causal and j > last):
                found.append((i // tile.queries, j // tile.keys))
    return jnp.array(found, jnp.int32)


def pad(operands: Operands, tile: AttentionTile) -> Operands:
    """Puts zeros behind queries and keys, up to whole blocks."""
    return _each(operands, lambda name, array: jnp.pad(array, [(0, -n % c) for n, c in _cuts(name, array, tile)]))


def take(operands: Operands, pair: jax.Array, tile: AttentionTile) -> Operands:
    """The part of padded operands in one block."""

    def part(name: str, array: jax.Array) -> jax.Array:
        sizes = [c for _, c in _cuts(name, array, tile)]
        return jax.lax.dynamic_slice(array, _corner(name, array, pair, tile), sizes)

    return _each(operands, part)


def add(total: Operands, part: Operands, pair: jax.Array, tile: AttentionTile) -> Operands:
    """Adds the gradients of one block into those of the padded operands."""
    here = take(total, pair, tile)

    def put(name: str, array: jax.Array) -> jax.Array:
        sums = getattr(here, name) + getattr(part, name)
        return jax.lax.dynamic_update_slice(array, sums, _corner(name, array, pair, tile))

    return _each(total, put)


def _cuts(name: str, array: jax.Array, tile: AttentionTile) -> list[tuple[int, int]]:
    """For every axis its size, and the size of its blocks."""
    cuts = [(size, size) for size in array.shape]
    for axis, size in zip(AXES[name], (tile.queries, tile.keys), strict=True):
        if axis is not None and array.shape[axis] != 1:
            cuts[axis] = (array.shape[axis], size)
    return cuts


def _corner(name: str, array: jax.Array, pair: jax.Array, tile: AttentionTile) -> list[jax.Array]:
    """Where the block starts."""
    corner = [jnp.int32(0)] * array.ndim
    for axis, index, size in zip(AXES[name], pair, (tile.queries, tile.keys), strict=True):
        if axis is not None and array.shape[axis] != 1:
            corner[axis] = index * size
    return corner


def _each(operands: Operands, function: Callable[[str, jax.Array], jax.Array]) -> Operands:
    fields = {name: getattr(operands, name) for name in AXES}
    return dataclasses.replace(
        operands, **{name: function(name, array) for name, array in fields.items() if array is not None}
    )
