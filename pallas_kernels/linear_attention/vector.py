"""Chunks of `linear_attention` with a decay of its own for every key channel.

With G the decays summed, `exp(G_t - G_s)` does not split into a factor of the query and one of the key: either may
overflow. It does around a step r between the two, `exp(G_t - G_r) exp(G_r - G_s)`, both at most 1. So neighbours are
joined two by two until they fill the chunk, and every pair of steps meets where two neighbours join (compare the
secondary chunking of Yang et al., 2024, arXiv 2312.06635). A chunk whose decays are moderate takes one product around
its middle instead.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import precision
from pallas_kernels.linear_attention.chunks import Chunks, keep, remembered, remembers, since, until, visible

MODERATE = 40.0
"""How much may decay from the middle of a chunk to its ends for one product to serve.

`exp(2 * 40)`, the largest number there is then, is far from overflow.
"""


class Reads(NamedTuple):
    """What is read, with all heads: q, k `b l h c k`, v `b l h c v`, the state before each chunk `b l h k v`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    state: jax.Array


Saved = tuple[Reads, jax.Array, jax.Array | None]
"""What is read, the log decays `b l h c k`, and the runs."""


def writes(chunks: Chunks) -> tuple[jax.Array, jax.Array]:
    """What each chunk adds to the state, `b l h k v`, and the factor that the state before it keeps, `b l h k 1`."""
    _, k, v, log_decay = _spread(chunks)
    weights = keep(remembered(chunks.runs), jnp.exp(until(log_decay)))
    factor = jnp.exp(jnp.sum(log_decay, axis=3))[..., None]
    if chunks.runs is not None:
        factor = keep(chunks.runs[..., -1:, :] == 0, factor)
    return jnp.einsum('blhsk,blhsv->blhkv', weights * k, v), factor


def outputs(chunks: Chunks, state: jax.Array) -> jax.Array:
    """What each step reads, `b l h c v`, of its own chunk and of the state before it, `b l h k v`."""
    q, k, v, log_decay = _spread(chunks)
    return _read(Reads(q, k, v, state), log_decay, chunks.runs)


