"""The Pallas form of `softmax_topk` for TPUs: one sweep over tiles, keeping the largest scores."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import cost, tiling
from pallas_kernels.mosaic_tpu import launch
from pallas_kernels.softmax.vjp import pivot
from pallas_kernels.softmax_topk import selection, vjp
from pallas_kernels.target import Target


def refusal(here: Target, x: jax.Array, k: int) -> str | None:
    """The reason why the call cannot be served, or `None`."""
    return launch.generation_refusal(here) or selection.refusal(x, k)


@functools.lru_cache
def form(here: Target) -> Callable[[jax.Array, int], vjp.Outputs]:
    """The differentiable form for a device."""
    return vjp.differentiable(functools.partial(_sweep, here), _replace)


def _replace(array: jax.Array, indices: jax.Array, entries: jax.Array) -> jax.Array:
    """The same as `xla.replace` without a scatter, which a TPU does entry by entry."""
    columns = jax.lax.broadcasted_iota(jnp.int32, array.shape, array.ndim - 1)
    for r in range(indices.shape[-1]):
        array = jnp.where(columns == indices[..., r : r + 1], entries[..., r : r + 1], array)
    return array


def _sweep(here: Target, x: jax.Array, k: int) -> vjp.Largest:
    rows = launch.widened(x.reshape(-1, x.shape[-1]))
    n, o = rows.shape
    tile = tiling.softmax_topk_tpu(n, o)
    scores, indices = launch.call(
        functools.partial(_tile, o, k),
        here,
        name='softmax_topk',
        cost=cost.softmax_topk(n=n, o=o, k=k).model.forward,
        grid=(pl.cdiv(n, tile.rows), pl.cdiv(o, tile.columns)),
        in_specs=[pl.BlockSpec((tile.rows, tile.columns), lambda i, j: (i, j))],
        out_specs=[pl.BlockSpec((tile.rows, tiling.LANES), lambda i, j: (i, 0))] * 2,
        out_shape=[jax.ShapeDtypeStruct((n, tiling.LANES), dtype) for dtype in (jnp.float32, jnp.int32)],
        scratch_shapes=[pltpu.VMEM((tile.rows, 1), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=tiling.VMEM
        ),
    )(rows)
    # Rows with NaN have no order, but their indices must be valid.
    found = vjp.Largest(scores[:, :k], jnp.minimum(indices[:, :k], o - 1), scores[:, k : k + 1])
    return vjp.Largest(*(array.reshape(*x.shape[:-1], -1) for array in found))


def _tile(o: int, k: int, x_ref: Any, scores_ref: Any, indices_ref: Any, total: Any) -> None:
    """The results hold the largest so far, in order, from tile to tile; number k of the scores is finally the sum."""
    j = pl.program_id(1)

    @pl.when(j == 0)
    def start() -> None:
        scores_ref[...] = jnp.full_like(scores_ref, -math.inf)
        indices_ref[...] = jnp.full_like(indices_ref, selection.NOWHERE)
        total[...] = jnp.zeros_like(total)

    columns = j * x_ref.shape[1] + jax.lax.broadcasted_iota(jnp.int32, x_ref.shape, 1)
    x = jnp.where(columns < o, x_ref[...].astype(jnp.float32), -math.inf)
    places = jax.lax.broadcasted_iota(jnp.int32, scores_ref.shape, 1)
    before = scores_ref[:, :1]
    scores, indices = selection.largest(
        [(scores_ref[...], indices_ref[...]), (x, jnp.where(columns < o, columns, selection.NOWHERE))],
        places,
        k,
        over_row=lambda reduce, array: reduce(array, axis=1, keepdims=True),
        along_row=lambda numbers, like: numbers,
    )
    highest = pivot(scores[:, :1])
    total[...] = total[...] * jnp.exp(before - highest) + jnp.sum(jnp.exp(x - highest), axis=1, keepdims=True)
    is_last = j == pl.num_programs(1) - 1
    scores_ref[...] = jnp.where((places == k) & is_last, total[...], scores)
    indices_ref[...] = indices
