"""Tiles of 64 x 64, of steps of a chunk and channels: the parts of the kernels for Hopper.

A program is one warpgroup. Its tiles have the layouts that wgmma needs, in shared memory and in registers.

Ordinary reads of a pipeline's slot must finish before a commit of the same step, after which a copy may refill it.
Products that are waited for need none.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.matrix_state.decays import COUNT

TILE = 64
"""Steps of a chunk, and channels processed at once: the rows of one wgmma."""

SLOTS = 2
"""The tiles of every source of `along_channels` that shared memory holds; of more tiles, copies refill them."""

# The kernels name the layouts of all registers; inferring them takes minutes for so many rows and columns.
NAMED_LAYOUTS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the axis of heads is in arrays of four: before time, `b h t k`, or after it, `b t h k`, as callers have it.

    A kernel reads a tile of either as it lies; only XLA would have to transpose the second.
    """

    heads: int

    def sizes(self, array: Any) -> tuple[int, int, int, int]:
        """Batch, heads, steps and channels."""
        b, *axes, k = array.shape
        return b, axes[self.heads - 1], axes[2 - self.heads], k

    def shape(self, b: int, h: int, t: int, k: int) -> tuple[int, int, int, int]:
        return (b, h, t, k) if self.heads == 1 else (b, t, h, k)

    def of_head(self, ref: Any, at: Any, head: Any) -> Any:
        """The steps and channels of one head, by reference."""
        return ref.at[at, head] if self.heads == 1 else ref.at[at, :, head]

    def of_group(self, ref: Any, at: Any, head: Any, heads: int, array: jax.Array) -> Any:
        """The steps and channels that a head reads of an array whose groups heads share, by reference."""
        return self.of_head(ref, at, jax.lax.div(head, heads // array.shape[self.heads]))

    def fill(self, array: jax.Array) -> jax.Array:
        """Pads steps and channels with zeros to whole tiles."""
        ends = [0, 0, 0, -array.shape[3] % TILE]
        ends[3 - self.heads] = -array.shape[3 - self.heads] % TILE
        return jnp.pad(array, [(0, end) for end in ends])

    def cut(self, array: jax.Array, t: int, k: int) -> jax.Array:
        """Removes padding."""
        return array[:, :, :t, :k] if self.heads == 1 else array[:, :t, :, :k]

    def heads_first(self, array: jax.Array) -> jax.Array:
        return jnp.moveaxis(array, self.heads, 1)

    def from_heads_first(self, array: jax.Array) -> jax.Array:
        return jnp.moveaxis(array, 1, self.heads)


HEADS_FIRST, TIME_FIRST = Layout(1), Layout(2)


def fill(array: jax.Array) -> jax.Array:
    """Pads the last two axes with zeros to whole tiles."""
    return HEADS_FIRST.fill(array)


def along_channels(
    step: Callable[..., Any], count: int, start: tuple[jax.Array, ...], *sources: tuple[Any, Callable[..., Any]]
) -> Any:
    """Sums over tiles of channels, onto `start`."""
    return plgpu.emit_pipeline(
        step,
        grid=(count,),
        in_specs=[plgpu.BlockSpec((TILE, TILE), index, transforms=swizzled(ref.dtype)) for ref, index in sources],
        max_concurrent_steps=min(SLOTS, count),
        init_carry=start,
    )(*(ref for ref, _ in sources))


def swizzled(dtype: Any) -> tuple[Any, ...]:
    """The layout in shared memory that suits copies and products: rows of 128 bytes."""
    tiled = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    return tiled, plgpu.SwizzleTransform(128)  # type: ignore[abstract]


def shared_tile(dtype: Any) -> Any:
    return plgpu.SMEM((TILE, TILE), dtype, transforms=swizzled(dtype))


def send(tile: Any, out: Any) -> None:
    """Starts a copy to global memory, of what all threads wrote."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, out)


def load(tile: Any) -> jax.Array:
    return plgpu.load(tile, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def write(tile: Any, out: Any) -> None:
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, out)
    plgpu.wait_smem_to_gmem(0)


def iota(axis: int, origin: Any = 0) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=plgpu.Layout.WGMMA) + origin


def hidden_zero(numbers: Any) -> Any:
    """A zero, read from the padding of `numbers`, so that the assembler does not know it.

    Masks that are factors of products in registers are made from an `iota` with this origin. Where it knows that some
    registers of a factor are constants, it can leave them unset: seen with ptxas 13.0 and 13.5.
    """
    return numbers[COUNT - 1, 0].astype(jnp.int32)


def zeros(width: int = TILE) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((TILE, width), jnp.float32), plgpu.Layout.WGMMA)


def zeros_of_rows() -> jax.Array:
    """One for every row of a tile, as sums over its columns."""
    return plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def along(numbers: Any, row: int, axis: int, width: int = TILE) -> jax.Array:
    """One of the rows along an axis of a tile of so many columns."""
    return spread(numbers.at[row], axis, width)


def spread(numbers: Any, axis: int, width: int = TILE) -> jax.Array:
    """Numbers in shared memory along an axis of a tile of so many columns."""
    vector = plgpu.load(numbers, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, (TILE, width), (axis,)), plgpu.Layout.WGMMA)
