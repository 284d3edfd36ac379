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

from pallas_kernels.matrix_state.blocks import reads_by_blocks
from pallas_kernels.matrix_state.chunks import MODERATE, by_decay, keep, remembered, remembers
from pallas_kernels.matrix_state.halves import Summed
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


Pairs = tuple[list[jax.Array], list[jax.Array]]
"""What steps read for their queries, and for their `a`, of what they write under each of the keys, `... c c`; for
steps that they do not read any finite numbers."""


def weights(chunk: Chunk, products: Callable[[Chunk], tuple[Pairs, Summed]] | None = None) -> Weights:
    """Returns the weights of chunks; their length is a power of two.

    `products` computes what steps read of one another, and the sums of log decays, `... c 1` where there are none;
    `None`: the portable form, of all chunks at once.
    """
    q, a, keys, log_decay, runs = chunk
    seen, past = ~steps_after(q), steps_before(q)
    if runs is not None:
        here = runs == runs.swapaxes(-1, -2)
        seen, past = seen & here, past & here
    (by_q, by_a), sums = (products or _portable)(chunk)
    stays = keep(remembered(runs), jnp.exp(sums.later))
    reach, reach_before = (keep(remembers(runs), jnp.exp(decay)) for decay in sums[:2])
    factor = (
        jnp.ones_like(sums.later[..., :1, :]) if log_decay is None else jnp.exp(jnp.sum(log_decay, -2, keepdims=True))
    )
    return Weights(
        among=[jnp.where(seen, weight, 0) for weight in by_q],
        earlier=[jnp.where(past, weight, 0) for weight in by_a],
        q=q * reach,
        a=a * reach_before,
        writes=[key * stays for key in keys],
        factor=factor if runs is None else jnp.where(runs[..., -1:, :] == 0, factor, 0),
    )


def _portable(chunk: Chunk) -> tuple[Pairs, Summed]:
    q, a, keys, log_decay, runs = chunk
    if log_decay is None:
        return _plain(q, a, keys), Summed(*(jnp.zeros((*q.shape[:-1], 1), q.dtype),) * 3)
    sums = _sums(log_decay, _same_run(runs, q))
    if log_decay.shape[-1] == 1:
        return _scalar(q, a, keys, log_decay), sums
    return _vector(q, a, keys, log_decay, sums.until_now, sums.before), sums


def _same_run(runs: jax.Array | None, like: jax.Array) -> jax.Array:
    """Which steps of a chunk lie in one document, bool `l b 1 c c`; dimensions are those of `like`, `... c k`."""
    if runs is None:
        return jnp.ones((1,) * (like.ndim - 2) + (like.shape[-2],) * 2, bool)
    return runs == runs.swapaxes(-1, -2)


def _sums(log_decay: jax.Array, here: jax.Array) -> Summed:
    """Within runs, so that not even rounding passes from one document to another."""

    def summed(which: jax.Array) -> jax.Array:
        return jnp.matmul(which.astype(log_decay.dtype), log_decay, precision=EXACT)

    return Summed(summed(jnp.tril(here)), summed(jnp.tril(here, -1)), summed(jnp.triu(here, 1)))


def _plain(q: jax.Array, a: jax.Array, keys: tuple[jax.Array, ...]) -> Pairs:
    columns = [key.swapaxes(-1, -2) for key in keys]
    return [q @ column for column in columns], [a @ column for column in columns]


def _scalar(q: jax.Array, a: jax.Array, keys: tuple[jax.Array, ...], log_decay: jax.Array) -> Pairs:
    """A sum for every pair of steps, so that small sums stay exact beside large ones."""
    c = q.shape[-2]
    after = jnp.where(jnp.tril(jnp.ones((c, c), bool), -1)[(None,) * (q.ndim - 2)], log_decay, 0)
    ones = jnp.ones((*after.shape[:-2], c, c), after.dtype)
    by_q, by_a = _plain(q, a, keys)
    reads = jnp.exp(jnp.matmul(jnp.tril(ones), after, precision=EXACT))
    reads_before = jnp.exp(jnp.matmul(jnp.tril(ones, -1), after, precision=EXACT))
    return [weight * reads for weight in by_q], [weight * reads_before for weight in by_a]


@jax.custom_vjp
def _vector(
    q: jax.Array,
    a: jax.Array,
    keys: tuple[jax.Array, ...],
    log_decay: jax.Array,
    until_now: jax.Array,
    before: jax.Array,
) -> Pairs:
    """With a decay of its own for every key channel; the sums are those of `Summed`."""
    return _save((q, a, keys, log_decay, until_now, before))[0]


Steps = tuple[jax.Array, jax.Array, tuple[jax.Array, ...], jax.Array, jax.Array, jax.Array]


def _save(steps: Steps) -> tuple[Pairs, Steps]:
    return by_decay(_moderate, _at_once, _any, (steps,), rows=1), steps


def _pull(saved: Steps, gradients: Pairs) -> Steps:
    def through(form: Callable[[Steps], Pairs]) -> Callable[[Steps, Pairs], Steps]:
        return lambda saved, gradients: jax.vjp(form, saved)[1](gradients)[0]

    def moderate(saved: Steps, gradients: Pairs) -> jax.Array:
        del gradients
        return _moderate(saved)

    return by_decay(moderate, through(_at_once), through(_any), (saved, gradients), rows=1)


_vector.defvjp(lambda *steps: _save(steps), _pull)


def _moderate(steps: Steps) -> jax.Array:
    return jnp.min(steps[4], initial=0) >= -2 * MODERATE


def _at_once(steps: Steps) -> Pairs:
    """One product around half of what decays in the chunk."""
    q, a, keys, _, until_now, before = steps
    middle = jax.lax.stop_gradient(jnp.min(until_now, axis=-2, keepdims=True) / 2)
    stays = jnp.exp(middle - until_now)
    return _plain(q * jnp.exp(until_now - middle), a * jnp.exp(before - middle), tuple(key * stays for key in keys))


def _any(steps: Steps) -> Pairs:
    """Whatever the decays."""
    q, a, keys, log_decay, *_ = steps
    by_q, by_a = reads_by_blocks((q,), (a,), keys, log_decay)
    return by_q, by_a
