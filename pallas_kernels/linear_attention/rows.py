"""Chunks of a memory that is read from its other side: of each row, whose decays are its own, its product with a query.

With G the decays summed, row i is read at step t as `sum_s exp(G_ti - G_si) k_si (v_s . q_t)`: products of queries and
values are those of all rows, so that around the middle of the chunk this is one product of them and
`k exp(G_middle - G)`, times `exp(G - G_middle)`, as long as neither overflows. Else it is summed directly, every
exponent at most 0.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.linear_attention.vector import Reads, from_middle, is_moderate, pull, spread_heads, writes
from pallas_kernels.matrix_state.chunks import (
    Chunks,
    between,
    by_decay,
    keep,
    remembers,
    since,
    visible,
)

__all__ = ['outputs', 'writes']

Saved = tuple[Reads, jax.Array, jax.Array | None, jax.Array]
"""The inputs of reads, the log decays `b l h c k`, the runs, and what is read."""


def outputs(chunks: Chunks, state: jax.Array) -> jax.Array:
    """What each step reads of every row, `b l h c k`, of its own chunk and the state before it, `b l h k v`."""
    q, k, v, log_decay = spread_heads(chunks)
    return _read(Reads(q, k, v, state), log_decay, chunks.runs)


@jax.custom_vjp
def _read(reads: Reads, log_decay: jax.Array, runs: jax.Array | None) -> jax.Array:
    return by_decay(_moderate, _read_moderate, _read_any, (reads, log_decay, runs), rows=0)


def _save(reads: Reads, log_decay: jax.Array, runs: jax.Array | None) -> tuple[jax.Array, Saved]:
    o = _read(reads, log_decay, runs)
    return o, (reads, log_decay, runs, o)


def _pull(saved: Saved, doutput: jax.Array) -> tuple[Reads, jax.Array, None]:
    """Decays are treated as constants, since their gradients follow from the others.

    A decay of step t scales what is read of its row at or after t of what was written, or remembered, before t. So its
    gradient is the sum, over the steps from t on, of `o do - k dk`.
    """
    reads, log_decay, runs, o = saved
    arguments = reads, log_decay, runs, doutput
    dreads = by_decay(_moderate, pull(_read_moderate), pull(_read_any), arguments, rows=0)
    later = visible(runs, log_decay).astype(log_decay.dtype).swapaxes(-1, -2)
    return dreads, jnp.matmul(later, o * doutput - reads.k * dreads.k, precision='highest'), None


_read.defvjp(_save, _pull)


def _moderate(reads: Reads, log_decay: jax.Array, *others: jax.Array | None) -> jax.Array:
    del reads, others
    return is_moderate(log_decay)


def _seen(reads: Reads, runs: jax.Array | None) -> jax.Array:
    """The products of queries and values that they see, `b l h t s`."""
    return keep(visible(runs, reads.q), jnp.einsum('blhtv,blhsv->blhts', reads.q, reads.v))


def _read_moderate(reads: Reads, log_decay: jax.Array, runs: jax.Array | None) -> jax.Array:
    """One product around the middle of the chunk."""
    decay, middle = from_middle(log_decay)
    within = jnp.einsum('blhts,blhsk->blhtk', _seen(reads, runs), reads.k * jnp.exp(-decay))
    before = jnp.exp(middle) * jnp.einsum('blhtv,blhkv->blhtk', reads.q, reads.state)
    return jnp.exp(decay) * (within + keep(remembers(runs), before))


def _read_any(reads: Reads, log_decay: jax.Array, runs: jax.Array | None) -> jax.Array:
    """The direct sum, chunk by chunk, since it has size `c c k`."""

    def read(chunk: tuple[Reads, jax.Array, jax.Array | None]) -> jax.Array:
        reads, log_decay, runs = chunk
        decay = jnp.exp(jnp.where(visible(runs, log_decay)[..., None], between(log_decay), -jnp.inf))
        within = jnp.einsum('blhts,blhtsk,blhsk->blhtk', _seen(reads, runs), decay, reads.k)
        before = jnp.einsum('blhtv,blhkv->blhtk', reads.q, reads.state)
        return within + keep(remembers(runs), jnp.exp(since(log_decay))) * before

    chunks = jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0)[:, :, None], (reads, log_decay, runs))
    outputs = jax.lax.map(jax.checkpoint(read, prevent_cse=False), chunks)
    return jnp.moveaxis(outputs[:, :, 0], 0, 1)
