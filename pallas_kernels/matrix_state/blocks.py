"""What steps of a chunk read of one another with decays for every key channel, by blocks of steps.

A step reads earlier blocks through what decays since its own began, times what decays from a write until then (compare
the secondary chunking of Yang et al., 2024, arXiv 2312.06635), and its own block pair by pair, however strong decays
are, or by one product around the middle of what decays in it. Elsewhere no exponent is above 0, and none is a
difference: log decays are summed over exactly the steps between a write and a read.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state.chunks import MODERATE, since, until
from pallas_kernels.matrix_state.places import count, steps_after, steps_before
from pallas_kernels.matrix_state.products import EXACT

BLOCK = 4
"""Steps of a block that is read pair by pair. A step has as many exponentials; with 8 both passes of `delta_rule` took
as long on a CPU."""

LONGER = 16
"""Steps of a block that is read by a product."""

_Within = Callable[[jax.Array, jax.Array, bool], jax.Array]
"""From what reads and a key, both `... n s k`, and whether it reads before its step decays, to `... n s s`."""


def reads_pair_by_pair(
    now: tuple[jax.Array, ...], before: tuple[jax.Array, ...], keys: tuple[jax.Array, ...], log_decay: jax.Array
) -> list[list[jax.Array]]:
    """Products with the keys of steps up to each, and any finite numbers for later ones.

    Args:
      now: what reads the state after it has decayed in its step, `... c k`.
      before: what reads it before; its own step is then a later one.
      keys: the keys, `... c k`.
      log_decay: `... c k`; the length of chunks is a power of two.

    Returns:
      For everything that reads, the products with each of the keys, `... c c`.
    """
    decay = _blocks(log_decay, BLOCK)
    pairs = _between(decay)

    def within(x: jax.Array, key: jax.Array, before: bool) -> jax.Array:
        # What decays until the step before; the first of a block reads nothing of its own.
        decays = jnp.roll(pairs, 1, axis=-3) if before else pairs
        return jnp.sum(x[..., :, None, :] * key[..., None, :, :] * decays, axis=-1)

    return _reads(now, before, keys, decay, within)


def reads_around_middles(
    now: tuple[jax.Array, ...],
    before: tuple[jax.Array, ...],
    keys: tuple[jax.Array, ...],
    log_decay: jax.Array,
    runs: jax.Array | None,
) -> list[list[jax.Array]]:
    """The same where `are_moderate(log_decay, runs)`; `runs`, `... c 1`, count how often the past was forgotten."""
    decay = _blocks(log_decay, LONGER)
    until_now, until_before = (_summed(which, decay, runs) for which in (~steps_after(decay), steps_before(decay)))
    half = jnp.min(until_now, axis=-2, keepdims=True) / 2
    reach, reach_before = (jnp.exp(jnp.minimum(total - half, MODERATE)) for total in (until_now, until_before))

    def within(x: jax.Array, key: jax.Array, before: bool) -> jax.Array:
        return (x * (reach_before if before else reach)) @ (key / reach).swapaxes(-1, -2)

    return _reads(now, before, keys, decay, within)


def are_moderate(log_decay: jax.Array, runs: jax.Array | None) -> jax.Array:
    """Whether one product serves every block of so many steps."""
    decay = _blocks(log_decay, LONGER)
    return jnp.min(_summed(~steps_after(decay), decay, runs), initial=0) >= -2 * MODERATE


def _summed(which: jax.Array, decay: jax.Array, runs: jax.Array | None) -> jax.Array:
    """Over some of the steps of a block for each, those of its own run."""
    if runs is not None:
        own = _blocks(runs, LONGER)
        which = which & (own == own.swapaxes(-1, -2))
    ones = jnp.broadcast_to(which.astype(decay.dtype), (*decay.shape[:-1], decay.shape[-2]))
    return jnp.matmul(ones, decay, precision=EXACT)


def _reads(
    now: tuple[jax.Array, ...],
    before: tuple[jax.Array, ...],
    keys: tuple[jax.Array, ...],
    decay: jax.Array,
    within: _Within,
) -> list[list[jax.Array]]:
    """The products of blocks, `decay` and `within` those of one, with earlier ones."""
    size = decay.shape[-2]
    earlier = jnp.tril(jnp.ones((size, size), decay.dtype), -1)
    since_start = jnp.exp(since(decay)), jnp.exp(jnp.matmul(earlier, decay, precision=EXACT))
    left = jnp.exp(jnp.sum(decay, axis=-2, keepdims=True))
    own = [_blocks(key, size) for key in keys]
    held = [_held(key * jnp.exp(until(decay)), left) for key in own]
    reads = [(_blocks(x, size), False) for x in now] + [(_blocks(x, size), True) for x in before]
    return [
        [_joined(within(x, key, late), x * since_start[late], other) for key, other in zip(own, held, strict=True)]
        for x, late in reads
    ]


def _blocks(x: jax.Array, size: int) -> jax.Array:
    """`... c k` as `... n s k`."""
    *others, c, k = x.shape
    return x.reshape(*others, -1, min(size, c), k)


def _between(decay: jax.Array) -> jax.Array:
    """What decays from step s to step t of a block, `... n t s k`; one where s is not before t."""
    size = decay.shape[-2]
    now, start, step = (count((size,) * 3, axis) for axis in range(3))
    sums = ((start < step) & (step <= now)).reshape(size**2, size).astype(decay.dtype)
    total = jnp.matmul(sums.reshape((1,) * (decay.ndim - 2) + sums.shape), decay, precision=EXACT)
    return jnp.exp(total).reshape(*decay.shape[:-1], size, decay.shape[-1])


def _held(keys: jax.Array, left: jax.Array) -> list[jax.Array]:
    """For every block but the first, the keys of all earlier steps as they are when it starts, `... i k`.

    `keys` are as they are when their own block ends, `... n s k`; `left` is what blocks leave, `... n 1 k`.
    """
    found = [keys[..., 0, :, :]]
    for block in range(1, keys.shape[-3] - 1):
        found.append(jnp.concatenate([left[..., block, :, :] * found[-1], keys[..., block, :, :]], axis=-2))
    return found


def _joined(within: jax.Array, reads: jax.Array, held: list[jax.Array]) -> jax.Array:
    """The products of all blocks, `... c c`: those within, `... n s s`, and with keys of earlier ones."""
    number, size = within.shape[-3:-1]
    rows = []
    for block in range(number):
        parts = [within[..., block, :, :]]
        if block:
            parts.insert(0, reads[..., block, :, :] @ held[block - 1].swapaxes(-1, -2))
        if block + 1 < number:
            parts.append(jnp.zeros((*within.shape[:-3], size, size * (number - 1 - block)), within.dtype))
        rows.append(jnp.concatenate(parts, axis=-1))
    return jnp.concatenate(rows, axis=-2)
