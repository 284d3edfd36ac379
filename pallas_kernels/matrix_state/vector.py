"""What steps of chunks read and write with a decay for every key channel, in the portable form, and its gradients.

With G the log decays summed, a step t reads a key s through `sum_k x_tk key_sk exp(G_tk - G_sk)`. With H half of what
decays in the chunk this is one product of `x exp(G - H)` and `key exp(H - G)`, as long as neither overflows.
Where decays are too strong for that, chunks are read by blocks of a few steps.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state.blocks import reads_by_blocks
from pallas_kernels.matrix_state.chunks import MODERATE, by_decay, laid
from pallas_kernels.matrix_state.places import steps_after, steps_before
from pallas_kernels.matrix_state.products import EXACT

Parts = tuple[jax.Array, ...]


class Steps(NamedTuple):
    """What the steps of chunks read for and write under.

    Attributes:
      now: what reads the state after it has decayed in its step, `l b h c k`.
      before: what reads it before.
      keys: those under which steps write.
      log_decay: `l b h c k`; 0 where the past is forgotten.
      runs: how often the chunk has forgotten the past, up to each step, `l b 1 c 1`; or `None`.
    """

    now: Parts
    before: Parts
    keys: Parts
    log_decay: jax.Array
    runs: jax.Array | None


class Found(NamedTuple):
    """What steps do, where nothing is forgotten; for what they do not read or write, any finite numbers.

    Attributes:
      products: what everything that reads, `now` and `before`, reads under each of the keys, `l b h c c`.
      reads: the same as it reads the state before the chunk, `l b h c k`.
      writes: the keys as they are in the state after it, `l b h c k`.
    """

    products: tuple[Parts, ...]
    reads: Parts
    writes: Parts


class Stacked(NamedTuple):
    """The same of r readers, one after the other, and of j keys: `.. (r c) (j c)`, `.. (r c) k` and `.. (j c) k`."""

    products: jax.Array
    reads: jax.Array
    writes: jax.Array


class _Saved(NamedTuple):
    """What the backward pass needs.

    Attributes:
      steps: as given.
      half: the square root of the decay over a chunk, `l b h 1 k`.
      reach: the decay up to each step, over `half`, `l b h c k`.
    """

    steps: Steps
    half: jax.Array
    reach: jax.Array


def stacked(steps: Steps) -> Stacked:
    """Returns what steps read and write, those that read `now` before those that read `before`."""
    return _found(steps._replace(log_decay=jnp.broadcast_to(steps.log_decay, steps.keys[0].shape)))


def found(steps: Steps) -> Found:
    """The same apart; see `Found`."""
    return _unstacked(stacked(steps), steps.log_decay.shape[-2])


def by_blocks(steps: Steps) -> Found:
    """The same whatever the decays are, by blocks of a few steps; no exponent is above 0."""
    return _unstacked(_by_blocks(steps), steps.log_decay.shape[-2])


def _unstacked(does: Stacked, c: int) -> Found:
    products = tuple(_apart(row, c, axis=-1) for row in _apart(does.products, c))
    return Found(products, _apart(does.reads, c), _apart(does.writes, c))


@jax.custom_vjp
def _found(steps: Steps) -> Stacked:
    return _save(steps)[0]


def _save(steps: Steps) -> tuple[Stacked, _Saved]:
    # Within runs, so that not even rounding passes from one document to another.
    until_now = summed(~steps_after(steps.log_decay), steps.log_decay, steps.runs)
    half = jnp.min(until_now, axis=-2, keepdims=True) / 2
    saved = _Saved(steps, jnp.exp(half), jnp.exp(jnp.minimum(until_now - half, MODERATE)))
    return by_decay(_moderate, _at_once, _any, (saved,), rows=1), saved


def _pull(saved: _Saved, gradients: Stacked) -> tuple[Steps]:
    def moderate(saved: _Saved, gradients: Stacked) -> jax.Array:
        del gradients
        return _moderate(saved)

    return (by_decay(moderate, _pull_at_once, _pull_any, (saved, gradients), rows=1),)


_found.defvjp(_save, _pull)


def _moderate(saved: _Saved) -> jax.Array:
    return jnp.min(saved.half, initial=1) >= math.exp(-MODERATE)


def _at_once(saved: _Saved) -> Stacked:
    """One product of all that reads with all keys."""
    reads, keys = _scaled(saved, _reach_before(saved))
    return Stacked(reads @ keys.swapaxes(-1, -2), reads * saved.half, keys * saved.reach[..., -1:, :])


def _scaled(saved: _Saved, reach_before: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Everything that reads, `l b h (r c) k`, and all keys, as they are around half of what decays."""
    now, before, keys, *_ = saved.steps
    reads = [x * saved.reach for x in now] + [x * reach_before for x in before]
    return jnp.concatenate(reads, axis=-2), jnp.concatenate([key / saved.reach for key in keys], axis=-2)


