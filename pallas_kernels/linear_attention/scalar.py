"""Chunks of `linear_attention` whose decay is one number a head and step, or none.

Products of queries and keys do not depend on the decay, so that heads which share both share the products; decays
multiply the values and the outputs (Dao and Gu, 2024, arXiv 2405.21060).
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels import precision
from pallas_kernels.matrix_state.chunks import Chunks, between, keep, remembered, remembers, since, until, visible


def writes(chunks: Chunks) -> tuple[jax.Array, jax.Array]:
    """The term each chunk adds to the state, `b l h k v`, and the decay of the previous state, `b l h 1 1`."""
    _, k, v = _grouped(chunks)
    dtype = v.dtype
    if chunks.log_decay is None:
        weights, factor = jnp.ones((1,) * 5, dtype), jnp.ones((1,) * 5, dtype)
    else:
        log_decay = chunks.log_decay.astype(dtype)
        weights, factor = jnp.exp(until(log_decay)), jnp.exp(jnp.sum(log_decay, axis=3, keepdims=True))
    weights = keep(remembered(chunks.runs), weights)
    if chunks.runs is not None:
        factor = keep(chunks.runs[..., -1:, :] == 0, factor)
    written = jnp.einsum('blgsk,blgrsv->blgrkv', k, _by_group(weights, k.shape[2]) * v)
    b, l, g, r, *kv = written.shape
    return written.reshape(b, l, g * r, *kv), factor


def outputs(chunks: Chunks, state: jax.Array) -> jax.Array:
    """The output of each step, `b l h c v`, from its own chunk and from the state before it, `b l h k v`."""
    q, k, v = _grouped(chunks)
    g = q.shape[2]
    seen = visible(chunks.runs, q)
    reach = jnp.ones((1,) * 5, v.dtype)
    weights = jnp.where(seen, 1, 0).astype(v.dtype)
    if chunks.log_decay is not None:
        log_decay = chunks.log_decay.astype(v.dtype)
        own = chunks.runs is not None and log_decay.shape[0] == chunks.runs.shape[0]
        weights = jnp.exp(jnp.where(seen, _between(log_decay, chunks.runs if own else None), -jnp.inf))
        reach = jnp.exp(since(log_decay))
    reach = keep(remembers(chunks.runs), reach)
    products = jnp.einsum('blgtk,blgsk->blgts', q, k)[:, :, :, None] * _by_group(weights, g)
    inside = jnp.einsum('blgrts,blgrsv->blgrtv', products, v)
    b, l, h, *kv = state.shape
    before = jnp.einsum('blgtk,blgrkv->blgrtv', q, state.reshape(b, l, g, h // g, *kv))
    total = inside + _by_group(reach, g) * before
    return total.reshape(b, l, h, *total.shape[4:])


def _grouped(chunks: Chunks) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q and k, `b l g c k`, with as few heads as they can share, and v, `b l g r c v`."""
    dtype = precision.accumulator(chunks.q, chunks.k, chunks.v, chunks.log_decay)
    q, k, v = (array.astype(dtype) for array in (chunks.q, chunks.k, chunks.v))
    h = max(array.shape[2] for array in (q, k, v))
    g = math.lcm(q.shape[2], k.shape[2])
    q, k = (jnp.repeat(array, g // array.shape[2], axis=2) for array in (q, k))
    return q, k, _by_group(jnp.repeat(v, h // v.shape[2], axis=2), g)


def _by_group(array: jax.Array, g: int) -> jax.Array:
    """`b l h ...` as `b l g r ...`; a single head stays single."""
    b, l, h, *rest = array.shape
    return array.reshape(b, l, *((1, 1) if h == 1 else (g, h // g)), *rest)


@jax.custom_vjp
def _between(log_decay: jax.Array, runs: jax.Array | None) -> jax.Array:
    """The decays after step s up to step t, summed: `b l h t s` from `b l h t 1`."""
    return between(log_decay)[..., 0]


def _save_between(log_decay: jax.Array, runs: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    return _between(log_decay, runs), runs


def _pull_between(runs: jax.Array | None, dbetween: jax.Array) -> tuple[jax.Array, None]:
    """Sums within runs, so that not even rounding errors pass between documents."""
    dtotal = jnp.sum(dbetween, axis=-1)[..., None] - jnp.sum(dbetween, axis=-2)[..., None]
    later = visible(runs, dtotal).astype(dtotal.dtype).swapaxes(-1, -2)
    return jnp.matmul(later, dtotal, precision='highest'), None


_between.defvjp(_save_between, _pull_between)
