"""The inverse of the triangular matrices of chunks in kernels for Hopper GPUs, and products with it.

The diagonal blocks of 2, 4, 8, ... steps are inverted in products alone, each from two of the size before, as in
`matrix_state.inverse`: substitution, block by block, which stays accurate where powers of the matrix would grow. A
factor is two bfloat16 parts, a product three of these. Of 16 bits errors leave 12 where keys are most alike; what the
inverse is multiplied with then keeps 10.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.matrix_state.mosaic_gpu.reads import times
from pallas_kernels.matrix_state.mosaic_gpu.tiles import TILE, along_channels, iota, send
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate
from pallas_kernels.target import Target

DOUBLINGS = 5
"""From blocks of 2 steps to one of 64."""


def solved(here: Target, given: Any, first: Any, second: Any, origin: Any, strict: jax.Array) -> jax.Array:
    """Returns `(I + strict)^{-1}`, in registers; the others are pairs of bfloat16 tiles that it writes to.

    `origin` is a `tiles.hidden_zero`.
    """

    def apart() -> jax.Array:
        """Less than n for steps in the same block of n, a power of two."""
        return iota(0, origin) ^ iota(1)

    def twice(turn: Any, found: jax.Array) -> jax.Array:
        size = jax.lax.shift_left(jnp.int32(2), turn)
        put(first, found)
        # Of the product of the whole matrix, what is between blocks next to each other.
        beside = (apart() >= size) & (apart() < 2 * size)
        put(second, jnp.where(beside, _three_products(here, given, first), 0.0))
        return found - _three_products(here, first, second)

    put(given, strict)
    start = jnp.where(apart() < 1, 1.0, jnp.where(apart() < 2, -strict, 0.0))
    return jax.lax.fori_loop(0, DOUBLINGS, twice, start)


def parts(numbers: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Two numbers of a 16-bit type that sum to one, except for its last bits.

    The first has the bits that the type keeps, rounded as an integer: a number that is converted and back takes eight
    times as long as any other operation.
    """
    dropped = jnp.finfo(jnp.float32).nmant - jnp.finfo(dtype).nmant
    bits = jax.lax.bitcast_convert_type(numbers, jnp.int32) + (1 << (dropped - 1))
    coarse = jax.lax.bitcast_convert_type(bits & -(1 << dropped), jnp.float32)
    return coarse.astype(dtype), (numbers - coarse).astype(dtype)


def put(tiles: Any, numbers: jax.Array) -> None:
    """Writes both parts of numbers to shared memory, for products."""
    for tile, part in zip(tiles, parts(numbers, tiles[0].dtype), strict=True):
        tile[...] = part
    plgpu.commit_smem()


def _three_products(here: Target, left: Any, right: Any) -> jax.Array:
    """The product of numbers in two parts; what the two low ones have in common is below 16 bits."""
    (found,) = accumulate(here, (None, [(left[1], right[0]), (left[0], right[1]), (left[0], right[0])]))
    return found


def both(here: Target, left: Any, right: Any) -> jax.Array:
    """The product with a left factor in two parts."""
    (found,) = accumulate(here, (None, [(left[1], right), (left[0], right)]))
    return found


def multiplied(here: Target, factor: Any, source: Any, chunk: Any, target: Any, out: Any, scale: float = 1.0) -> None:
    """Writes the products of a factor in two parts with the tiles of a chunk, by way of a tile of shared memory."""

    def step(turn: Any, tile: Any, _: Any) -> tuple[()]:
        product = times(scale, both(here, factor, tile))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out[...] = product.astype(out.dtype)
        send(out, target.at[:, pl.ds(turn[0] * TILE, TILE)])
        return ()

    along_channels(step, target.shape[1] // TILE, (), (source, lambda part: (chunk, part)))
