"""Chunks of `linear_attention` with a decay of its own for every key channel.

`exp(G_t - G_s)`, with G the decays summed, does not split into a factor of the query and one of the key: either may
overflow. It does around any step r between the two, `exp(G_t - G_r) exp(G_r - G_s)`, both at most 1. So a chunk is halved
again and again, and every pair of steps meets where its two halves do (compare the secondary chunking of Yang et al.,
2024, arXiv 2312.06635, which halves once).
"""

import jax
import jax.numpy as jnp

from pallas_kernels import precision
from pallas_kernels.linear_attention.chunks import Chunks, keep, remembered, remembers


def writes(chunks: Chunks) -> tuple[jax.Array, jax.Array]:
    """What each chunk adds to the state, `b l h k v`, and the factor that the state before it keeps, `b l h k 1`."""
    _, k, v, log_decay = _spread(chunks)
    later = jnp.pad(log_decay[:, :, :, 1:], ((0, 0),) * 3 + ((0, 1), (0, 0)))
    weights = keep(remembered(chunks), jnp.exp(jax.lax.cumsum(later, axis=3, reverse=True)))
    factor = jnp.exp(jnp.sum(log_decay, axis=3))[..., None]
    if chunks.runs is not None:
        factor = keep(chunks.runs[..., -1:, None] == 0, factor)
    return jnp.einsum('blhsk,blhsv->blhkv', weights * k, v), factor


def outputs(chunks: Chunks, state: jax.Array) -> jax.Array:
    """What each step reads, `b l h c v`, of its own chunk and of the state before it, `b l h k v`."""
    q, k, v, log_decay = _spread(chunks)
    total = jnp.sum(q * k, axis=-1, keepdims=True) * v
    since, until = log_decay, jnp.zeros_like(log_decay)
    size = 1
    while size < q.shape[3]:
        # `since` sums the decays from the beginning of a half up to a step, `until` those after it to the end of the half.
        halves = tuple(_halves(array, size) for array in (q, k, v, since, until))
        total += _join(_read_earlier_half(*halves, _halves_seen(chunks, size)))
        since, until = _merge(halves[3], halves[4])
        size *= 2
    reach = keep(remembers(chunks), jnp.exp(since))
    return total + jnp.einsum('blhtk,blhkv->blhtv', reach * q, state)


def _spread(chunks: Chunks) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """q, k, v and the log decays, every one with all heads."""
    arrays = (chunks.q, chunks.k, chunks.v, chunks.log_decay)
    dtype = precision.accumulator(*arrays)
    h = max(array.shape[2] for array in arrays)
    return tuple(jnp.repeat(array.astype(dtype), h // array.shape[2], axis=2) for array in arrays)


def _halves(array: jax.Array, size: int) -> jax.Array:
    """`b l h c k` as `b l h p 2 s k`, pairs of neighbouring halves of `size` steps."""
    b, l, h, c, k = array.shape
    return array.reshape(b, l, h, c // (2 * size), 2, size, k)


def _join(array: jax.Array) -> jax.Array:
    b, l, h, p, two, s, k = array.shape
    return array.reshape(b, l, h, p * two * s, k)


def _halves_seen(chunks: Chunks, size: int) -> jax.Array | None:
    """Which steps of the earlier half (last axis) the steps of the later one read, `b l 1 p s s`; `None`: all."""
    if chunks.runs is None:
        return None
    runs = _halves(chunks.runs[..., None], size)[..., 0]
    return runs[..., 1, :, None] == runs[..., 0, None, :]


def _read_earlier_half(
    q: jax.Array, k: jax.Array, v: jax.Array, since: jax.Array, until: jax.Array, seen: jax.Array | None
) -> jax.Array:
    """What the later halves read of the earlier ones, `b l h p 2 s v`."""
    queries = q[..., 1, :, :] * jnp.exp(since[..., 1, :, :])
    keys = k[..., 0, :, :] * jnp.exp(until[..., 0, :, :])
    weights = keep(seen, jnp.einsum('blhptk,blhpsk->blhpts', queries, keys))
    read = jnp.einsum('blhpts,blhpsv->blhptv', weights, v[..., 0, :, :])
    return jnp.stack([jnp.zeros_like(read), read], axis=4)


def _merge(since: jax.Array, until: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of two halves made those of their whole."""
    first, second = since[..., 0, :, :], since[..., 1, :, :]
    since = jnp.stack([first, second + first[..., -1:, :]], axis=4)
    until = jnp.stack([until[..., 0, :, :] + second[..., -1:, :], until[..., 1, :, :]], axis=4)
    return _join(since), _join(until)
