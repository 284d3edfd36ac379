"""One chunk in a Pallas kernel whose decay is one number a step, or none."""

import jax
import jax.numpy as jnp

from pallas_kernels.linear_attention.mosaic_tpu.chunk import Chunk, Decays, Pulled, dot, iotas, visible
from pallas_kernels.matrix_state.decays import COARSE, FACTOR, FINE, REACH, WRITE


def decays(chunk: Chunk) -> Decays:
    return Decays(
        reach=chunk.columns[:, REACH : REACH + 1],
        write=chunk.columns[:, WRITE : WRITE + 1],
        factor=chunk.rows[FACTOR : FACTOR + 1, :1],
    )


def _weights(chunk: Chunk) -> jax.Array:
    between = [chunk.columns[:, row : row + 1] - chunk.rows[row : row + 1] for row in (COARSE, FINE)]
    return jnp.exp(jnp.where(visible(chunk), between[0] + between[1], -jnp.inf))


def scores(chunk: Chunk, decays: Decays) -> jax.Array:
    """`c c`, decayed."""
    del decays
    return dot(chunk.q, chunk.k, 'nt') * _weights(chunk)


def pull(chunk: Chunk, decays: Decays, dscores: jax.Array) -> tuple[jax.Array, Pulled]:
    """The scores, and the gradients through them.

    The decay of step t is in every score of a query at or after t and a key before t.
    """
    del decays
    weights = _weights(chunk)
    scores = dot(chunk.q, chunk.k, 'nt') * weights
    weighted = (dscores * weights).astype(chunk.q.dtype)
    at, read = iotas(scores.shape)
    moved = jnp.where(at > read, scores * dscores, 0)
    before = (at < read).astype(chunk.q.dtype)
    crossing = dot(moved.astype(before.dtype), before)
    dlog_decay = jnp.sum(jnp.where(at >= read, crossing, 0), axis=0, keepdims=True)
    return scores, Pulled(dot(weighted, chunk.k), dot(weighted, chunk.q, 'tn'), dlog_decay)


def pull_decays(chunk: Chunk, reads: jax.Array, writes: jax.Array, kept: jax.Array) -> jax.Array:
    """The gradients of decays from `q dq` and `k dk`, `c k`, the states before and after, and their product, `1 k`."""
    at, read = iotas((chunk.rows.shape[1],) * 2)
    reads, writes, kept = (jnp.sum(array, axis=1, keepdims=True) for array in (reads, writes, kept))
    later, earlier = jnp.where(at >= read, reads, 0), jnp.where(at < read, writes, 0)
    return jnp.sum(later + earlier, axis=0, keepdims=True) + kept