def _spread(chunks: Chunks) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """q, k, v and the log decays with all heads, in the type they are computed in."""
    assert chunks.log_decay is not None
    h = max(array.shape[2] for array in (chunks.q, chunks.k, chunks.v))
    dtype = precision.accumulator(chunks.q, chunks.k, chunks.v, chunks.log_decay)

    def spread(array: jax.Array) -> jax.Array:
        return jnp.repeat(array.astype(dtype), h // array.shape[2], axis=2)

    return spread(chunks.q), spread(chunks.k), spread(chunks.v), spread(chunks.log_decay)


@jax.custom_vjp
def _read(reads: Reads, log_decay: jax.Array, runs: jax.Array | None) -> jax.Array:
    return jax.lax.cond(_moderate(log_decay), _read_moderate, _read_any, reads, log_decay, runs)


def _save(reads: Reads, log_decay: jax.Array, runs: jax.Array | None) -> tuple[jax.Array, Saved]:
    return _read(reads, log_decay, runs), (reads, log_decay, runs)


def _pull(saved: Saved, doutput: jax.Array) -> tuple[Reads, jax.Array, None]:
    """The decays count as constants, for what they get follows from the rest.

    A decay of step t scales each product of a query at or after t and a key, or the state, before t. So its gradient is
    the sum, over the steps from t on, of `q dq - k dk`.
    """
    reads, log_decay, runs = saved

    def pull(read: Callable[..., jax.Array]) -> Callable[..., Reads]:
        def gradients(reads: Reads, log_decay: jax.Array, runs: jax.Array | None, doutput: jax.Array) -> Reads:
            return jax.vjp(lambda reads: read(reads, log_decay, runs), reads)[1](doutput)[0]

        return gradients

    dreads = jax.lax.cond(_moderate(log_decay), pull(_read_moderate), pull(_read_any), *saved, doutput)
    later = visible(runs, log_decay).astype(log_decay.dtype).swapaxes(-1, -2)
    scaled = reads.q * dreads.q - reads.k * dreads.k
    return dreads, jnp.matmul(later, scaled, precision='highest'), None


_read.defvjp(_save, _pull)


def _moderate(log_decay: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(_from_middle(log_decay)[0]), initial=0) <= MODERATE


def _from_middle(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The decays summed from the middle of the chunk to each step, `b l h c k`, and up to the middle, `b l h 1 k`."""
    total = since(log_decay)
    at = (log_decay.shape[3] - 1) // 2
    middle = total[:, :, :, at : at + 1]
    return total - middle, middle


def _read_moderate(reads: Reads, log_decay: jax.Array, runs: jax.Array | None) -> jax.Array:
    """One product around the middle of the chunk."""
    decay, middle = _from_middle(log_decay)
    queries, keys = reads.q * jnp.exp(decay), reads.k * jnp.exp(-decay)
    weights = keep(visible(runs, queries), jnp.einsum('blhtk,blhsk->blhts', queries, keys))
    state = jnp.exp(middle).swapaxes(3, 4) * reads.state
    within = jnp.einsum('blhts,blhsv->blhtv', weights, reads.v)
    return within + jnp.einsum('blhtk,blhkv->blhtv', keep(remembers(runs), queries), state)


def _read_any(reads: Reads, log_decay: jax.Array, runs: jax.Array | None) -> jax.Array:
    """The step itself, earlier steps by joining neighbours, and the state."""
    # Without the barrier the compiler prepares the operands of this branch even when the other one is taken.
    reads, log_decay, runs = jax.lax.optimization_barrier((reads, log_decay, runs))
    own = jnp.sum(reads.q * reads.k, axis=-1, keepdims=True) * reads.v
    reach = keep(remembers(runs), jnp.exp(since(log_decay)))
    before = jnp.einsum('blhtk,blhkv->blhtv', reach * reads.q, reads.state)
    return own + _read_joined(reads, log_decay, runs) + before


def _read_joined(reads: Reads, log_decay: jax.Array, runs: jax.Array | None) -> jax.Array:
    """What each step reads of earlier ones, blocks of one step and then of more joined until one is the chunk."""
    total, size = jnp.zeros_like(reads.v), 1
    # Decays summed from the beginning of its block up to a step, and after it up to the end of its block.
    before, after = log_decay, jnp.zeros_like(log_decay)
    while size < log_decay.shape[3]:
        (_, q), (k, _), (v, _) = (_neighbours(array, size) for array in reads[:3])
        (before_first, before_last), (after_first, after_last) = (_neighbours(array, size) for array in (before, after))
        weights = jnp.einsum('blhptk,blhpsk->blhpts', q * jnp.exp(before_last), k * jnp.exp(after_first))
        if runs is not None:
            first, last = _neighbours(runs, size)
            weights = keep(last == first.swapaxes(-1, -2), weights)
        read = jnp.einsum('blhpts,blhpsv->blhptv', weights, v)
        total += _joined(jnp.zeros_like(read), read)
        after = _joined(after_first + before_last[..., -1:, :], after_last)
        before = _joined(before_first, before_last + before_first[..., -1:, :])
        size *= 2
    return total


def _split(array: jax.Array, size: int) -> jax.Array:
    """`b l h c k` as `b l h p s k`, blocks of `size` steps."""
    *lead, c, k = array.shape
    return array.reshape(*lead, c // size, size, k)


def _flat(array: jax.Array) -> jax.Array:
    *lead, p, s, k = array.shape
    return array.reshape(*lead, p * s, k)


def _neighbours(array: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The first and the last block of each pair, `b l h p s k` both."""
    pairs = _split(array, 2 * size)
    return pairs[..., :size, :], pairs[..., size:, :]


def _joined(first: jax.Array, last: jax.Array) -> jax.Array:
    return _flat(jnp.concatenate([first, last], axis=-2))
