"""Chunks of `linear_attention` with a decay for every key channel.

With G the decays summed, a query t reads a key s through `sum_k q_tk k_sk exp(G_tk - G_sk)`. Around the middle of the
chunk this is one product of `q exp(G - G_middle)` and `k exp(G_middle - G)`, as long as neither overflows. Where decays
are too strong for that, chunks are read by blocks of a few steps.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import precision
from pallas_kernels.matrix_state.blocks import reads_by_blocks
from pallas_kernels.matrix_state.chunks import (
    MODERATE,
    Chunks,
    by_decay,
    keep,
    remembered,
    remembers,
    since,
    since_first,
    until,
    visible,
)


class Reads(NamedTuple):
    """The inputs of reads, with all heads: q, k `b l h c k`, v `b l h c v`, the state before each chunk `b l h k v`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    state: jax.Array


Saved = tuple[Reads, jax.Array, jax.Array | None]
"""The inputs of reads, the log decays `b l h c k`, and the runs."""


def writes(chunks: Chunks) -> tuple[jax.Array, jax.Array]:
    """The term each chunk adds to the state, `b l h k v`, and the decay of the previous state, `b l h k 1`."""
    _, k, v, log_decay = spread_heads(chunks)
    weights = keep(remembered(chunks.runs), jnp.exp(until(log_decay)))
    factor = jnp.exp(jnp.sum(log_decay, axis=3))[..., None]
    if chunks.runs is not None:
        factor = keep(chunks.runs[..., -1:, :] == 0, factor)
    return jnp.einsum('blhsk,blhsv->blhkv', weights * k, v), factor


def outputs(chunks: Chunks, state: jax.Array) -> jax.Array:
    """The output of each step, `b l h c v`, from its own chunk and from the state before it, `b l h k v`."""
    q, k, v, log_decay = spread_heads(chunks)
    return _read(Reads(q, k, v, state), log_decay, chunks.runs)


def spread_heads(chunks: Chunks) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """q, k, v and the log decays with all heads, in the type they are computed in."""
    assert chunks.log_decay is not None
    h = max(array.shape[2] for array in (chunks.q, chunks.k, chunks.v))
    dtype = precision.accumulator(chunks.q, chunks.k, chunks.v, chunks.log_decay)

    def spread(array: jax.Array) -> jax.Array:
        return jnp.repeat(array.astype(dtype), h // array.shape[2], axis=2)

    return spread(chunks.q), spread(chunks.k), spread(chunks.v), spread(chunks.log_decay)


@jax.custom_vjp
def _read(reads: Reads, log_decay: jax.Array, runs: jax.Array | None) -> jax.Array:
    return by_decay(_moderate, _read_moderate, _read_any, (reads, log_decay, runs), rows=0)


def _save(reads: Reads, log_decay: jax.Array, runs: jax.Array | None) -> tuple[jax.Array, Saved]:
    return _read(reads, log_decay, runs), (reads, log_decay, runs)


def _pull(saved: Saved, doutput: jax.Array) -> tuple[Reads, jax.Array, None]:
    """Decays are treated as constants, since their gradients follow from the others.

    A decay of step t scales each product of a query at or after t and a key, or the state, before t. So its gradient is
    the sum, over the steps from t on, of `q dq - k dk`.
    """
    reads, log_decay, runs = saved
    dreads = by_decay(_moderate, pull(_read_moderate), pull(_read_any), (*saved, doutput), rows=0)
    later = visible(runs, log_decay).astype(log_decay.dtype).swapaxes(-1, -2)
    scaled = reads.q * dreads.q - reads.k * dreads.k
    return dreads, jnp.matmul(later, scaled, precision='highest'), None


_read.defvjp(_save, _pull)


def pull(read: Callable[..., jax.Array]) -> Callable[..., Reads]:
    """The gradients of what is read by all but the decays, which are treated as constants."""

    def gradients(reads: Reads, log_decay: jax.Array, runs: jax.Array | None, doutput: jax.Array) -> Reads:
        return jax.vjp(lambda reads: read(reads, log_decay, runs), reads)[1](doutput)[0]

    return gradients


def _moderate(reads: Reads, log_decay: jax.Array, *others: jax.Array | None) -> jax.Array:
    del reads, others
    return is_moderate(log_decay)


def is_moderate(log_decay: jax.Array) -> jax.Array:
    """Whether numbers scaled around the middle of chunks overflow nowhere; sums of decays are largest at the ends."""
    decay, _ = from_middle(log_decay)
    return jnp.max(jnp.maximum(decay[:, :, :, 0], -decay[:, :, :, -1]), initial=0) <= MODERATE


def from_middle(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The decays summed from the middle of the chunk to each step, `b l h c k`, and up to the middle, `b l h 1 k`."""
    total = since_first(log_decay)
    at = (log_decay.shape[3] - 1) // 2
    middle = total[:, :, :, at : at + 1]
    return total - middle, log_decay[:, :, :, :1] + middle


def _read_moderate(reads: Reads, log_decay: jax.Array, runs: jax.Array | None) -> jax.Array:
    """One product around the middle of the chunk."""
    decay, middle = from_middle(log_decay)
    queries, keys = reads.q * jnp.exp(decay), reads.k * jnp.exp(-decay)
    weights = keep(visible(runs, queries), jnp.einsum('blhtk,blhsk->blhts', queries, keys))
    state = jnp.exp(middle).swapaxes(3, 4) * reads.state
    within = jnp.einsum('blhts,blhsv->blhtv', weights, reads.v)
    return within + jnp.einsum('blhtk,blhkv->blhtv', keep(remembers(runs), queries), state)


def _read_any(reads: Reads, log_decay: jax.Array, runs: jax.Array | None) -> jax.Array:
    """By blocks of a few steps, whatever the decays."""
    ((weights,),) = reads_by_blocks((reads.q,), (), (reads.k,), log_decay)
    within = jnp.einsum('blhts,blhsv->blhtv', keep(visible(runs, weights), weights), reads.v)
    reach = keep(remembers(runs), jnp.exp(since(log_decay)))
    return within + jnp.einsum('blhtk,blhkv->blhtv', reach * reads.q, reads.state)
