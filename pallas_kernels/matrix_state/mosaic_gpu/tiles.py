"""Tiles of 64 x 64, of steps of a chunk and channels: the parts of the kernels for Hopper.

A program is one warpgroup. Its tiles have the layouts that wgmma needs, in shared memory and in registers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.matrix_state.decays import COUNT

TILE = 64
"""Steps of a chunk, and channels processed at once: the rows of one wgmma."""

# The kernels name the layouts of all registers; inferring them takes minutes for so many rows and columns.
NAMED_LAYOUTS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def fill(array: jax.Array) -> jax.Array:
    """Pads the last two axes with zeros to whole tiles."""
    return jnp.pad(array, ((0, 0), (0, 0), (0, -array.shape[2] % TILE), (0, -array.shape[3] % TILE)))


def along_channels(
    step: Callable[..., Any], count: int, *sources: tuple[Any, Callable[..., Any]], sums: int = 2
) -> Any:
    """Sums over tiles of channels into `sums` tiles, starting from zero."""
    return plgpu.emit_pipeline(
        step,
        grid=(count,),
        in_specs=[plgpu.BlockSpec((TILE, TILE), index, transforms=swizzled(ref.dtype)) for ref, index in sources],
        max_concurrent_steps=min(2, count),
        init_carry=(zeros(),) * sums,
    )(*(ref for ref, _ in sources))


def swizzled(dtype: Any) -> tuple[Any, ...]:
    """The layout in shared memory that suits copies and products: rows of 128 bytes."""
    tiled = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    return tiled, plgpu.SwizzleTransform(128)  # type: ignore[abstract]


def shared_tile(dtype: Any) -> Any:
    return plgpu.SMEM((TILE, TILE), dtype, transforms=swizzled(dtype))


def load(tile: Any) -> jax.Array:
    return plgpu.load(tile, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def write(tile: Any, out: Any) -> None:
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, out)
    plgpu.wait_smem_to_gmem(0)


def group(head: Any, heads: int, array: jax.Array) -> Any:
    """The group of an array that a head reads."""
    return jax.lax.div(head, heads // array.shape[1])


def iota(axis: int, origin: Any = 0) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=plgpu.Layout.WGMMA) + origin


def hidden_zero(numbers: Any) -> Any:
    """A zero, read from the padding of `numbers`, so that the assembler does not know it.

    Masks that are factors of products in registers are made from an `iota` with this origin. Where it knows that some
    registers of a factor are constants, it can leave them unset: seen with ptxas 13.0 and 13.5.
    """
    return numbers[COUNT - 1, 0].astype(jnp.int32)


def zeros() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((TILE, TILE), jnp.float32), plgpu.Layout.WGMMA)


def along(numbers: Any, row: int, axis: int) -> jax.Array:
    """One of the rows along an axis of a tile."""
    vector = plgpu.load(numbers.at[row], layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, (TILE, TILE), (axis,)), plgpu.Layout.WGMMA)
