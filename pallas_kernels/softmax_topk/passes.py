"""The k largest scores of a tile by a pass over it for each, and how the tiles of a row become one.

A pass takes, of the entries that come after the one found last, larger scores before smaller ones and lower indices
before higher ones, the first. So nothing is written down on the way, and equal scores need no care.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.softmax_topk import reference, vjp

MOST = 64
"""The largest k: a pass costs as much as the sums of the softmax do."""

NOWHERE = 2**31 - 1
"""The index of an entry that does not count, whose score is minus infinity."""


class Kept(NamedTuple):
    """What is kept of the tiles of rows, `n tiles w`: the first k of w are the largest scores and their indices.

    Number k among the scores is the sum of `exp(x - highest)`, with the highest score of the tile.
    """

    scores: jax.Array
    indices: jax.Array


def refusal(x: jax.Array, k: int) -> str | None:
    """Why the call cannot be served; `None`: it can."""
    if x.size == 0:
        return f'x has shape {x.shape}; expected an array with entries'
    if x.dtype.itemsize > 4:
        return f'x has type {x.dtype}; expected float32, bfloat16 or float16'
    if k > MOST:
        return f'k is {k}, and each takes a pass over the row; expected at most {MOST}'
    return None


def keep(
    x: jax.Array,
    columns: jax.Array,
    places: jax.Array,
    k: int,
    over_row: Callable[..., Any],
    along_row: Callable[..., Any],
) -> Kept:
    """Returns what is kept of one tile, in arrays like `places`, which counts along the last axis.

    Args:
      x: scores, float32, minus infinity where they do not count.
      columns: the index of every entry, `NOWHERE` where it does not count.
      places: int32, k + 1 columns or more.
      k: how many.
      over_row: reduces an array along rows, `over_row(jnp.max, x)`.
      along_row: spreads the numbers of the rows over an array, `along_row(highest, x)`.
    """
    highest = over_row(jnp.max, x)
    pivot = jnp.where(highest == -math.inf, 0.0, highest)
    total = over_row(jnp.sum, jnp.exp(x - along_row(pivot, x)))

    def add(r: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        score, index, scores, indices = carry
        last = along_row(score, x)
        later = (x < last) | ((x == last) & (columns > along_row(index, x)))
        score = over_row(jnp.max, jnp.where(later, x, -math.inf))
        first = later & (x == along_row(score, x))
        index = over_row(jnp.min, jnp.where(first, columns, NOWHERE))
        here = places == r
        return (
            score,
            index,
            jnp.where(here, along_row(score, places), scores),
            jnp.where(here, along_row(index, places), indices),
        )

    scores = jnp.where(places == k, along_row(total, places), 0.0)
    before = (jnp.full_like(highest, math.inf), jnp.full_like(highest, -1, jnp.int32))
    _, _, scores, indices = jax.lax.fori_loop(0, k, add, (*before, scores, jnp.zeros_like(places)))
    return Kept(scores, indices)


def by_tiles(sweep: Callable[[jax.Array, int], Kept]) -> Callable[[jax.Array, int], vjp.Found]:
    """Returns the sweep over arrays `*b o` from one over the tiles of rows `n o`."""

    def found(x: jax.Array, k: int) -> vjp.Found:
        kept = sweep(x.reshape(-1, x.shape[-1]), k)
        scores, indices = (array[..., :k] for array in kept)
        highest, totals = kept.scores[..., 0], kept.scores[..., k]
        n, tiles, _ = scores.shape
        # In order of tiles, then of places, equal scores are in order of their indices.
        best, where = reference.largest(scores.reshape(n, tiles * k), k)
        indices = jnp.take_along_axis(indices.reshape(n, tiles * k), where, axis=1)
        pivot = jnp.where(best[:, :1] == -math.inf, 0, best[:, :1])
        total = jnp.sum(totals * jnp.exp(highest - pivot), axis=1, keepdims=True)
        shape = x.shape[:-1]
        # Rows with NaN have no order, but indices that exist.
        indices = jnp.minimum(indices, x.shape[-1] - 1)
        return vjp.Found(best.reshape(*shape, k), indices.reshape(*shape, k), total.reshape(*shape, 1))

    return found
