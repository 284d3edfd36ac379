"""Rows in the registers of four GPU warps, read and written without shared memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import tiling


def shortest(n: int) -> int:
    """The minimum length of `n` rows in which each thread has a part."""
    return 32 if n >= 4 else 128


@dataclasses.dataclass(frozen=True)
class TiledRows:
    """An array `n o` and its tile. Where rows are not a multiple of it, the last tile overlaps the one before."""

    n: int
    o: int
    tile: tiling.WarpsTile

    @property
    def blocks(self) -> int:
        """Of rows."""
        return pl.cdiv(self.n, self.tile.rows)

    @property
    def tiles(self) -> int:
        """Of a row."""
        return pl.cdiv(self.o, self.tile.columns)

    @property
    def layout(self) -> Any:
        """Neighbours in a row belong to one thread, groups of them to the lanes of a warp; warps share rows or not."""
        vector = self.tile.vector
        if self.tile.warps == 1:
            return plgpu.Layout.TILED(plgpu.Tiling(((4, 32 * vector), (vector,))), (-3,), (-2,), -1)
        return plgpu.Layout.TILED(plgpu.Tiling(((1, 128 * vector), (32 * vector,), (vector,))), (-3,), (-2,), -1)

    def first(self, block: Any) -> Any:
        """The first row of a block."""
        return jnp.minimum(block * self.tile.rows, self.n - self.tile.rows)

    def start(self, j: Any) -> Any:
        """The first column of tile `j`."""
        return jnp.minimum(j * self.tile.columns, self.o - self.tile.columns)

    def read(self, ref: Any, row: Any, j: Any) -> jax.Array:
        """Tile `j` of the block that begins at `row`."""
        return plgpu.load(self._part(ref, row, j), layout=self.layout, optimized=False)

    def write(self, ref: Any, row: Any, j: Any, tile: jax.Array) -> None:
        """Writes tile `j`, in the type of the array."""
        _store(self._part(ref, row, j), tile.astype(ref.dtype))

    def columns(self, j: Any) -> jax.Array:
        """The column of every entry of tile `j`."""
        shape = (self.tile.rows, self.tile.columns)
        return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=self.layout) + self.start(j)

    def fresh(self, j: Any, tile: jax.Array, otherwise: float) -> jax.Array:
        """Replaces the overlap of tile `j` with the previous tile."""
        if self.o % self.tile.columns == 0:
            return tile
        return jnp.where(self.columns(j) >= j * self.tile.columns, tile, otherwise)

    def constant(self, number: float) -> jax.Array:
        """A number for each row of a block."""
        return plgpu.layout_cast(jnp.full(self.tile.rows, number, jnp.float32), self.layout.reduce(1))

    def spread(self, numbers: jax.Array) -> jax.Array:
        """Repeats the number of each row along it."""
        return jax.lax.broadcast_in_dim(numbers, (self.tile.rows, self.tile.columns), (0,))

    def each(self, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        """Runs `step(j, carry)` for every tile of the rows."""
        return step(0, carry) if self.tiles == 1 else jax.lax.fori_loop(0, self.tiles, step, carry)

    def held(self, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns `read`, a function of `j`, cached such that whole rows are read once."""
        if self.tiles > 1:
            return read
        tile = read(0)
        return lambda j: tile

    def _part(self, ref: Any, row: Any, j: Any) -> Any:
        return ref.at[pl.ds(row, self.tile.rows), pl.ds(self.start(j), self.tile.columns)]


def _store(ref: Any, tile: jax.Array) -> None:
    """Writes a tile, down to two bytes a thread, which newer versions of JAX must be told to allow."""
    if hasattr(plgpu, 'store'):
        plgpu.store(ref, tile, optimized=False)
    else:
        ref[...] = tile
