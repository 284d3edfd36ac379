"""One chunk in a Pallas kernel with a decay for every key channel; its scores where decays are moderate, as most are.

A query reads a key through `sum_k q_tk k_sk exp(G_tk - G_sk)`, G the log decays summed. With H half of what is summed
over the chunk, `q exp(G - H)` and `k exp(H - G)` are within range, and their product has all scores at once.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.linear_attention.mosaic_tpu.chunk import Chunk, Decays, Pulled, dot, iotas, of_run, visible
from pallas_kernels.matrix_state.chunks import MODERATE
from pallas_kernels.matrix_state.decays import FACTOR, KEPT, REACH, WRITE
from pallas_kernels.matrix_state.products import Form, added_up


def choose[T](chunk: Chunk, run: Callable[[T], None], at_once: T, any_strength: T) -> None:
    """Runs with one of two ways for the chunk of all heads of a program, heads first."""
    assert chunk.log_decay is not None
    is_moderate = jnp.min(jnp.sum(chunk.log_decay, axis=1)) >= -2 * MODERATE
    jax.lax.cond(is_moderate, lambda: run(at_once), lambda: run(any_strength))


def decays(chunk: Chunk) -> Decays:
    at, read = _iotas(chunk)
    # Within runs, so that not even rounding passes from one document to another.
    since = _added_up(chunk, of_run(chunk, at >= read), chunk.log_decay)
    until = _added_up(chunk, of_run(chunk, at < read), chunk.log_decay)
    return Decays(
        reach=jnp.exp(since) * chunk.columns[:, REACH : REACH + 1],
        write=jnp.exp(until) * chunk.columns[:, WRITE : WRITE + 1],
        factor=jnp.exp(since[-1:]) * chunk.rows[FACTOR : FACTOR + 1, :1],
        since=since,
    )


def scores(chunk: Chunk, decays: Decays) -> jax.Array:
    """`c c`, decayed."""
    decay, growth = _scales(decays)
    queries, keys = ((array * scale).astype(chunk.q.dtype) for array, scale in ((chunk.q, decay), (chunk.k, growth)))
    return jnp.where(visible(chunk), dot(queries, keys, 'nt'), 0)


def pull(chunk: Chunk, decays: Decays, dscores: jax.Array) -> tuple[jax.Array, Pulled]:
    """The scores, and the gradients through them.

    The decay of step t is in every score of a query at or after t and a key before t, so that its gradient is the sum
    of `q dq - k dk` from t on; a query's own key cancels and is left out.
    """
    dtype = chunk.q.dtype
    at, read = _iotas(chunk)
    decay, growth = _scales(decays)
    queries, keys = ((array * scale).astype(dtype) for array, scale in ((chunk.q, decay), (chunk.k, growth)))
    own = jnp.sum(jnp.where(at == read, dscores, 0), axis=1, keepdims=True)
    others = jnp.where(of_run(chunk, at > read), dscores, 0).astype(dtype)
    dq, dk = decay * dot(others, keys), growth * dot(others, queries, 'tn')
    moved = _added_up(chunk, of_run(chunk, at <= read), chunk.q * dq - chunk.k * dk)
    dlog_decay = moved * chunk.columns[:, KEPT : KEPT + 1]
    total = jnp.where(visible(chunk), dot(queries, keys, 'nt'), 0)
    return total, Pulled(dq + own * chunk.k, dk + own * chunk.q, dlog_decay)


def pull_decays(chunk: Chunk, reads: jax.Array, writes: jax.Array, kept: jax.Array) -> jax.Array:
    """The gradients of decays from `q dq` and `k dk`, `c k`, the states before and after, and their product, `1 k`."""
    at, read = _iotas(chunk)
    return _added_up(chunk, at <= read, reads) + _added_up(chunk, at > read, writes) + kept


def _iotas(chunk: Chunk) -> tuple[jax.Array, jax.Array]:
    return iotas((chunk.rows.shape[1],) * 2)


def _added_up(chunk: Chunk, pairs: jax.Array, array: jax.Array | None) -> jax.Array:
    """The sums of numbers of steps, `c k`, over pairs of a step and those that it sums, `c c`."""
    assert array is not None
    return added_up(pairs.astype(jnp.float32), array, Form(chunk.q.dtype, jnp.float32))


def _scales(decays: Decays) -> tuple[jax.Array, jax.Array]:
    """Decays from the middle to each step, and back."""
    assert decays.since is not None
    half = jnp.min(decays.since, axis=0, keepdims=True) / 2
    return jnp.exp(decays.since - half), jnp.exp(half - decays.since)
