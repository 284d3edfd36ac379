"""The Pallas form of `softmax_topk` for GPUs: tiles in the registers of warps, of which the largest scores are kept."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels import mosaic_gpu, tiling
from pallas_kernels.softmax.warps import Rows
from pallas_kernels.softmax_topk import passes, vjp
from pallas_kernels.target import Target


def refusal(here: Target, x: jax.Array, k: int) -> str | None:
    """Why the call cannot be served; `None`: it can."""
    return passes.refusal(x, k) or mosaic_gpu.capability_refusal(here)


@functools.lru_cache
def form(here: Target) -> Callable[[jax.Array, int], vjp.Outputs]:
    """The differentiable form on a device."""
    return vjp.differentiable(passes.by_tiles(functools.partial(_sweep, here)))


def _sweep(here: Target, x: jax.Array, k: int) -> passes.Kept:
    n, o = x.shape
    # A row for each warp, and an entry for each of its threads.
    x = jnp.pad(x, ((0, max(0, 4 - n)), (0, max(0, 32 - o))))
    rows = Rows(*x.shape, tiling.softmax_topk_hopper(*x.shape, x.dtype.itemsize))
    width = pl.cdiv(k + 1, 32) * 32
    kept_rows = Rows(x.shape[0], rows.tiles * width, tiling.WarpsTile(rows.tile.rows, width, 1, 1))
    kept = mosaic_gpu.kernel(
        functools.partial(_tile, o, k, rows, kept_rows),
        here,
        out_type=tuple(jax.ShapeDtypeStruct((x.shape[0], kept_rows.o), dtype) for dtype in (jnp.float32, jnp.int32)),
        grid=(rows.blocks, rows.tiles),
        grid_names=('rows', 'tiles'),
    )(x)
    return passes.Kept(*(array[:n].reshape(n, rows.tiles, width) for array in kept))


def _tile(o: int, k: int, rows: Rows, kept_rows: Rows, x_ref: Any, scores_ref: Any, indices_ref: Any) -> None:
    row, j = rows.first(jax.lax.axis_index('rows')), jax.lax.axis_index('tiles')
    columns = rows.columns(j)
    counts = (columns < o) & (columns >= j * rows.tile.columns)
    x = jnp.where(counts, rows.read(x_ref, row, j).astype(jnp.float32), -math.inf)
    kept = passes.keep(
        x,
        jnp.where(counts, columns, passes.NOWHERE),
        kept_rows.columns(0),
        k,
        over_row=lambda reduce, array: reduce(array, axis=1),
        along_row=lambda numbers, like: jax.lax.broadcast_in_dim(numbers, like.shape, (0,)),
    )
    for ref, array in zip((scores_ref, indices_ref), kept, strict=True):
        kept_rows.write(ref, row, j, array)
