"""The mathematics of chunks of `delta_rule`: functions of all chunks at once, or of one in a kernel.

Within a chunk the value that a step writes is `r_i = beta_i (v_i - S^T (k_i exp(G_i)) - sum_{j<i} A_ij r_j)`, with S
the state before the chunk, G the log decays summed, and `A_ij = sum_k k_ik k_jk exp(G_ik - G_jk)`. So `R = X diag(beta)
(V - (K exp(G)) S)` with `X = (I + diag(beta) A)^{-1}`, the WY form of Yang et al., 2024, arXiv 2406.06484.

No exponent is above 0, and none is a difference: log decays are summed over exactly the steps between a read and a
write. States are transposed, `... v k`, so that decays are along their last axis, as for keys.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state.halves import earlier_by_halves, with_own
from pallas_kernels.matrix_state.inverse import inverse_again
from pallas_kernels.matrix_state.places import steps_after, steps_before
from pallas_kernels.matrix_state.products import Form, exact, multiply
from pallas_kernels.matrix_state.vector import Found, Parts


class Chunk(NamedTuple):
    """The inputs of the steps of a chunk.

    Attributes:
      q: scaled, `... c k`.
      k: `... c k`.
      beta: `... c 1`.
      log_decay: `... c k`, or `... c 1` for all key channels, or `None`.
      runs: the number of document starts in the chunk up to each step, `... c 1`; or `None`.
    """

    q: jax.Array
    k: jax.Array
    beta: jax.Array
    log_decay: jax.Array | None
    runs: jax.Array | None


class Weights(NamedTuple):
    """The weights of the steps of a chunk.

    Attributes:
      among: weight of a step's write in a step's read for its query, `... c c`.
      erased: weight of an earlier step's write in a step's read for its key, times beta, `... c c`.
      q: queries that read the state before the chunk, `... c k`.
      k: keys that read it, `... c k`.
      writes: the keys under which values are in the state after the chunk, `... c k`.
      factor: decay of the state before the chunk over the chunk, `... 1 k` or `... 1 1`.
    """

    among: jax.Array
    erased: jax.Array
    q: jax.Array
    k: jax.Array
    writes: jax.Array
    factor: jax.Array


def weights(chunk: Chunk, form: Form, by_channels: Callable[[Chunk], Found] | None = None) -> Weights:
    """Returns the weights of a chunk; its length is a power of two.

    `by_channels` computes what steps, for their queries and their keys, read and write with a decay for every key
    channel; `None`: `by_halves`.
    """
    chunk = chunk._replace(q=chunk.q.astype(form.sums), k=chunk.k.astype(form.sums))
    q, k, beta, log_decay, runs = chunk
    if log_decay is None:
        products, (q, k), (writes,) = Found(_plain(q, k, form), (q, k), (k,))
        factor = jnp.ones((*beta.shape[:-2], 1, 1), form.sums)
    elif log_decay.shape[-1] == 1:
        products, (q, k), (writes,) = _scalar(q, k, log_decay, form)
    else:
        products, (q, k), (writes,) = (by_channels or functools.partial(by_halves, form))(chunk)
    (by_q,), (by_k,) = products
    if log_decay is not None:
        factor = jnp.exp(jnp.sum(log_decay, -2, keepdims=True))
    past, seen = steps_before(q), ~steps_after(q)
    if runs is not None:
        last = runs[..., -1:, :]
        here = runs == runs.swapaxes(-1, -2)
        past, seen = past & here, seen & here
        q, k, writes = jnp.where(runs == 0, q, 0), jnp.where(runs == 0, k, 0), jnp.where(runs == last, writes, 0)
        factor = jnp.where(last == 0, factor, 0)
    return Weights(
        among=jnp.where(seen, by_q, 0), erased=jnp.where(past, beta * by_k, 0), q=q, k=k, writes=writes, factor=factor
    )


def _plain(q: jax.Array, k: jax.Array, form: Form) -> tuple[Parts, Parts]:
    return (multiply(q, k, 'nt', form),), (multiply(k, k, 'nt', form),)


def _scalar(q: jax.Array, k: jax.Array, log_decay: jax.Array, form: Form) -> Found:
    # Over the steps after j up to i: a sum for every pair, so that small sums stay exact beside large ones.
    later = jnp.where(steps_before(q), log_decay, 0)
    until_now = jnp.broadcast_to(jnp.where(steps_after(q), 0, 1), later.shape)
    decay = jnp.exp(multiply(until_now, later, 'nn', exact(later)))
    (by_q,), (by_k,) = _plain(q, k, form)
    row = log_decay.swapaxes(-1, -2)
    reach = jnp.exp(jnp.sum(jnp.where(steps_after(q), 0, row), axis=-1, keepdims=True))
    stays = jnp.exp(jnp.sum(jnp.where(steps_after(q), row, 0), axis=-1, keepdims=True))
    return Found(((by_q * decay,), (by_k * decay,)), (q * reach, k * reach), (k * stays,))


def by_halves(form: Form, chunk: Chunk) -> Found:
    """What steps read and write with a decay for every key channel, by halves of blocks of 2, 4, 8, ... steps."""
    q, k, _, log_decay, _ = chunk
    ((by_q,), (by_k,)), sums = earlier_by_halves((q, k), (), (k,), log_decay, form)
    reach, stays = jnp.exp(sums.until_now), jnp.exp(sums.later)
    return Found(((with_own(by_q, q, k),), (by_k,)), (q * reach, k * reach), (k * stays,))


def step(
    chunk: Chunk, v: jax.Array, state: jax.Array, form: Form, solved: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what one chunk reads, `c v`, the state after it, `v k` as that before, and the computed inverse.

    `solved` is that inverse, if it was kept.
    """
    does = weights(chunk, form)
    solved = inverse_again(does.erased, solved)
    missing = v.astype(form.sums) - multiply(does.k, state, 'nt', form)
    values = multiply(solved, chunk.beta * missing, 'nn', form)
    o = multiply(does.q, state, 'nt', form) + multiply(does.among, values, 'nn', form)
    return o, does.factor * state + multiply(values, does.writes, 'tn', form), solved
