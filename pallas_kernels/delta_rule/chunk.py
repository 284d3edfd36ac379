"""The mathematics of chunks of `delta_rule`: functions of all chunks at once, or of one in a kernel.

Within a chunk the value that a step writes is `r_i = beta_i (v_i - S^T (k_i exp(G_i)) - sum_{j<i} A_ij r_j)`, with S
the state before the chunk, G the log decays summed, and `A_ij = sum_k k_ik k_jk exp(G_ik - G_jk)`. So `R = X diag(beta)
(V - (K exp(G)) S)` with `X = (I + diag(beta) A)^{-1}`, the WY form of Yang et al., 2024, arXiv 2406.06484.

No exponent is above 0, and none is a difference: log decays are summed over exactly the steps between a read and a
write. States are transposed, `... v k`, so that decays are along their last axis, as for keys.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state.halves import earlier_by_halves, with_own
from pallas_kernels.matrix_state.inverse import inverse_again
from pallas_kernels.matrix_state.places import steps_after, steps_before
from pallas_kernels.matrix_state.products import Form, added_up, multiply, multiply_with_rest
from pallas_kernels.matrix_state.vector import Found, Parts, Steps


class Chunk(NamedTuple):
    """The inputs of the steps of a chunk.

    Attributes:
      q: scaled, `... c k`.
      k: `... c k`.
      beta: `... c 1`.
      log_decay: `... c k`, or `... c 1` for all key channels, or `None`.
      runs: the number of document starts in the chunk up to each step, `... c 1`; or `None`.
      erase: the keys that the state is read for, `... c k`; `None`: k.
    """

    q: jax.Array
    k: jax.Array
    beta: jax.Array
    log_decay: jax.Array | None
    runs: jax.Array | None
    erase: jax.Array | None = None


class Weights(NamedTuple):
    """The weights of the steps of a chunk.

    Attributes:
      among: weight of a step's write in a step's read for its query, `... c c`.
      erased: weight of an earlier step's write in what a step reads to erase it, times beta, `... c c`.
      q: queries that read the state before the chunk, `... c k`.
      k: keys that read it to erase, `... c k`.
      writes: the keys under which values are in the state after the chunk, `... c k`.
      factor: decay of the state before the chunk over the chunk, `... 1 k` or `... 1 1`.
    """

    among: jax.Array
    erased: jax.Array
    q: jax.Array
    k: jax.Array
    writes: jax.Array
    factor: jax.Array


def weights(chunk: Chunk, form: Form, by_channels: Callable[[Steps], Found] | None = None) -> Weights:
    """Returns the weights of a chunk; its length is a power of two.

    `by_channels` computes what steps read and write with a decay for every key channel; `None`: `by_halves`.
    """
    beta, runs = chunk.beta, chunk.runs
    ((by_q,), (by_erase,)), (q, erase), (writes,) = _found(chunk, form, by_channels)
    if chunk.log_decay is None:
        factor = jnp.ones((*beta.shape[:-2], 1, 1), form.sums)
    else:
        factor = jnp.exp(jnp.sum(chunk.log_decay, -2, keepdims=True))
    past, seen = steps_before(q), ~steps_after(q)
    if runs is not None:
        last, here = runs[..., -1:, :], runs == runs.swapaxes(-1, -2)
        past, seen = past & here, seen & here
        q, erase = jnp.where(runs == 0, q, 0), jnp.where(runs == 0, erase, 0)
        writes, factor = jnp.where(runs == last, writes, 0), jnp.where(last == 0, factor, 0)
    return Weights(
        among=jnp.where(seen, by_q, 0),
        # Products that are not needed may overflow: they are hidden before beta, whose gradient would be of them.
        erased=beta * jnp.where(past, by_erase, 0),
        q=q,
        k=erase,
        writes=writes,
        factor=factor,
    )


def _found(chunk: Chunk, form: Form, by_channels: Callable[[Steps], Found] | None) -> Found:
    """What steps read and write where nothing is forgotten, for queries and for the keys that erase."""
    q, k = chunk.q.astype(form.sums), chunk.k.astype(form.sums)
    erase = k if chunk.erase is None else chunk.erase.astype(form.sums)
    if chunk.log_decay is None:
        return Found(_plain(q, erase, k, form), (q, erase), (k,))
    # All that reads does so after the state has decayed in its step.
    steps = Steps((q, erase), (), (k,), chunk.log_decay, chunk.runs)
    if chunk.log_decay.shape[-1] == 1:
        return _scalar(steps, form)
    return by_halves(steps, form) if by_channels is None else by_channels(steps)


def _plain(q: jax.Array, erase: jax.Array, k: jax.Array, form: Form) -> tuple[Parts, Parts]:
    return (multiply(q, k, 'nt', form),), (multiply(erase, k, 'nt', form),)


def _scalar(steps: Steps, form: Form) -> Found:
    (q, erase), _, (k,), log_decay, _ = steps
    # Over the steps after j up to i: a sum for every pair, so that small sums stay exact beside large ones.
    later = jnp.where(steps_before(q), log_decay, 0)
    until_now = jnp.broadcast_to(jnp.where(steps_after(q), 0, 1), later.shape)
    decay = jnp.exp(added_up(until_now, later, form))
    (by_q,), (by_erase,) = _plain(q, erase, k, form)
    row = log_decay.swapaxes(-1, -2)
    reach = jnp.exp(jnp.sum(jnp.where(steps_after(q), 0, row), axis=-1, keepdims=True))
    stays = jnp.exp(jnp.sum(jnp.where(steps_after(q), row, 0), axis=-1, keepdims=True))
    return Found(((by_q * decay,), (by_erase * decay,)), (q * reach, erase * reach), (k * stays,))


def by_halves(steps: Steps, form: Form) -> Found:
    """What steps read and write with a decay for every key channel, by halves of blocks of 2, 4, 8, ... steps."""
    (q, erase), _, (k,), log_decay, _ = steps
    ((by_q,), (by_erase,)), sums = earlier_by_halves((q, erase), (), (k,), log_decay, form)
    reach, stays = jnp.exp(sums.until_now), jnp.exp(sums.later)
    return Found(((with_own(by_q, q, k),), (by_erase,)), (q * reach, erase * reach), (k * stays,))


def step(
    chunk: Chunk, v: jax.Array, state: jax.Array, form: Form, solved: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what one chunk reads, `c v`, the state after it, `v k` as that before, and the computed inverse.

    `solved` is that inverse, if it was kept.
    """
    does = weights(chunk, form)
    solved = inverse_again(does.erased, solved, form)
    missing = v.astype(form.sums) - multiply(does.k, state, 'nt', form)
    values = multiply_with_rest(solved, chunk.beta * missing, 'nn', form)
    o = multiply(does.q, state, 'nt', form) + multiply(does.among, values, 'nn', form)
    return o, does.factor * state + multiply(values, does.writes, 'tn', form), solved
