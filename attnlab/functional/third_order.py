"""Softmax over pairs of keys: exactly, tile by tile, and by a polynomial in place of the exponential."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped

from attnlab.functional.lookup import taken
from attnlab.functional.precision import wide_dtype
from attnlab.functional.reach import Placed, Reach
from attnlab.functional.recurrences import carried
from attnlab.typing import Segments

TILE = (32, 16, 64)
"""Tile sizes: queries, first keys and second keys whose scores are in memory at a time, per row and head."""

CHUNK, CHUNKS = 4, 16
"""Tokens per chunk whose sums of monomials are computed together, and chunks that are recomputed together."""


class Operands(NamedTuple):
    """Queries, both keys and both values; the values have equally many channels."""

    q: Float[Array, 'b t h k']
    k1: Float[Array, 'b s h k']
    k2: Float[Array, 'b s h k']
    v1: Float[Array, 'b s h v']
    v2: Float[Array, 'b s h v']


def third_order_attention(
    operands: Operands, queries: Placed, keys: Placed, *, scale: float, reach: Reach = Reach()
) -> Float[Array, 'b t h v']:
    """Returns `o_i = sum_jk p_ijk (v1_j * v2_k)`, `p_i` the softmax over all visible pairs of `scale sum_c q k1 k2`.

    A query sees a pair when it sees both keys; one without visible pairs gives zero.
    Time is cubic in the length, memory linear, also for the gradient: scores are computed in tiles, and recomputed.
    Alman and Song 2024, https://arxiv.org/abs/2310.04064.
    """
    dtype = operands.v1.dtype
    wide = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2).astype(wide_dtype(x.dtype)), operands)
    return jnp.swapaxes(_attend(_Rule(scale, reach), wide, queries, keys), 1, 2).astype(dtype)


@dataclasses.dataclass(frozen=True)
class _Rule:
    scale: float
    reach: Reach


class _Tile(NamedTuple):
    """A tile of operands, heads before time."""

    q: Float[Array, 'b h t k']
    k1: Float[Array, 'b h j k']
    k2: Float[Array, 'b h s k']
    v1: Float[Array, 'b h j v']
    v2: Float[Array, 'b h s v']


class _PartialRows(NamedTuple):
    """The partial softmax of some rows: highest score, sum of numerators, weighted sum of products."""

    highest: Float[Array, 'b h t']
    total: Float[Array, 'b h t']
    read: Float[Array, 'b h t v']


class _Seen(NamedTuple):
    """Visibility of the first and of the second keys of a tile."""

    first: Bool[Array, 'b t j']
    second: Bool[Array, 'b t s']


def _scores(rule: _Rule, tile: _Tile, seen: _Seen) -> Float[Array, 'b h t j s']:
    pairs = tile.q[:, :, :, None] * tile.k1[:, :, None]
    scores = rule.scale * jnp.einsum('bhtjk,bhsk->bhtjs', pairs, tile.k2)
    return jnp.where((seen.first[..., None] & seen.second[:, :, None])[:, None], scores, -jnp.inf)


def _weigh(weights: Float[Array, 'b h t j s'], tile: _Tile) -> Float[Array, 'b h t v']:
    return jnp.sum(jnp.einsum('bhtjs,bhsv->bhtjv', weights, tile.v2) * tile.v1[:, :, None], axis=3)


def _add(rule: _Rule, rows: _PartialRows, tile: _Tile, seen: _Seen) -> _PartialRows:
    scores = _scores(rule, tile, seen)
    highest = jnp.maximum(rows.highest, jnp.max(scores, axis=(3, 4)))
    pivot = jnp.where(jnp.isneginf(highest), 0.0, highest)
    faded = jnp.exp(rows.highest - pivot)
    numerators = jnp.exp(scores - pivot[..., None, None])
    return _PartialRows(
        highest,
        rows.total * faded + jnp.sum(numerators, axis=(3, 4)),
        rows.read * faded[..., None] + _weigh(numerators, tile),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(rule: _Rule, operands: Operands, queries: Placed, keys: Placed) -> Float[Array, 'b h t v']:
    return _forward(rule, operands, queries, keys)[0]


def _forward(
    rule: _Rule, operands: Operands, queries: Placed, keys: Placed
) -> tuple[Array, tuple[Operands, Placed, Placed, Array, Array]]:
    cut = _cut(operands, queries, keys)

    def rows_of(step: tuple[Array, Placed]) -> tuple[Array, Array]:
        q, placed = step
        empty = jnp.full(q.shape[:-1], -jnp.inf, q.dtype)
        rows = _PartialRows(empty, jnp.zeros_like(empty), jnp.zeros((*q.shape[:-1], cut.v1.shape[-1]), q.dtype))

        def add(rows: _PartialRows, j: Array, s: Array, seen: _Seen) -> _PartialRows:
            return _add(rule, rows, cut.tile(q, j, s), seen)

        rows = cut.sweep(rule, placed, add, rows)
        total = jnp.where(rows.total > 0, rows.total, 1.0)
        # Rows without pairs have a log-sum of plus infinity, which makes all their weights zero in the backward pass.
        log_sum = jnp.where(rows.total > 0, rows.highest + jnp.log(total), jnp.inf)
        return rows.read / total[..., None], log_sum

    output, log_sum = jax.lax.map(rows_of, (cut.q, cut.queries))
    output, log_sum = (_joined(x, operands.q.shape[2]) for x in (output, log_sum))
    return output, (operands, queries, keys, output, log_sum)


def _backward(
    rule: _Rule, kept: tuple[Operands, Placed, Placed, Array, Array], doutput: Array
) -> tuple[Operands, None, None]:
    operands, queries, keys, output, log_sum = kept
    cut = _cut(operands, queries, keys)
    size = cut.q.shape[3]
    delta = _pieces(jnp.sum(doutput * output, axis=-1), size)
    log_sum = _pieces(log_sum, size)
    zeros = [jnp.zeros_like(x) for x in (cut.k1, cut.k2, cut.v1, cut.v2)]

    def gradients_of(sums: list[Array], step: tuple[Array, Placed, Array, Array, Array]) -> tuple[list[Array], Array]:
        q, placed, doutput, delta, log_sum = step

        def add(sums: list[Array], j: Array, s: Array, seen: _Seen) -> list[Array]:
            def loss(tile: _Tile) -> Array:
                # The gradient for a score is that of the softmax, `p (do . v1 v2 - delta)`; for values, that of the
                # weighted sum.
                weights = jnp.exp(_scores(rule, tile, seen) - log_sum[..., None, None])
                return jnp.sum(doutput * _weigh(weights, tile)) - jnp.sum(delta * jnp.sum(weights, axis=(3, 4)))

            dq, dk1, dk2, dv1, dv2 = jax.grad(loss)(cut.tile(q, j, s))
            found = ((j, dk1), (s, dk2), (j, dv1), (s, dv2))
            return [sums[0] + dq, *(x.at[at].add(dx) for x, (at, dx) in zip(sums[1:], found, strict=True))]

        dq, *sums = cut.sweep(rule, placed, add, [jnp.zeros_like(q), *sums])
        return sums, dq

    steps = (cut.q, cut.queries, _pieces(doutput, size), delta, log_sum)
    sums, dq = jax.lax.scan(gradients_of, zeros, steps)
    dq, *others = (_joined(x, n.shape[2]) for x, n in zip([dq, *sums], operands, strict=True))
    return Operands(dq, *others), None, None


_attend.defvjp(_forward, _backward)


class _Cut(NamedTuple):
    """Operands cut into tiles along time: tiles first, then heads before time."""

    q: Float[Array, 'i b h t k']
    k1: Float[Array, 'j b h c k']
    k2: Float[Array, 'l b h s k']
    v1: Float[Array, 'j b h c v']
    v2: Float[Array, 'l b h s v']
    queries: Placed
    firsts: Placed
    seconds: Placed

    def tile(self, q: Array, j: Array, s: Array) -> _Tile:
        return _Tile(q, self.k1[j], self.k2[s], self.v1[j], self.v2[s])

    def sweep[C](self, rule: _Rule, queries: Placed, add: Callable[[C, Array, Array, _Seen], C], carry: C) -> C:
        """Runs `carry = add(carry, j, s, seen)` over all tiles with a visible pair."""

        def first(j: Array, carry: C) -> C:
            seen_first = rule.reach.visible(queries, jax.tree.map(lambda x: x[j], self.firsts))

            def second(s: Array, carry: C) -> C:
                seen_second = rule.reach.visible(queries, jax.tree.map(lambda x: x[s], self.seconds))
                seen = _Seen(seen_first, seen_second)
                return jax.lax.cond(jnp.any(seen_second), lambda c: add(c, j, s, seen), lambda c: c, carry)

            def swept(carry: C) -> C:
                return jax.lax.fori_loop(0, self.k2.shape[0], second, carry)

            return jax.lax.cond(jnp.any(seen_first), swept, lambda c: c, carry)

        return jax.lax.fori_loop(0, self.k1.shape[0], first, carry)


def _cut(operands: Operands, queries: Placed, keys: Placed) -> _Cut:
    t, s = operands.q.shape[2], operands.k1.shape[2]
    rows, first, second = min(TILE[0], t), min(TILE[1], s), min(TILE[2], s)
    k1, k2, v1, v2 = (_pieces(x, size) for x, size in zip(operands[1:], (first, second, first, second), strict=True))
    return _Cut(
        _pieces(operands.q, rows),
        k1,
        k2,
        v1,
        v2,
        queries=_placed_pieces(queries, rows),
        firsts=_placed_pieces(keys, first),
        seconds=_placed_pieces(keys, second),
    )


def _pieces(x: Float[Array, 'b h t ...'], size: int) -> Float[Array, 'i b h c ...']:
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % size)) + ((0, 0),) * (x.ndim - 3))
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1, size, *x.shape[3:]), 2, 0)


def _placed_pieces(placed: Placed, size: int) -> Placed:
    more = -placed.places.shape[0] % size
    places = jnp.pad(placed.places, (0, more), constant_values=-1).reshape(-1, size)
    segments = jnp.pad(placed.segments, ((0, 0), (0, more)))
    return Placed(places, jnp.moveaxis(segments.reshape(segments.shape[0], -1, size), 1, 0))


def _joined(x: Float[Array, 'i b h c ...'], length: int) -> Float[Array, 'b h t ...']:
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :length]


def monomials(channels: int, degree: int) -> tuple[tuple[tuple[int, ...], ...], Float[np.ndarray, 'm']]:
    """Returns the monomials of up to `degree` in `channels` variables, as indices of their factors, and `1 / a!`.

    `a` are a monomial's exponents: the Taylor polynomial of `exp(sum_c x_c)` is the sum of `x^a / a!` over them.
    """
    factors = [each for p in range(degree + 1) for each in itertools.combinations_with_replacement(range(channels), p)]
    coefficients = [1 / math.prod(math.factorial(each.count(c)) for c in set(each)) for each in factors]
    return tuple(factors), np.asarray(coefficients)


def powers(x: Float[Array, '*b k'], degree: int) -> Float[Array, '*b m']:
    """Returns the value of every monomial of up to `degree` of the last axis, in the order of `monomials`."""
    factors, _ = monomials(x.shape[-1], degree)
    padded = jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)  # a factor of 1 pads monomials of lower degree
    places = np.asarray([(*each, *(x.shape[-1],) * (degree - len(each))) for each in factors])
    return jnp.prod(taken(padded, places, -1), axis=-1)


class PairSums(NamedTuple):
    """Running sums over the tokens of a document, of monomials of either key times its values, and the document.

    Values have an additional column of ones, whose sums give the denominator.
    """

    first: Float[Array, 'b h m v']
    second: Float[Array, 'b h m v']
    segment: Int[Array, ' b']


def taylor_attention(
    operands: Operands, segments: Segments, sums: PairSums, *, scale: float, degree: int
) -> tuple[Float[Array, 'b t h v'], PairSums]:
    """Returns causal `third_order_attention` with the exponential replaced by its Taylor polynomial of `degree`.

    `exp(s) ~ sum_a q^a k1^a k2^a / a!` over monomials `a` of up to `degree`, so that the sum over pairs is
    `sum_a q^a / a! (sum_j k1_j^a v1_j) * (sum_k k2_k^a v2_k)`, linear in the length. With `|s| <= B` a weight is off by
    at most `e^B B^(degree + 1) / (degree + 1)!` of itself, before they are divided by their sum; an even degree keeps
    them positive. Alman and Song 2024, https://arxiv.org/abs/2310.04064.
    """
    batch, length = segments.shape
    dtype = sums.first.dtype
    size = min(CHUNK, length)
    together = min(CHUNKS, -(-length // size))
    more = -length % (size * together)
    _, coefficients = monomials(operands.q.shape[-1], degree)
    wide = Operands(*(x.astype(dtype) for x in operands))
    ones = jnp.ones_like(wide.v1[..., :1])
    v1, v2 = (jnp.concatenate([v, ones], axis=-1) for v in (wide.v1, wide.v2))

    def chunks(x: Shaped[Array, 'b t ...']) -> Shaped[Array, 'l i b c ...']:
        return jnp.moveaxis(x.reshape(batch, -1, together, size, *x.shape[2:]), 0, 2)

    streams = [
        chunks(jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))) for x in (scale * wide.q, wide.k1, wide.k2, v1, v2)
    ]
    chunked = chunks(jnp.pad(segments, ((0, 0), (0, more)), mode='edge'))

    @jax.checkpoint
    def chunk(sums: PairSums, step: tuple[Array, ...]) -> tuple[PairSums, Array]:
        q, k1, k2, v1, v2, segments = step
        same = segments[:, :, None] == segments[:, None, :]
        past = (same & jnp.tril(jnp.ones((size, size), bool))[None]).astype(dtype)
        going_on = (segments == sums.segment[:, None]).astype(dtype)
        reads, after = [], []
        for total, k, v in ((sums.first, k1, v1), (sums.second, k2, v2)):
            written = powers(k, degree)
            here = jnp.einsum('bts,bshm,bshv->bthmv', past, written, v)
            reads.append(here + going_on[:, :, None, None, None] * total[:, None])
            kept = carried(total, segments[:, -1:], sums.segment)
            after.append(kept + jnp.einsum('bs,bshm,bshv->bhmv', past[:, -1], written, v))
        weights = powers(q, degree) * jnp.asarray(coefficients, dtype)[None, None, None]
        read = jnp.einsum('bthm,bthmv->bthv', weights, reads[0] * reads[1])
        return PairSums(after[0], after[1], segments[:, -1]), read

    @jax.checkpoint
    def several(sums: PairSums, steps: tuple[Array, ...]) -> tuple[PairSums, Array]:
        return jax.lax.scan(chunk, sums, steps)

    sums, read = jax.lax.scan(several, sums, (*streams, chunked))
    read = jnp.moveaxis(read, 2, 0).reshape(batch, -1, *read.shape[4:])[:, :length]
    return (read[..., :-1] / read[..., -1:]).astype(operands.v1.dtype), sums
