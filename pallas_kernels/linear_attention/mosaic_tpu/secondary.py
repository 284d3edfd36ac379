"""The scores of one chunk in a Pallas kernel with decays of key channels of any strength: secondary chunking.

Scores between sub-blocks are products, with decays up to the start of the query's sub-block; those within a sub-block
are summed directly. No exponent is above 0 (Yang et al., 2024, arXiv 2312.06635).
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tiling
from pallas_kernels.linear_attention.mosaic_tpu.chunk import Chunk, Decays, Pulled, dot, iotas, of_run, visible
from pallas_kernels.matrix_state.decays import KEPT

SUBBLOCK = tiling.SUBBLOCK


class Within(NamedTuple):
    """Log decays `n r k` of the sub-blocks of a chunk, summed; every sum is of numbers at most 0.

    Attributes:
      since: from the start of the sub-block up to a step.
      until: from the step after it to the end of the sub-block.
      total: over the sub-block, `n 1 k`.
    """

    since: jax.Array
    until: jax.Array
    total: jax.Array


def scores(chunk: Chunk, decays: Decays) -> jax.Array:
    """`c c`, decayed."""
    del decays
    within = _within(chunk)
    queries, (_, read) = _queries(chunk, within), iotas((chunk.rows.shape[1],) * 2)
    scores = _stack([dot(query, keys, 'nt') for query, (keys, _) in zip(queries, _keys(chunk, within), strict=True)])
    q, k = _split(chunk.q.astype(jnp.float32)), _split(chunk.k.astype(jnp.float32))
    for key, decay in _from_each(chunk):
        score = jnp.sum(q * k[:, key : key + 1] * jnp.exp(decay), axis=2, keepdims=True)
        scores = jnp.where(read == _own(read.shape, key), score.reshape(-1, 1), scores)
    return jnp.where(visible(chunk), scores, 0)


def pull(chunk: Chunk, decays: Decays, dscores: jax.Array) -> tuple[jax.Array, Pulled]:
    """The scores, and the gradients through them.

    The decay of step t is in every score of a query at or after t and a key before t, so that its gradient is the sum
    of `q dq - k dk` from t on; a query's own key cancels and is left out.
    """
    del decays
    c, dtype = chunk.rows.shape[1], chunk.q.dtype
    within = _within(chunk)
    at, read = iotas((c, c))
    dscores = jnp.where(visible(chunk), dscores, 0)
    own = jnp.sum(jnp.where(at == read, dscores, 0), axis=1, keepdims=True)
    dscores = jnp.where(at > read, dscores, 0)
    q, k = _split(chunk.q.astype(jnp.float32)), _split(chunk.k.astype(jnp.float32))

    dqueries, dk, scores = [], jnp.zeros(chunk.k.shape, jnp.float32), []
    blocks = zip(_queries(chunk, within), _keys(chunk, within), _rows_of(dscores), strict=True)
    for query, (keys, scales), drows in blocks:
        dqueries.append(dot(drows.astype(dtype), keys))
        dk += dot(drows.astype(dtype), query, 'tn') * scales
        scores.append(dot(query, keys, 'nt'))
    dq = _split(_stack(dqueries)) * jnp.exp(within.since)
    total = _stack(scores)

    dk = _split(dk)
    _, place, _ = (jax.lax.broadcasted_iota(jnp.int32, q.shape, axis) for axis in range(3))
    for key, decay in _from_each(chunk):
        here = read == _own((c, c), key)
        decayed = k[:, key : key + 1] * jnp.exp(decay)
        score = jnp.sum(q * decayed, axis=2, keepdims=True)
        total = jnp.where(here, score.reshape(-1, 1), total)
        dscore = _split(jnp.sum(jnp.where(here, dscores, 0), axis=1, keepdims=True))
        dq += dscore * decayed
        dkey = jnp.sum(dscore * q * jnp.exp(decay), axis=1, keepdims=True)
        dk += jnp.where(place == key, dkey, 0)
    dq, dk, q, k = (array.reshape(c, -1) for array in (dq, dk, q, k))
    later = of_run(chunk, at <= read).astype(jnp.float32)
    dlog_decay = dot(later, q * dq - k * dk) * chunk.columns[:, KEPT : KEPT + 1]
    return jnp.where(visible(chunk), total, 0), Pulled(dq + own * k, dk + own * q, dlog_decay)


def _split(array: jax.Array) -> jax.Array:
    """`c k` as sub-blocks `n r k`."""
    return array.reshape(-1, SUBBLOCK, array.shape[1])


def _rows_of(array: jax.Array) -> list[jax.Array]:
    """The rows of each sub-block."""
    return [array[start : start + SUBBLOCK] for start in range(0, array.shape[0], SUBBLOCK)]


def _stack(arrays: list[jax.Array]) -> jax.Array:
    return jnp.concatenate(arrays, axis=0)


def _own(shape: tuple[int, ...], key: int) -> jax.Array:
    """For every step the one that is `key` in its sub-block."""
    at, _ = iotas(shape)
    return at - jax.lax.rem(at, SUBBLOCK) + key


def _log_decay(chunk: Chunk) -> jax.Array:
    assert chunk.log_decay is not None
    return _split(chunk.log_decay)


def _within(chunk: Chunk) -> Within:
    decay = _log_decay(chunk)
    place = jax.lax.broadcasted_iota(jnp.int32, decay.shape, 1)
    since, until = jnp.zeros_like(decay), jnp.zeros_like(decay)
    for step in range(SUBBLOCK):
        row = decay[:, step : step + 1]
        since += jnp.where(place >= step, row, 0)
        until += jnp.where(place < step, row, 0)
    return Within(since, until, since[:, SUBBLOCK - 1 :])


def _queries(chunk: Chunk, within: Within) -> list[jax.Array]:
    """The queries of each sub-block, `r k`, with decays from its start."""
    decayed = _split(chunk.q.astype(jnp.float32)) * jnp.exp(within.since)
    return _rows_of(decayed.reshape(chunk.q.shape).astype(chunk.q.dtype))


def _keys(chunk: Chunk, within: Within) -> list[tuple[jax.Array, jax.Array]]:
    """For each sub-block the keys of those before it, `c k`, with decays up to its start, and these decays."""
    found = []
    block = jax.lax.broadcasted_iota(jnp.int32, within.since.shape, 0)
    between = jnp.zeros_like(within.total)
    for reader in range(within.total.shape[0]):
        decays = jnp.where(block < reader, jnp.exp(within.until + between), 0).reshape(chunk.k.shape)
        found.append(((chunk.k.astype(jnp.float32) * decays).astype(chunk.k.dtype), decays))
        blocks = jax.lax.broadcasted_iota(jnp.int32, between.shape, 0)
        between += jnp.where(blocks < reader, within.total[reader : reader + 1], 0)
    return found


def _from_each(chunk: Chunk) -> Iterator[tuple[int, jax.Array]]:
    """For each step of sub-blocks, from the last, the log decays from there to the later ones, `n r k`."""
    decay = _log_decay(chunk)
    place = jax.lax.broadcasted_iota(jnp.int32, decay.shape, 1)
    between = jnp.zeros_like(decay)
    for key in range(SUBBLOCK - 1, -1, -1):
        yield key, between
        between += jnp.where(place >= key, decay[:, key : key + 1], 0)
