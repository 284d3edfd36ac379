"""The Pallas form of `softmax` for TPUs: two sweeps over the tiles of each block of rows.

The first computes the statistics of the rows, the second writes. Rows that fit in VMEM are one tile, which stays there
between the sweeps: they are read once.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tiling
from pallas_kernels.arguments import rows_refusal
from pallas_kernels.cost import Cost, Passes, softmax
from pallas_kernels.mosaic_tpu import launch
from pallas_kernels.softmax import vjp
from pallas_kernels.target import Target


def refusal(here: Target, x: jax.Array) -> str | None:
    """The reason why the call cannot be served, or `None`."""
    return launch.generation_refusal(here) or rows_refusal(x)


@functools.lru_cache
def form(here: Target) -> vjp.Forward:
    """The differentiable form for a device."""
    return vjp.differentiable(
        vjp.on_rows(functools.partial(_forward, here)), vjp.on_rows(functools.partial(_backward, here))
    )


def _cost(x: jax.Array) -> Passes:
    """The costs of rows `n o`."""
    return softmax(n=x.shape[0], o=x.shape[1], implementation='mosaic_tpu').executed


def _forward(here: Target, x: jax.Array, where: jax.Array | None) -> jax.Array:
    arrays = (x,) if where is None else (x, where.astype(jnp.int8))
    return _sweeps(here, _weights, arrays, name='softmax_forward', cost=_cost(x).forward, statistics=2)


def _backward(here: Target, y: jax.Array, dy: jax.Array) -> jax.Array:
    return _sweeps(here, _gradients, (y, dy), name='softmax_backward', cost=_cost(y).backward, statistics=1)


def _sweeps(
    here: Target, body: Callable[..., None], arrays: tuple[jax.Array, ...], *, name: str, cost: Cost, statistics: int
) -> jax.Array:
    (n, o), dtype = arrays[0].shape, arrays[0].dtype
    arrays = tuple(launch.widened(array) for array in arrays)
    tile = tiling.softmax_tpu(n, o)
    columns = pl.cdiv(o, tile.columns)
    run = launch.call(
        functools.partial(body, o % tile.columns),
        here,
        name=name,
        cost=cost,
        grid=(pl.cdiv(n, tile.rows), 2, columns),
        in_specs=[pl.BlockSpec((tile.rows, tile.columns), lambda i, sweep, j: (i, j))] * len(arrays),
        # The first sweep stays at the first output tile, which is not written out before the second one has filled it.
        out_specs=pl.BlockSpec((tile.rows, tile.columns), lambda i, sweep, j: (i, sweep * j)),
        out_shape=jax.ShapeDtypeStruct((n, o), arrays[0].dtype),
        scratch_shapes=[pltpu.VMEM((tile.rows, 1), jnp.float32)] * statistics,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary', 'arbitrary'), vmem_limit_bytes=tiling.VMEM
        ),
    )
    return run(*arrays).astype(dtype)


def _weights(ragged: int, x_ref: Any, *refs: Any) -> None:
    *where_ref, y_ref, highest, total = refs
    scores = x_ref[...].astype(jnp.float32)
    for ref in where_ref:
        scores = jnp.where(ref[...].astype(jnp.float32) > 0, scores, -math.inf)
    scores = _inside(ragged, scores, -math.inf)

    @pl.when(pl.program_id(1) == 0)
    def add_up() -> None:
        @pl.when(pl.program_id(2) == 0)
        def start() -> None:
            highest[...] = jnp.full_like(highest, -math.inf)
            total[...] = jnp.zeros_like(total)

        before = highest[...]
        highest[...] = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        pivot = vjp.pivot(highest[...])
        total[...] = total[...] * jnp.exp(before - pivot) + jnp.sum(jnp.exp(scores - pivot), axis=1, keepdims=True)

    @pl.when(pl.program_id(1) == 1)
    def write() -> None:
        whole = jnp.where(highest[...] == -math.inf, 1, total[...])
        y_ref[...] = (jnp.exp(scores - vjp.pivot(highest[...])) / whole).astype(y_ref.dtype)


def _gradients(ragged: int, y_ref: Any, dy_ref: Any, dx_ref: Any, moment: Any) -> None:
    y, dy = (_inside(ragged, ref[...].astype(jnp.float32), 0) for ref in (y_ref, dy_ref))

    @pl.when(pl.program_id(1) == 0)
    def add_up() -> None:
        @pl.when(pl.program_id(2) == 0)
        def start() -> None:
            moment[...] = jnp.zeros_like(moment)

        moment[...] += jnp.sum(y * dy, axis=1, keepdims=True)

    @pl.when(pl.program_id(1) == 1)
    def write() -> None:
        dx_ref[...] = (y * (dy - moment[...])).astype(dx_ref.dtype)


def _inside(ragged: int, tile: jax.Array, otherwise: float) -> jax.Array:
    """Replaces what a tile has beyond the end of the rows; `ragged` are the columns of the last tile, or 0: all."""
    if ragged == 0:
        return tile
    is_last = pl.program_id(2) == pl.num_programs(2) - 1
    column = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 1)
    return jnp.where(column < jnp.where(is_last, ragged, tile.shape[1]), tile, otherwise)
