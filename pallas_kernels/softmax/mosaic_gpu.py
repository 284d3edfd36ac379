"""The Pallas form of `softmax` for GPUs: rows in the registers of warps, straight from memory, without shared memory.

Many small blocks of threads keep the memory busy. Rows that fit are read once; longer ones in two sweeps, the first of
which computes their statistics. Where a row is not a multiple of the tile, the last tile overlaps the one before.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import tiling, tuning
from pallas_kernels.arguments import rows_refusal
from pallas_kernels.cost import Cost, Passes, softmax
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.softmax import vjp, warps
from pallas_kernels.target import Target


def refusal(here: Target, x: jax.Array) -> str | None:
    """The reason why the call cannot be served, or `None`."""
    return rows_refusal(x) or launch.capability_refusal(here)


def tiled_by(here: Target, x: jax.Array) -> str:
    """Where the tile of a call is from, see `tuning.source`."""
    n, o = x.size // x.shape[-1], x.shape[-1]
    return tuning.source(here, tiling.softmax_hopper, n, max(o, warps.shortest(n)), x.dtype.itemsize)


@functools.lru_cache
def form(here: Target) -> vjp.Forward:
    """The differentiable form for a device."""
    return vjp.differentiable(
        vjp.on_rows(functools.partial(_forward, here)), vjp.on_rows(functools.partial(_backward, here))
    )


def _cost(x: jax.Array) -> Passes:
    """The costs of rows `n o`."""
    return softmax(n=x.shape[0], o=x.shape[1], implementation='mosaic_gpu').executed


def _forward(here: Target, x: jax.Array, where: jax.Array | None) -> jax.Array:
    arrays = (x,) if where is None else (x, where.astype(jnp.int8))
    return _by_rows(here, _weights, arrays, name='softmax_forward', cost=_cost(x).forward, outside=-math.inf)


def _backward(here: Target, y: jax.Array, dy: jax.Array) -> jax.Array:
    return _by_rows(here, _gradients, (y, dy), name='softmax_backward', cost=_cost(y).backward, outside=0)


def _by_rows(
    here: Target, body: Callable[..., None], arrays: tuple[jax.Array, ...], *, name: str, cost: Cost, outside: float
) -> jax.Array:
    n, o = arrays[0].shape
    first, *others = arrays
    behind = ((0, 0), (0, max(0, warps.shortest(n) - o)))
    padded = (jnp.pad(first, behind, constant_values=outside), *(jnp.pad(array, behind) for array in others))
    sizes = n, padded[0].shape[1], first.dtype.itemsize
    rows = warps.TiledRows(*sizes[:2], tuning.tile(here, tiling.softmax_hopper, *sizes))
    run = launch.kernel(
        functools.partial(body, rows),
        here,
        name=name,
        cost=cost,
        out_type=jax.ShapeDtypeStruct(padded[0].shape, first.dtype),
        grid=(rows.blocks,),
        grid_names=('rows',),
        # Exact exponentials would take as long as the memory traffic.
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return run(*padded)[:, :o]


def _weights(rows: warps.TiledRows, x_ref: Any, *refs: Any) -> None:
    *where_ref, y_ref = refs
    row = rows.first(jax.lax.axis_index('rows'))

    def read(j: Any) -> jax.Array:
        scores = rows.read(x_ref, row, j).astype(jnp.float32)
        for ref in where_ref:
            scores = jnp.where(rows.read(ref, row, j).astype(jnp.float32) > 0, scores, -math.inf)
        return scores

    def add_up(j: Any, statistics: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        scores = rows.fresh(j, scores_of(j), -math.inf)
        before, total = statistics
        highest = jnp.maximum(before, jnp.max(scores, axis=1))
        pivot = vjp.pivot(highest)
        terms = jnp.exp(scores - rows.spread(pivot))
        return highest, total * jnp.exp(before - pivot) + jnp.sum(terms, axis=1)

    def write(j: Any, _: None) -> None:
        weights = jnp.exp(scores_of(j) - rows.spread(pivot)) * rows.spread(factor)
        rows.write(y_ref, row, j, weights)

    scores_of = rows.held(read)
    highest, total = rows.each(add_up, (rows.constant(-math.inf), rows.constant(0)))
    pivot, factor = vjp.pivot(highest), 1 / jnp.where(highest == -math.inf, 1, total)
    rows.each(write, None)


def _gradients(rows: warps.TiledRows, y_ref: Any, dy_ref: Any, dx_ref: Any) -> None:
    row = rows.first(jax.lax.axis_index('rows'))

    def read(j: Any) -> tuple[jax.Array, jax.Array]:
        return rows.read(y_ref, row, j).astype(jnp.float32), rows.read(dy_ref, row, j).astype(jnp.float32)

    def add_up(j: Any, moment: jax.Array) -> jax.Array:
        y, dy = arrays_of(j)
        return moment + jnp.sum(rows.fresh(j, y * dy, 0), axis=1)

    def write(j: Any, _: None) -> None:
        y, dy = arrays_of(j)
        rows.write(dx_ref, row, j, y * (dy - rows.spread(moment)))

    arrays_of = rows.held(read)
    moment = rows.each(add_up, rows.constant(0))
    rows.each(write, None)
