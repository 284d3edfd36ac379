"""The portable form of `linear_attention`: groups of chunks in order, all matrix products of a group at once."""

from typing import Protocol

import jax
import jax.numpy as jnp

from pallas_kernels import target, tiling
from pallas_kernels.linear_attention import reference, rows, scalar, vector
from pallas_kernels.linear_scan.xla import linear_scan
from pallas_kernels.matrix_state.chunks import Arrays, Chunks, cut, in_groups, join
from pallas_kernels.matrix_state.decays import clipped


class Form(Protocol):
    """How chunks are computed."""

    def writes(self, chunks: Chunks) -> tuple[jax.Array, jax.Array]:
        """What chunks add to the state, `b l h k v`, and the factors of what was there."""

    def outputs(self, chunks: Chunks, state: jax.Array) -> jax.Array:
        """What is read of them and of the states before them, `b l h c _`."""


def linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None,
    state: jax.Array,
    starts: jax.Array | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.linear_attention`; in the type of the state, and on queries that are scaled here."""
    (b, t), dtype = q.shape[:2], state.dtype
    if t == 0:
        return jnp.zeros((b, 0, state.shape[1], v.shape[3]), state.dtype), state
    if t == 1:
        # A step alone is its definition, which reads the state twice and writes it once. The barrier keeps what
        # vectors are made from out of the loop over the state, which would make them for every row.
        q, k, v = scale * q.astype(dtype), k.astype(dtype), v.astype(dtype)
        q, k, v, log_decay = jax.lax.optimization_barrier((q, k, v, log_decay))
        return reference.linear_attention(q, k, v, log_decay, state, starts)
    is_vector = log_decay is not None and log_decay.shape[3] > 1
    form: Form = vector if is_vector else scalar
    return _by_chunks(form, q, k, v, log_decay, state, starts, scale, is_vector=is_vector)


def linear_attention_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    state: jax.Array,
    starts: jax.Array | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.linear_attention_rows`; in the type of the state, and on queries that are scaled here."""
    (b, t), dtype = q.shape[:2], state.dtype
    if t == 0:
        return jnp.zeros((b, 0, *state.shape[1:3]), state.dtype), state
    if t == 1:
        q, k, v = scale * q.astype(dtype), k.astype(dtype), v.astype(dtype)
        q, k, v, log_decay = jax.lax.optimization_barrier((q, k, v, log_decay))
        return reference.linear_attention_rows(q, k, v, log_decay, state, starts)
    return _by_chunks(rows, q, k, v, log_decay, state, starts, scale, is_vector=True)


def _by_chunks(
    form: Form,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None,
    state: jax.Array,
    starts: jax.Array | None,
    scale: float,
    *,
    is_vector: bool,
) -> tuple[jax.Array, jax.Array]:
    (b, t), dtype = q.shape[:2], state.dtype
    _, h, *kv = state.shape
    tile = tiling.linear_attention(b, t, h * max(kv), target.current().platform, vector=is_vector)
    if log_decay is not None:
        log_decay = jnp.broadcast_to(log_decay, (log_decay.shape[0], t, *log_decay.shape[2:]))

    def group(state: jax.Array, arrays: Arrays, starts: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        q, k, v, log_decay = arrays
        # The barrier keeps the compiler from copying the array to another layout for every use.
        chunks = jax.lax.optimization_barrier(cut(q, k, v, clipped(log_decay, dtype), starts, tile.steps))
        # A group at a time, so that no whole array is made of scaled queries.
        q, k, v = (array.astype(dtype) for array in chunks[:3])
        chunks = chunks._replace(q=scale * q, k=k, v=v)
        written, factors = form.writes(chunks)
        after, final = linear_scan(written, factors, state, False)
        before = jnp.concatenate([state[:, None], after[:, :-1]], axis=1)
        return final, join(form.outputs(chunks, before))

    return in_groups(group, tile, state, (q, k, v, log_decay), starts)
