"""The Pallas form of `softmax_topk` for TPUs: one sweep over tiles, of which the largest scores are kept."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mosaic_tpu, tiling
from pallas_kernels.softmax_topk import passes, vjp
from pallas_kernels.target import Target


def refusal(here: Target, x: jax.Array, k: int) -> str | None:
    """Why the call cannot be served; `None`: it can."""
    return passes.refusal(x, k)


@functools.lru_cache
def form(here: Target) -> Callable[[jax.Array, int], vjp.Outputs]:
    """The differentiable form on a device."""
    return vjp.differentiable(passes.by_tiles(functools.partial(_sweep, here)))


def _sweep(here: Target, x: jax.Array, k: int) -> passes.Kept:
    n, o = x.shape
    tile = tiling.softmax_topk_tpu(n, o)
    tiles = pl.cdiv(o, tile.columns)
    kept = mosaic_tpu.call(
        functools.partial(_tile, o, k),
        here,
        grid=(pl.cdiv(n, tile.rows), tiles),
        in_specs=[pl.BlockSpec((tile.rows, tile.columns), lambda i, j: (i, j))],
        out_specs=[pl.BlockSpec((tile.rows, mosaic_tpu.LANES), lambda i, j: (i, j))] * 2,
        out_shape=[jax.ShapeDtypeStruct((n, tiles * mosaic_tpu.LANES), dtype) for dtype in (jnp.float32, jnp.int32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'parallel'), vmem_limit_bytes=tiling.VMEM
        ),
    )(x)
    return passes.Kept(*(array.reshape(n, tiles, mosaic_tpu.LANES) for array in kept))


def _tile(o: int, k: int, x_ref: Any, scores_ref: Any, indices_ref: Any) -> None:
    columns = pl.program_id(1) * x_ref.shape[1] + jax.lax.broadcasted_iota(jnp.int32, x_ref.shape, 1)
    x = jnp.where(columns < o, x_ref[...].astype(jnp.float32), -math.inf)
    columns = jnp.where(columns < o, columns, passes.NOWHERE)
    places = jax.lax.broadcasted_iota(jnp.int32, scores_ref.shape, 1)
    kept = passes.keep(
        x,
        columns,
        places,
        k,
        over_row=lambda reduce, array: reduce(array, axis=1, keepdims=True),
        along_row=lambda numbers, like: numbers,
    )
    scores_ref[...], indices_ref[...] = kept
