"""The portable form of `linear_attention`: groups of chunks in order, all matrix products of a group at once."""

from typing import Protocol

import jax
import jax.numpy as jnp

from pallas_kernels import target, tiling
from pallas_kernels.linear_attention import rows, scalar, vector
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
    b, t = q.shape[:2]
    if t == 0:
        return jnp.zeros((b, 0, state.shape[1], v.shape[3]), state.dtype), state
    if t == 1:
        return _step('bhk,bhkv->bhv', q, k, v, log_decay, state, starts, scale)
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
    b, t = q.shape[:2]
    if t == 0:
        return jnp.zeros((b, 0, *state.shape[1:3]), state.dtype), state
    if t == 1:
        return _step('bhv,bhkv->bhk', q, k, v, log_decay, state, starts, scale)
    return _by_chunks(rows, q, k, v, log_decay, state, starts, scale, is_vector=True)


def _step(
    read: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None,
    state: jax.Array,
    starts: jax.Array | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """A step alone, which reads the state twice and writes it once."""
    heads = state.shape[1]
    q, k, v = (jnp.repeat(array[:, 0].astype(state.dtype), heads // array.shape[2], axis=1) for array in (q, k, v))
    decay = jnp.ones((1, 1, 1), state.dtype) if log_decay is None else jnp.exp(log_decay[:, 0])
    if starts is not None:
        decay = jnp.where(starts[:, :1, None], 0, decay)
    # The barrier keeps what vectors are made from out of the loop over the state, which would make them for every row.
    q, k, v, decay = jax.lax.optimization_barrier((q, k, v, decay))
    final = decay[..., None] * state + k[..., None] * v[:, :, None]
    return scale * jnp.einsum(read, q, final)[:, None], final


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
