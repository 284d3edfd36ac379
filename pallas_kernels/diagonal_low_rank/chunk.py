"""The mathematics of chunks of `diagonal_low_rank`, for all chunks at once or for one in a kernel.

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

from pallas_kernels.matrix_state.chunks import keep, remembered, remembers
from pallas_kernels.matrix_state.places import steps_after, steps_before
from pallas_kernels.matrix_state.vector import Found


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


def weights(chunk: Chunk, found: Callable[[Chunk], Found]) -> Weights:
    """Returns the weights of a chunk in a kernel; its length is a power of two.

    `found` computes what steps, for their queries and for each `a`, read and write where nothing is forgotten.
    """
    seen, past = read_by_q_and_a(chunk)
    (by_q, by_a), (q, a), writes = found(chunk)
    return Weights(
        among=[jnp.where(seen, weight, 0) for weight in by_q],
        earlier=[jnp.where(past, weight, 0) for weight in by_a],
        q=keep(remembers(chunk.runs), q),
        a=keep(remembers(chunk.runs), a),
        writes=[keep(remembered(chunk.runs), key) for key in writes],
        factor=factor(chunk),
    )


def read_by_q_and_a(chunk: Chunk) -> tuple[jax.Array, jax.Array]:
    """Which steps of its chunk, `c c`, a step reads for its query, itself too, and for its `a`."""
    seen, past = ~steps_after(chunk.q), steps_before(chunk.q)
    if chunk.runs is None:
        return seen, past
    here = chunk.runs == chunk.runs.swapaxes(-1, -2)
    return seen & here, past & here


def factor(chunk: Chunk) -> jax.Array:
    """What the state before the chunk counts in that after it, `l b h 1 k` or `... 1 1`."""
    q, log_decay, runs = chunk.q, chunk.log_decay, chunk.runs
    left = jnp.ones_like(q[..., :1, :1]) if log_decay is None else jnp.exp(jnp.sum(log_decay, -2, keepdims=True))
    return left if runs is None else jnp.where(runs[..., -1:, :] == 0, left, 0)
