"""The inverse of the triangular matrices of chunks on Hopper GPUs, in kernels and as kernels of its own with gradients.

The diagonal blocks of 2, 4, 8, ... steps are inverted in products alone, each from two of the size before, as in
`matrix_state.inverse`: substitution, block by block, which stays accurate where powers of the matrix would grow. A
factor is two bfloat16 parts, a product three of these. Of 16 bits errors leave 12 where keys are most alike; what the
inverse is multiplied with then keeps 10.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.cost import Cost
from pallas_kernels.matrix_state.mosaic_gpu.tiles import NAMED_LAYOUTS, TILE, iota, load, shared_tile, write
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate
from pallas_kernels.target import Target

DOUBLINGS = 5
"""From blocks of 2 steps to one of 64."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def inverse(here: Target, strict: jax.Array) -> jax.Array:
    """Returns `(I + strict)^{-1}`, float32 `b h l c c`, of matrices that are zero on the diagonal and above."""
    return _call(here, 'matrix_state_inverse', 2 * DOUBLINGS, solved, strict)


def _save(here: Target, strict: jax.Array) -> tuple[jax.Array, jax.Array]:
    found = inverse(here, strict)
    return found, found


def _pull(here: Target, found: jax.Array, dfound: jax.Array) -> tuple[jax.Array]:
    return (_call(here, 'matrix_state_inverse_gradients', 2, _gradients, found, dfound),)


inverse.defvjp(_save, _pull)


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


def _gradients(here: Target, first: Any, second: Any, third: Any, found: jax.Array, dfound: jax.Array) -> jax.Array:
    put(first, dfound)
    put(second, found)
    put(third, _three_products(here, first, _transposed(second)))
    dstrict = _three_products(here, _transposed(second), third)
    return jnp.where(iota(0) > iota(1), -dstrict, 0.0)


def _transposed(tiles: Any) -> list[Any]:
    return [tile.transpose((1, 0)) for tile in tiles]


def _call(here: Target, name: str, products: int, compute: Callable[..., jax.Array], *matrices: jax.Array) -> jax.Array:
    """The matrix that a program of its own computes for every chunk, from those of the chunk."""
    b, h, chunks, *_ = matrices[0].shape
    given = [matrix.reshape(b, h, chunks * TILE, TILE) for matrix in matrices]

    def body(*refs: Any) -> None:
        at, head, chunk = (jax.lax.axis_index(name) for name in ('b', 'h', 'chunk'))
        *taken, out = (ref.at[at, head, pl.ds(chunk * TILE, TILE)] for ref in refs)

        def run(tiles: Any, factors: Any, arrived: Any) -> None:
            for ref, tile in zip(taken, tiles, strict=True):
                plgpu.copy_gmem_to_smem(ref, tile, arrived)
            plgpu.barrier_wait(arrived)
            # The first number of a matrix that is zero on the diagonal.
            origin = [taken[0][0, 0].astype(jnp.int32)] if compute is solved else []
            found = compute(here, *factors, *origin, *(load(tile) for tile in tiles))
            # Every thread has read the numbers in whose place it writes.
            tiles[0][...] = found
            write(tiles[0], out)

        pl.run_scoped(
            run,
            [shared_tile(jnp.float32)] * len(given),
            [[shared_tile(jnp.bfloat16)] * 2] * 3,
            plgpu.Barrier(num_arrivals=len(given)),
        )

    found = launch.kernel(
        body,
        here,
        out_type=jax.ShapeDtypeStruct(given[0].shape, jnp.float32),
        name=name,
        cost=Cost(flops=3 * products * 2 * b * h * chunks * TILE**3),
        grid=(b, h, chunks),
        grid_names=('b', 'h', 'chunk'),
        compiler_params=NAMED_LAYOUTS,
    )(*given)
    return found.reshape(matrices[0].shape)
