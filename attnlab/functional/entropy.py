"""The entropy of rows of attention weights, in memory linear in the length."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from attnlab.functional.needed import NOTHING, needing
from attnlab.functional.precision import wide_dtype
from attnlab.functional.reach import Placed, Reach
from attnlab.typing import Keys, Queries, Segments
from pallas_kernels.cost import Cost, Passes

CHUNK = 64
"""The number of queries whose scores are in memory at a time; recomputed for the gradient."""

RowNumbers = Float[Array, 'b t h']
"""A number for every row of weights."""


def row_entropy(
    q: Queries,
    k: Keys,
    *,
    reach: Reach = Reach(),
    segments: Segments | None = None,
) -> RowNumbers:
    """Returns `H_i = -sum_j p_ij log p_ij` in nats, `p_i` the softmax of `q_i . k_j / sqrt(k)` over visible keys.

    Keys are visible as in `pallas_kernels.attention`; a query that sees none gives 0. Gradients for queries and keys
    are exact.
    """

    def entropy(scores: Array, seen: Array) -> tuple[Array]:
        highest = jax.lax.stop_gradient(jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True))
        scores = jnp.where(seen, scores - jnp.where(jnp.isneginf(highest), 0.0, highest), 0.0)
        numerators = jnp.where(seen, jnp.exp(scores), 0.0)
        return (_entropy(numerators, scores),)

    return _by_rows(q, k, entropy, reach=reach, segments=segments)[0]


def row_sums_and_entropy(
    q: Queries,
    k: Keys,
    numerator: Callable[[Array], Array],
    *,
    reach: Reach = Reach(),
    segments: Segments | None = None,
) -> tuple[RowNumbers, RowNumbers]:
    """Returns `S_i = sum_j w_ij` and the entropy of `w_i / S_i`, `w_ij = numerator(q_i . k_j / sqrt(k)) >= 0`.

    Otherwise as `row_entropy`; zero weights and rows of zeros add nothing to entropy or gradient.
    """

    def statistics(scores: Array, seen: Array) -> tuple[Array, Array]:
        weights = jnp.where(seen, numerator(scores), 0.0)
        logarithms = jnp.log(jnp.where(weights > 0, weights, 1.0))
        return jnp.sum(weights, axis=-1), _entropy(weights, logarithms)

    sums, entropies = _by_rows(q, k, statistics, reach=reach, segments=segments)
    return sums, entropies


def _entropy(weights: Float[Array, '*b s'], logarithms: Float[Array, '*b s']) -> Float[Array, '*b']:
    """The entropy of the weights divided by their sum, with log weights given up to a common constant."""
    total = jnp.sum(weights, axis=-1)
    total = jnp.where(total > 0, total, 1.0)
    return jnp.log(total) - jnp.sum(weights * logarithms, axis=-1) / total


def _by_rows(
    q: Queries,
    k: Keys,
    statistics: Callable[[Array, Array], tuple[Array, ...]],
    *,
    reach: Reach,
    segments: Segments | None,
) -> tuple[RowNumbers, ...]:
    """Statistics of rows of scores; counted, they need no products, since attention has the scores by definition."""

    def read(q: Queries, k: Keys) -> tuple[RowNumbers, ...]:
        return _statistics(q, k, statistics, reach=reach, segments=segments)

    batch, t, heads, channels = q.shape
    products = 2 * batch * (t + -t % min(CHUNK, t)) * heads * k.shape[1] * channels
    executed = Passes(Cost(products), Cost(3 * products))
    return needing(read, 'row_statistics', model=NOTHING, executed=executed)(q, k)


def _statistics(
    q: Queries,
    k: Keys,
    statistics: Callable[[Array, Array], tuple[Array, ...]],
    *,
    reach: Reach,
    segments: Segments | None,
) -> tuple[RowNumbers, ...]:
    batch, t, heads, channels = q.shape
    s, groups = k.shape[1:3]
    segments = jnp.ones((batch, s), jnp.int32) if segments is None else segments
    keys = Placed(jnp.arange(s, dtype=jnp.int32), segments)
    k = k.astype(wide_dtype(k.dtype))
    size = min(CHUNK, t)
    more = -t % size

    @jax.checkpoint
    def chunk(step: tuple[Array, Array, Array]) -> tuple[Array, ...]:
        q, places, own = step
        # XLA could otherwise compute a score twice, rounded differently, and compare it with itself.
        scores = jax.lax.optimization_barrier(channels**-0.5 * jnp.einsum('btgrk,bsgk->btgrs', q.astype(k.dtype), k))
        seen = reach.visible(Placed(places, own), keys)
        return statistics(scores, jnp.broadcast_to(seen[:, :, None, None], scores.shape))

    pieces = (
        _pieces(jnp.pad(q, ((0, 0), (0, more), (0, 0), (0, 0))), size, groups),
        (jnp.arange(t + more, dtype=jnp.int32) + (s - t)).reshape(-1, size),
        jnp.moveaxis(jnp.pad(segments[:, s - t :], ((0, 0), (0, more))).reshape(batch, -1, size), 1, 0),
    )
    found = jax.lax.map(chunk, pieces)
    return tuple(jnp.moveaxis(rows, 0, 1).reshape(batch, -1, heads)[:, :t] for rows in found)


def _pieces(q: Queries, size: int, groups: int) -> Float[Array, 'i b c g r k']:
    batch, _, heads, channels = q.shape
    return jnp.moveaxis(q.reshape(batch, -1, size, groups, heads // groups, channels), 1, 0)
