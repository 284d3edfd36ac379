"""The mathematics of chunks of `diagonal_low_rank`, for all chunks at once.

Of the state before it, step i reads for its `a` `y_i = (a_i exp(G_{i-1}))^T S + sum_{j<i} (A_ij y_j + B_ij v_j)`, with
S the state before the chunk, G the log decays summed, `A_ij = sum_k a_ik b_jk exp(G_{i-1,k} - G_jk)` and B the same
with `k` for `b`. So `Y = (I - A)^{-1} (B V + (a exp(G_before)) S)`; queries read `Q S + A' Y + B' V`, with weights that
count their own step too (Peng et al., 2025, arXiv 2503.14456). Where `b` is `k`, values and what is read are written
under the same keys, and there are half as many weights: with `R = V + Y`, `R = (I - A)^{-1} (V + (a exp(G_before)) S)`.

No exponent is above 0, but in products around the middle of what decays in a chunk, and there none above 40.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state import vector
from pallas_kernels.matrix_state.chunks import keep, remembered, remembers
from pallas_kernels.matrix_state.places import steps_after, steps_before
from pallas_kernels.matrix_state.products import EXACT


class Chunk(NamedTuple):
    """What the steps of chunks bring, chunks first.

    Attributes:
      q: scaled, `l b h c k`.
      a: `l b h c k`.
      keys: those under which steps write what they read for `a`, and those of their values, `l b h c k`; one where both
        are the same.
      log_decay: `l b h c k`, or `l b h c 1` for all key channels, or `None`; 0 where the past is forgotten.
      runs: how often the chunk has forgotten the past, up to each step, `l b 1 c 1`; or `None`.
    """

    q: jax.Array
    a: jax.Array
    keys: tuple[jax.Array, ...]
    log_decay: jax.Array | None
    runs: jax.Array | None


class Weights(NamedTuple):
    """What the steps of chunks do; lists have one entry for each of the keys.

    Attributes:
      among: what a step reads for its query of what a step writes under a key, `l b h c c`.
      earlier: what it reads for its `a` of what an earlier step writes, `l b h c c`.
      q: what the queries read of the state before the chunk, `l b h c k`.
      a: what each `a` reads of it, `l b h c k`.
      writes: the keys under which steps are in the state after the chunk, `l b h c k`.
      factor: what the state before the chunk counts in it, `l b h 1 k` or `... 1 1`.
    """

    among: list[jax.Array]
    earlier: list[jax.Array]
    q: jax.Array
    a: jax.Array
    writes: list[jax.Array]
    factor: jax.Array


def weights(chunk: Chunk, found: Callable[[Chunk], vector.Found] | None = None) -> Weights:
    """Returns the weights of chunks; their length is a power of two.

    `found` computes what steps, for their queries and for each `a`, read and write where nothing is forgotten; `None`:
    the portable form, of all chunks at once.
    """
    log_decay, runs = chunk.log_decay, chunk.runs
    seen, past = ~steps_after(chunk.q), steps_before(chunk.q)
    if runs is not None:
        here = runs == runs.swapaxes(-1, -2)
        seen, past = seen & here, past & here
    (by_q, by_a), (q, a), writes = (found or _portable)(chunk)
    factor = jnp.ones_like(q[..., :1, :1]) if log_decay is None else jnp.exp(jnp.sum(log_decay, -2, keepdims=True))
    return Weights(
        among=[jnp.where(seen, weight, 0) for weight in by_q],
        earlier=[jnp.where(past, weight, 0) for weight in by_a],
        q=keep(remembers(runs), q),
        a=keep(remembers(runs), a),
        writes=[keep(remembered(runs), key) for key in writes],
        factor=factor if runs is None else jnp.where(runs[..., -1:, :] == 0, factor, 0),
    )


def _portable(chunk: Chunk) -> vector.Found:
    q, a, keys, log_decay, runs = chunk
    if log_decay is None:
        return vector.Found(_plain(q, a, keys), (q, a), keys)
    if log_decay.shape[-1] == 1:
        return _scalar(q, a, keys, log_decay, runs)
    return vector.found(vector.Steps((q,), (a,), keys, log_decay, runs))


def _plain(q: jax.Array, a: jax.Array, keys: tuple[jax.Array, ...]) -> tuple[vector.Parts, ...]:
    columns = [key.swapaxes(-1, -2) for key in keys]
    return tuple(q @ column for column in columns), tuple(a @ column for column in columns)


def _scalar(
    q: jax.Array, a: jax.Array, keys: tuple[jax.Array, ...], log_decay: jax.Array, runs: jax.Array | None
) -> vector.Found:
    """A sum for every pair of steps, so that small sums stay exact beside large ones."""
    c = q.shape[-2]
    after = jnp.where(jnp.tril(jnp.ones((c, c), bool), -1)[(None,) * (q.ndim - 2)], log_decay, 0)
    ones = jnp.ones((*after.shape[:-2], c, c), after.dtype)
    by_q, by_a = _plain(q, a, keys)
    reads = jnp.exp(jnp.matmul(jnp.tril(ones), after, precision=EXACT))
    reads_before = jnp.exp(jnp.matmul(jnp.tril(ones, -1), after, precision=EXACT))
    now, before, later = (
        jnp.exp(vector.summed(which, log_decay, runs)) for which in (~steps_after(q), steps_before(q), steps_after(q))
    )
    return vector.Found(
        products=(tuple(weight * reads for weight in by_q), tuple(weight * reads_before for weight in by_a)),
        reads=(q * now, a * before),
        writes=tuple(key * later for key in keys),
    )
