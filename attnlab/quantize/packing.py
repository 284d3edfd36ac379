"""Codes of a few bits, stored without gaps in bytes."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, UInt8


def packed(codes: Int[Array, '*b n'], bits: int) -> UInt8[Array, '*b p']:
    """Stores codes of `bits` bits one after the other, the highest bit of each first: `p = ceil(n bits / 8)` bytes."""
    places = jnp.arange(bits - 1, -1, -1, dtype=jnp.int32)
    spread = (codes[..., None] >> places.reshape((1,) * codes.ndim + (-1,))) & 1
    return jnp.packbits(spread.astype(jnp.uint8).reshape(*codes.shape[:-1], -1), axis=-1)


def unpacked(stored: UInt8[Array, '*b p'], bits: int, count: int) -> Int[Array, '*b n']:
    """Returns the first `count` codes that `packed` stored."""
    spread = jnp.unpackbits(stored, axis=-1, count=bits * count).reshape(*stored.shape[:-1], count, bits)
    weights = jnp.asarray([1 << place for place in range(bits - 1, -1, -1)], jnp.int32)
    return jnp.sum(spread.astype(jnp.int32) * weights.reshape((1,) * (spread.ndim - 1) + (-1,)), axis=-1)
