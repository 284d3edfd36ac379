"""What steps of a chunk read of one another with decays for every key channel, by halves of blocks of steps.

No exponent is above 0, and none is a difference: log decays are summed over exactly the steps between a read and a
write.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state.places import count, same_block
from pallas_kernels.matrix_state.products import Form, multiply


class Summed(NamedTuple):
    """Log decays summed up to each step, up to the step before it, and after it to the end of the chunk."""

    until_now: jax.Array
    before: jax.Array
    later: jax.Array


def earlier_by_halves(
    now: tuple[jax.Array, ...],
    before: tuple[jax.Array, ...],
    keys: tuple[jax.Array, ...],
    log_decay: jax.Array,
    form: Form,
) -> tuple[list[list[jax.Array]], Summed]:
    """Products with the keys of earlier steps, with decays for every key channel, by halves of blocks of steps.

    The second half of a block reads the first through the decay since the block's middle, times the decay until
    then (the secondary chunking of Yang et al., 2024, arXiv 2312.06635, all the way down).

    Args:
      now: what reads the state after it has decayed in its step, `... c k`.
      before: what reads it before.
      keys: the keys, `... c k`.
      log_decay: `... c k`.
      form: of the products.

    Returns:
      For everything that reads, the products with each of the keys, `... c c`, zero for its own step and later ones;
      and the sums.
    """
    c = log_decay.shape[-2]
    place = count((1,) * (log_decay.ndim - 2) + (c, 1), -2)
    found = [[jnp.zeros((*x.shape[:-1], c), form.sums) for _ in keys] for x in (*now, *before)]
    zero = jnp.zeros_like(log_decay)
    sums, total = Summed(log_decay, zero, zero), log_decay
    size = 1
    while size < c:
        second = (place & size) != 0
        reads = [x * jnp.where(second, jnp.exp(sums.until_now), 0) for x in now]
        reads += [x * jnp.where(second, jnp.exp(sums.before), 0) for x in before]
        held = [jnp.where(second, 0, jnp.exp(sums.later)) * key for key in keys]
        here = same_block(log_decay, 2 * size)
        for x, products in zip(reads, found, strict=True):
            products[:] = [
                product + jnp.where(here, multiply(x, key, 'nt', form), 0)
                for product, key in zip(products, held, strict=True)
            ]
        other = _halves_swapped(total, size)
        until_now, until_before = (decay + jnp.where(second, other, 0) for decay in sums[:2])
        sums = Summed(until_now, until_before, sums.later + jnp.where(second, 0, other))
        total += other
        size *= 2
    return found, sums


def with_own(products: jax.Array, reads: jax.Array, key: jax.Array) -> jax.Array:
    """Products with the keys of earlier steps and, as nothing decays in between, with that of the step itself."""
    return products + jnp.where(same_block(reads, 1), jnp.sum(reads * key, axis=-1, keepdims=True), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _halves_swapped(array: jax.Array, size: int) -> jax.Array:
    """Exchanges the halves, of so many steps, of each block; its own gradient."""
    place = count((1,) * (array.ndim - 2) + (array.shape[-2], 1), -2)
    return jnp.where((place & size) != 0, jnp.roll(array, size, axis=-2), jnp.roll(array, -size, axis=-2))


_halves_swapped.defvjp(
    lambda array, size: (_halves_swapped(array, size), None),
    lambda size, _, dswapped: (_halves_swapped(dswapped, size),),
)
