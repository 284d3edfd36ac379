"""The k largest scores of rows in registers, by a pass over them for each.

A pass takes the first entry after the one found last, where larger scores come before smaller ones and lower indices
before higher ones. So nothing is written meanwhile, and equal scores need no special care.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import rows_refusal

MOST = 64
"""The maximum k: a pass costs as much as the sums of the softmax."""

NOWHERE = 2**31 - 1
"""The index of an excluded entry, whose score is minus infinity."""


def refusal(x: jax.Array, k: int) -> str | None:
    """The reason why the call cannot be served, or `None`."""
    too_many = f'k is {k}, and each takes a pass over the row; expected at most {MOST}' if k > MOST else None
    return rows_refusal(x) or too_many


def largest(
    parts: Sequence[tuple[jax.Array, jax.Array]],
    places: jax.Array,
    k: int,
    *,
    over_row: Callable[..., Any],
    along_row: Callable[..., Any],
) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest scores of rows and their indices, in the first k columns of arrays like `places`.

    Args:
      parts: of the rows: scores, float32, and the index of every one, `NOWHERE` where it is excluded.
      places: the number of every column of the results, int32; those beyond k are unused.
      k: how many.
      over_row: reduces an array along rows, `over_row(jnp.max, array)`.
      along_row: spreads the numbers of rows over an array, `along_row(numbers, array)`.
    """

    def over_parts(reduce: Callable[..., Any], arrays: Sequence[jax.Array]) -> jax.Array:
        pair = {jnp.max: jnp.maximum, jnp.min: jnp.minimum}[reduce]
        first, *others = (over_row(reduce, array) for array in arrays)
        for other in others:
            first = pair(first, other)
        return first

    def find(r: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        score, index, scores, indices = carry
        later = [
            (x < along_row(score, x)) | ((x == along_row(score, x)) & (columns > along_row(index, x)))
            for x, columns in parts
        ]
        score = over_parts(jnp.max, [jnp.where(mask, x, -math.inf) for (x, _), mask in zip(parts, later, strict=True)])
        index = over_parts(
            jnp.min,
            [
                jnp.where(mask & (x == along_row(score, x)), columns, NOWHERE)
                for (x, columns), mask in zip(parts, later, strict=True)
            ],
        )
        here = places == r
        return (
            score,
            index,
            jnp.where(here, along_row(score, places), scores),
            jnp.where(here, along_row(index, places), indices),
        )

    like = over_row(jnp.max, parts[0][0])
    nothing = (jnp.where(places < 0, 0.0, -math.inf), jnp.where(places < 0, 0, NOWHERE))
    before = (jnp.full_like(like, math.inf), jnp.full_like(like, -1, jnp.int32))
    _, _, scores, indices = jax.lax.fori_loop(0, k, find, (*before, *nothing))
    return scores, indices
