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

from pallas_kernels.delta_rule.chunk import EXACT
from pallas_kernels.matrix_state.chunks import MODERATE, by_decay, keep, remembered, remembers


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


class Sums(NamedTuple):
    """Log decays summed within runs: up to each step, up to the step before it, and after it to the end."""

    until_now: jax.Array
    before: jax.Array
    later: jax.Array


def weights(chunk: Chunk) -> Weights:
    """Returns the weights of chunks; their length is a power of two."""
    q, a, keys, log_decay, runs = chunk
    here = _same_run(runs, q)
    seen, past = jnp.tril(here), jnp.tril(here, -1)
    if log_decay is None:
        sums = Sums(*(jnp.zeros((*q.shape[:-1], 1), q.dtype),) * 3)
        by_q, by_a = _plain(q, a, keys)
    else:
        sums = _sums(log_decay, here)
        if log_decay.shape[-1] == 1:
            by_q, by_a = _scalar(q, a, keys, log_decay)
        else:
            by_q, by_a = _vector(q, a, keys, log_decay, sums.until_now, sums.before)
    stays = keep(remembered(runs), jnp.exp(sums.later))
    factor = jnp.exp(sums.until_now[..., -1:, :])
    return Weights(
        among=[jnp.where(seen, weight, 0) for weight in by_q],
        earlier=[jnp.where(past, weight, 0) for weight in by_a],
        q=q * keep(remembers(runs), jnp.exp(sums.until_now)),
        a=a * keep(remembers(runs), jnp.exp(sums.before)),
        writes=[key * stays for key in keys],
        factor=factor if runs is None else jnp.where(runs[..., -1:, :] == 0, factor, 0),
    )


def _same_run(runs: jax.Array | None, like: jax.Array) -> jax.Array:
    """Which steps of a chunk lie in one document, bool `l b 1 c c`; dimensions are those of `like`, `... c k`."""
    if runs is None:
        return jnp.ones((1,) * (like.ndim - 2) + (like.shape[-2],) * 2, bool)
    return runs == runs.swapaxes(-1, -2)


def _sums(log_decay: jax.Array, here: jax.Array) -> Sums:
    """Within runs, so that not even rounding passes from one document to another."""

    def summed(which: jax.Array) -> jax.Array:
        return jnp.matmul(which.astype(log_decay.dtype), log_decay, precision=EXACT)

    return Sums(summed(jnp.tril(here)), summed(jnp.tril(here, -1)), summed(jnp.triu(here, 1)))


Pairs = tuple[list[jax.Array], list[jax.Array]]
"""What steps read for their queries, and for their `a`, of what they write under each of the keys, `l b h c c`; for
steps that they do not read any finite numbers."""


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
    """With a decay of its own for every key channel; the sums are those of `Sums`."""
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
    """Whatever the decays, a chunk at a time."""
    return jax.lax.map(_by_halves, steps[:4])


def _by_halves(steps: tuple[jax.Array, jax.Array, tuple[jax.Array, ...], jax.Array]) -> Pairs:
    """By halves of blocks of 2, 4, 8, ... steps, as in `delta_rule.chunk.by_halves`.

    What an `a` reads has decayed until the step before it.
    """
    q, a, keys, log_decay = steps
    c = q.shape[-2]
    place = jnp.arange(c).reshape((1,) * (q.ndim - 2) + (c, 1))
    apart = place ^ place.swapaxes(-1, -2)
    by_q = [jnp.where(apart == 0, jnp.sum(q * key, axis=-1, keepdims=True), 0) for key in keys]
    by_a = [jnp.zeros_like(weight) for weight in by_q]
    until_now, before, later, total = log_decay, jnp.zeros_like(log_decay), jnp.zeros_like(log_decay), log_decay
    size = 1
    while size < c:
        second = (place & size) != 0
        reads, reads_before = (jnp.where(second, jnp.exp(decay), 0) for decay in (until_now, before))
        stays = jnp.where(second, 0, jnp.exp(later))
        here = apart < 2 * size
        more_q, more_a = _plain(q * reads, a * reads_before, tuple(key * stays for key in keys))
        by_q = [weight + jnp.where(here, more, 0) for weight, more in zip(by_q, more_q, strict=True)]
        by_a = [weight + jnp.where(here, more, 0) for weight, more in zip(by_a, more_a, strict=True)]
        other = jnp.where(second, jnp.roll(total, size, axis=-2), jnp.roll(total, -size, axis=-2))
        until_now, before = (decay + jnp.where(second, other, 0) for decay in (until_now, before))
        later, total = later + jnp.where(second, 0, other), total + other
        size *= 2
    return by_q, by_a