def _reach_before(saved: _Saved) -> jax.Array:
    """What has decayed up to the step before each, where something reads that."""
    if not saved.steps.before:
        return saved.reach
    start = 1 / saved.half
    earlier = jnp.concatenate([start, saved.reach[..., :-1, :]], axis=-2)
    runs = saved.steps.runs
    return earlier if runs is None else jnp.where(_begins(runs), start, earlier)


def _begins(runs: jax.Array) -> jax.Array:
    """Which steps of a chunk, but its first, forget the past, bool `l b 1 c 1`."""
    return jnp.concatenate([jnp.zeros_like(runs[..., :1, :], bool), runs[..., 1:, :] != runs[..., :-1, :]], axis=-2)


def _pull_at_once(saved: _Saved, gradients: Stacked) -> Steps:
    """The decay of step t is in each product of a step at or after t and a key before t, so that its gradient is the
    sum, over the steps from t on, of reads times their gradients minus keys times theirs.
    """
    steps, half, reach = saved
    c, now = reach.shape[-2], len(steps.now)
    reach_before = _reach_before(saved)
    reads, keys = _scaled(saved, reach_before)
    dreads = gradients.products @ keys + half * gradients.reads
    dkeys = laid(gradients.products.swapaxes(3, 4)) @ reads
    dwrites = reach[..., -1:, :] * gradients.writes
    at_now, at_before = _split(reads * dreads, now * c)
    from_here = _total(at_now, c) - _total(keys * dkeys, c)
    if steps.before:
        from_here += _a_step_earlier(_total(at_before, c), steps.runs)
    # Both sums as one product, of what is computed once.
    ones = [_ones(which, reach, steps.runs) for which in (~steps_before(reach), steps_before(reach))]
    at = jax.lax.optimization_barrier(jnp.concatenate([from_here, _total(keys * dwrites, c)], axis=-2))
    dnow, dbefore = _split(dreads, now * c)
    return Steps(
        now=tuple(reach * x for x in _apart(dnow, c)),
        before=tuple(reach_before * x for x in _apart(dbefore, c)),
        keys=tuple(x / reach for x in _apart(dkeys + dwrites, c)),
        log_decay=jnp.matmul(jnp.concatenate(ones, axis=-1), at, precision=EXACT),
        runs=None,
    )


def _split(array: jax.Array, steps: int) -> tuple[jax.Array, jax.Array]:
    """Its first steps, and the others."""
    return array[..., :steps, :], array[..., steps:, :]


def _a_step_earlier(array: jax.Array, runs: jax.Array | None) -> jax.Array:
    """What steps have, at the step before each, of the same chunk and document."""
    kept = array if runs is None else jnp.where(_begins(runs), 0, array)
    return jnp.concatenate([kept[..., 1:, :], jnp.zeros_like(array[..., :1, :])], axis=-2)


def summed(which: jax.Array, array: jax.Array, runs: jax.Array | None) -> jax.Array:
    """Over some of the steps of a chunk for each, `... c c`, those of its own run."""
    return jnp.matmul(_ones(which, array, runs), array, precision=EXACT)


def _ones(which: jax.Array, like: jax.Array, runs: jax.Array | None) -> jax.Array:
    """For every head, as one matrix for all would be multiplied in another layout."""
    here = which if runs is None else which & (runs == runs.swapaxes(-1, -2))
    return jnp.broadcast_to(here.astype(like.dtype), (*like.shape[:-1], like.shape[-2]))


def _apart(array: jax.Array, steps: int, axis: int = -2) -> Parts:
    """`... (r c) k` as arrays `... c k`."""
    return tuple(jnp.split(array, array.shape[axis] // steps, axis=axis)) if array.shape[axis] else ()


def _total(array: jax.Array, steps: int) -> jax.Array:
    """`... (r c) k` summed over r."""
    return functools.reduce(jnp.add, _apart(array, steps))


def _any(saved: _Saved) -> Stacked:
    return _by_blocks(saved.steps)


def _pull_any(saved: _Saved, gradients: Stacked) -> Steps:
    now, before, keys, log_decay, runs = saved.steps

    def found(now: Parts, before: Parts, keys: Parts, log_decay: jax.Array) -> Stacked:
        return _by_blocks(Steps(now, before, keys, log_decay, runs))

    now, before, keys, log_decay = jax.vjp(found, now, before, keys, log_decay)[1](gradients)
    return Steps(now, before, keys, log_decay, None)


def _by_blocks(steps: Steps) -> Stacked:
    now, before, keys, log_decay, runs = steps
    products = reads_by_blocks(now, before, keys, log_decay)

    def left(which: jax.Array) -> jax.Array:
        return jnp.exp(summed(which, log_decay, runs))

    reach, reach_before = left(~steps_after(log_decay)), left(steps_before(log_decay))
    return Stacked(
        products=jnp.concatenate([jnp.concatenate(row, axis=-1) for row in products], axis=-2),
        reads=jnp.concatenate([*(x * reach for x in now), *(x * reach_before for x in before)], axis=-2),
        writes=jnp.concatenate([key * left(steps_after(log_decay)) for key in keys], axis=-2),
    )
