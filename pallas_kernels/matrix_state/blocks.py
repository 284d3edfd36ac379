"""What steps of a chunk read of one another with decays for every key channel, however strong, by blocks of steps.

A step reads earlier blocks through what decays since its own began, times what decays from a write until then (compare
the secondary chunking of Yang et al., 2024, arXiv 2312.06635), and its own block pair by pair. No exponent is above 0,
and none is a difference: log decays are summed over exactly the steps between a write and a read.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state.chunks import since, until
from pallas_kernels.matrix_state.places import count
from pallas_kernels.matrix_state.products import EXACT

BLOCK = 4
"""Steps of a block. A step has as many exponentials; with 8 both passes of `delta_rule` took as long on a CPU."""


def reads_by_blocks(
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
    decay = _blocks(log_decay)
    pairs = _between(decay)
    earlier = jnp.tril(jnp.ones((decay.shape[-2],) * 2, decay.dtype), -1)
    since_start = jnp.exp(since(decay)), jnp.exp(jnp.matmul(earlier, decay, precision=EXACT))
    left = jnp.exp(jnp.sum(decay, axis=-2, keepdims=True))
    own = [_blocks(key) for key in keys]
    held = [_held(key * jnp.exp(until(decay)), left) for key in own]
    reads = [(_blocks(x), pairs, since_start[0]) for x in now]
    # What decays until the step before; the first of a block reads nothing of its own.
    reads += [(_blocks(x), jnp.roll(pairs, 1, axis=-3), since_start[1]) for x in before]
    return [
        [
            _joined(jnp.sum(x[..., :, None, :] * key[..., None, :, :] * decays, axis=-1), x * reach, other)
            for key, other in zip(own, held, strict=True)
        ]
        for x, decays, reach in reads
    ]


def _blocks(x: jax.Array) -> jax.Array:
    """`... c k` as `... n s k`."""
    *others, c, k = x.shape
    size = min(BLOCK, c)
    return x.reshape(*others, c // size, size, k)


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
