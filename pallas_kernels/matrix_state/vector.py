"""What steps of chunks read and write with a decay for every key channel, in the portable form, and its gradients.

With G the log decays summed, a step t reads a key s through `sum_k x_tk key_sk exp(G_tk - G_sk)`. Around half of what
decays in the chunk this is one product of `x exp(G - G_half)` and `key exp(G_half - G)`, as long as neither overflows.
Where decays are too strong for that, chunks are read by blocks of a few steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state.blocks import reads_by_blocks
from pallas_kernels.matrix_state.chunks import MODERATE, by_decay, transposed
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


class _Saved(NamedTuple):
    """The steps; half of what decays in a chunk, `l b h 1 k`; and what has decayed up to each step, times its inverse."""

    steps: Steps
    half: jax.Array
    reach: jax.Array


def found(steps: Steps) -> Found:
    """Returns what steps read and write; see `Found`."""
    like = steps.keys[0]
    return _found(steps._replace(log_decay=jnp.broadcast_to(steps.log_decay, like.shape)))


@jax.custom_vjp
def _found(steps: Steps) -> Found:
    return _save(steps)[0]


def _save(steps: Steps) -> tuple[Found, _Saved]:
    # Within runs, so that not even rounding passes from one document to another.
    until_now = summed(~steps_after(steps.log_decay), steps.log_decay, steps.runs)
    half = jnp.min(until_now, axis=-2, keepdims=True) / 2
    saved = _Saved(steps, half, jnp.exp(jnp.minimum(until_now - half, MODERATE)))
    return by_decay(_moderate, _at_once, _any, (saved,), rows=1), saved


def _pull(saved: _Saved, gradients: Found) -> tuple[Steps]:
    def moderate(saved: _Saved, gradients: Found) -> jax.Array:
        del gradients
        return _moderate(saved)

    return (by_decay(moderate, _pull_at_once, _pull_any, (saved, gradients), rows=1),)


_found.defvjp(_save, _pull)


def _moderate(saved: _Saved) -> jax.Array:
    return jnp.min(saved.half, initial=0) >= -MODERATE


def _at_once(saved: _Saved) -> Found:
    """One product of all that reads with all keys."""
    reads, keys = _scaled(saved)
    c = saved.reach.shape[-2]
    rows = jnp.split(reads @ keys.swapaxes(-1, -2), reads.shape[-2] // c, axis=-2)
    return Found(
        products=tuple(tuple(jnp.split(row, keys.shape[-2] // c, axis=-1)) for row in rows),
        reads=_apart(reads * jnp.exp(saved.half), c),
        writes=_apart(keys * saved.reach[..., -1:, :], c),
    )


def _scaled(saved: _Saved) -> tuple[jax.Array, jax.Array]:
    """Everything that reads, `l b h (r c) k`, and all keys, as they are around half of what decays."""
    now, before, keys, *_ = saved.steps
    reads = [x * saved.reach for x in now] + [x * _reach_before(saved) for x in before]
    return jnp.concatenate(reads, axis=-2), jnp.concatenate([key / saved.reach for key in keys], axis=-2)


def _reach_before(saved: _Saved) -> jax.Array:
    """What has decayed up to the step before each."""
    start = jnp.exp(-saved.half)
    earlier = jnp.concatenate([start, saved.reach[..., :-1, :]], axis=-2)
    runs = saved.steps.runs
    return earlier if runs is None else jnp.where(_begins(runs), start, earlier)


def _begins(runs: jax.Array) -> jax.Array:
    """Which steps of a chunk, but its first, forget the past, bool `l b 1 c 1`."""
    return jnp.concatenate([jnp.zeros_like(runs[..., :1, :], bool), runs[..., 1:, :] != runs[..., :-1, :]], axis=-2)


def _pull_at_once(saved: _Saved, gradients: Found) -> Steps:
    """The decay of step t is in each product of a step at or after t and a key before t, so that its gradient is the
    sum, over the steps from t on, of reads times their gradients minus keys times theirs.
    """
    steps, half, reach = saved
    c, now = reach.shape[-2], len(steps.now)
    reads, keys = _scaled(saved)
    products = jnp.concatenate([jnp.concatenate(row, axis=-1) for row in gradients.products], axis=-2)
    dreads = products @ keys + jnp.exp(half) * jnp.concatenate(gradients.reads, axis=-2)
    dkeys = transposed(products) @ reads
    dwrites = reach[..., -1:, :] * jnp.concatenate(gradients.writes, axis=-2)
    at_reads, at_keys = _apart(reads * dreads, c), _apart(keys * dkeys, c)
    from_here = sum(at_reads[:now]) - sum(at_keys)
    if steps.before:
        from_here += _a_step_earlier(sum(at_reads[now:]), steps.runs)
    earlier = sum(_apart(keys * dwrites, c))
    dreads, dkeys = _apart(dreads, c), _apart(dkeys + dwrites, c)
    return Steps(
        now=tuple(reach * x for x in dreads[:now]),
        before=tuple(_reach_before(saved) * x for x in dreads[now:]),
        keys=tuple(x / reach for x in dkeys),
        log_decay=summed(~steps_before(reach), from_here, steps.runs)
        + summed(steps_before(reach), earlier, steps.runs),
        runs=None,
    )


def _a_step_earlier(array: jax.Array, runs: jax.Array | None) -> jax.Array:
    """What steps have, at the step before each, of the same chunk and document."""
    kept = array if runs is None else jnp.where(_begins(runs), 0, array)
    return jnp.concatenate([kept[..., 1:, :], jnp.zeros_like(array[..., :1, :])], axis=-2)


def summed(which: jax.Array, array: jax.Array, runs: jax.Array | None) -> jax.Array:
    """Over some of the steps of a chunk for each, `... c c`, those of its own run."""
    here = which if runs is None else which & (runs == runs.swapaxes(-1, -2))
    return jnp.matmul(here.astype(array.dtype), array, precision=EXACT)


def _apart(array: jax.Array, steps: int) -> Parts:
    """`... (r c) k` as arrays `... c k`."""
    return tuple(jnp.split(array, array.shape[-2] // steps, axis=-2))


def _any(saved: _Saved) -> Found:
    return _by_blocks(saved.steps)


def _pull_any(saved: _Saved, gradients: Found) -> Steps:
    *steps, runs = saved.steps
    pulled = jax.vjp(lambda *steps: _by_blocks(Steps(*steps, runs)), *steps)[1](gradients)
    return Steps(*pulled, None)


def _by_blocks(steps: Steps) -> Found:
    """Whatever the decays; no exponent is above 0."""
    now, before, keys, log_decay, runs = steps
    products = reads_by_blocks(now, before, keys, log_decay)

    def left(which: jax.Array) -> jax.Array:
        return jnp.exp(summed(which, log_decay, runs))

    reach, reach_before = left(~steps_after(log_decay)), left(steps_before(log_decay))
    return Found(
        products=tuple(tuple(row) for row in products),
        reads=(*(x * reach for x in now), *(x * reach_before for x in before)),
        writes=tuple(key * left(steps_after(log_decay)) for key in keys),
    )
