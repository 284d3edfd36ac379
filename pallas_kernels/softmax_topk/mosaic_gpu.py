"""The Pallas form of `softmax_topk` for GPUs: tiles in the registers of warps, keeping the largest scores."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels import cost, tiling
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.softmax.vjp import pivot
from pallas_kernels.softmax.warps import TiledRows
from pallas_kernels.softmax_topk import selection, vjp, xla
from pallas_kernels.target import Target


def refusal(here: Target, x: jax.Array, k: int) -> str | None:
    """The reason why the call cannot be served, or `None`."""
    reason = selection.refusal(x, k) or launch.capability_refusal(here)
    if reason is not None:
        return reason
    rows = _searched(x.size // x.shape[-1], x.shape[-1], x.dtype.itemsize)
    return launch.grid_refusal(tiles=rows.tiles, rows=rows.blocks)


@functools.lru_cache
def form(here: Target) -> Callable[[jax.Array, int], vjp.Outputs]:
    """The differentiable form for a device."""
    return vjp.differentiable(functools.partial(_sweep, here), xla.replace)


def _sweep(here: Target, x: jax.Array, k: int) -> vjp.Largest:
    """Tiles are searched by different blocks of threads, so that even a single row is fast."""
    rows = x.reshape(-1, x.shape[-1])
    n, o = rows.shape
    scores, indices = _tiles(here, rows, k)
    highest, totals = scores[..., 0], scores[..., k]
    # Ordered by tile, then by position, equal scores are in order of their indices.
    best, where = xla.largest(scores[..., :k].reshape(n, -1), k)
    indices = jnp.take_along_axis(indices[..., :k].reshape(n, -1), where, axis=1)
    total = jnp.sum(totals * jnp.exp(highest - pivot(best[:, :1])), axis=1, keepdims=True)
    # Rows with NaN have no order, but their indices must be valid.
    found = vjp.Largest(best, jnp.minimum(indices, o - 1), total)
    return vjp.Largest(*(array.reshape(*x.shape[:-1], -1) for array in found))


def _searched(n: int, o: int, itemsize: int) -> TiledRows:
    """Rows `n o` as kernels search them: one for each warp, and no tile of fewer columns than are asked for."""
    n, o = max(n, 4), max(o, selection.MOST)
    return TiledRows(n, o, tiling.softmax_topk_hopper(n, o, itemsize))


def _tiles(here: Target, x: jax.Array, k: int) -> list[jax.Array]:
    """The scores and indices of the largest of each tile, `n tiles w`; number k of the scores is the tile's sum."""
    n, o = x.shape
    width = pl.cdiv(k + 1, 32) * 32
    rows = _searched(n, o, x.dtype.itemsize)
    # What fills a tile is no entry of the row.
    x = jnp.pad(x, ((0, rows.n - n), (0, rows.o - o)))
    kept = TiledRows(x.shape[0], rows.tiles * width, tiling.WarpsTile(rows.tile.rows, width, 1, 1))
    found = launch.kernel(
        functools.partial(_tile, o, k, rows, kept),
        here,
        out_type=tuple(jax.ShapeDtypeStruct((kept.n, kept.o), dtype) for dtype in (jnp.float32, jnp.int32)),
        name='softmax_topk',
        cost=cost.softmax_topk(n=rows.n, o=rows.o, k=k).model.forward,
        # CUDA's first axis, the last of these, takes the most blocks.
        grid=(rows.tiles, rows.blocks),
        grid_names=('tiles', 'rows'),
    )(x)
    return [array[:n].reshape(n, rows.tiles, width) for array in found]


def _tile(o: int, k: int, rows: TiledRows, kept: TiledRows, x_ref: Any, scores_ref: Any, indices_ref: Any) -> None:
    row, j = rows.first(jax.lax.axis_index('rows')), jax.lax.axis_index('tiles')
    columns = rows.columns(j)
    counts = (columns < o) & (columns >= j * rows.tile.columns)
    x = jnp.where(counts, rows.read(x_ref, row, j).astype(jnp.float32), -math.inf)
    columns = jnp.where(counts, columns, selection.NOWHERE)
    total = jnp.sum(jnp.exp(x - rows.spread(pivot(jnp.max(x, axis=1)))), axis=1)
    places = kept.columns(0)
    scores, indices = selection.largest(
        [(x, columns)],
        places,
        k,
        over_row=lambda reduce, array: reduce(array, axis=1),
        along_row=lambda numbers, like: jax.lax.broadcast_in_dim(numbers, like.shape, (0,)),
    )
    kept.write(scores_ref, row, j, jnp.where(places == k, kept.spread(total), scores))
    kept.write(indices_ref, row, j, indices)
