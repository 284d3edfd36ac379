"""The kernel for gradients of keys and values of `linear_attention` on Hopper GPUs, with one decay a head and step.

Both read queries, gradients of outputs, and the gradient of the state after a chunk, which a program reads once.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.cost import Cost
from pallas_kernels.matrix_state.decays import WRITE
from pallas_kernels.matrix_state.mosaic_gpu.reads import BACKWARD, decay_gradients, decays_between, times
from pallas_kernels.matrix_state.mosaic_gpu.tiles import (
    NAMED_LAYOUTS,
    TILE,
    TIME_FIRST,
    along,
    iota,
    load,
    swizzled,
    write,
    zeros,
)
from pallas_kernels.matrix_state.mosaic_gpu.turns import Turns
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate, multiply
from pallas_kernels.target import Target

MOST = 2 * TILE
"""The most key channels: a program holds those of a chunk, and sums of their gradients in registers."""

GRID = ('b', 'h', 'chunk')


def serves(q: jax.Array, k: jax.Array) -> bool:
    """Whether the kernel does: few channels, and one head of queries for all that share a key, which is read once."""
    return k.shape[3] <= MOST and k.shape[TIME_FIRST.heads] % q.shape[TIME_FIRST.heads] == 0


def key_value_gradients(
    here: Target,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    dstates: jax.Array,
    rows: jax.Array,
    dv_type: Any,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dk, summed over the heads that share a key, dv of every head, and what keys give to the gradients of log decays.

        dV = (scale Q K^T * D)^T dO + writes (K dS),   dK = (scale dO V^T * D)^T Q + writes (V dS^T)

    with decays D and the gradient dS of the state after the chunk, `dstates`, `b h l k v`, which the scale is in
    already. All others are `b t h k`. The last is `b h l c`, of every head (see `reads.decay_gradients`). A program
    goes over the heads that share a key, and sums in float32.
    """
    b, h, count, width_of_keys, channels = dstates.shape
    groups, dtype = k.shape[TIME_FIRST.heads], k.dtype
    turns = Turns(h, h // groups, channels, dtype)
    width = turns.width
    # dV may overwrite the tile of dO: nothing reads it afterwards, and no copy refills it.
    in_place = turns.count == 1 and dv_type == dtype

    def body(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        do_ref: Any,
        dstates_ref: Any,
        rows_ref: Any,
        dk_ref: Any,
        dv_ref: Any,
        sums_ref: Any,
    ) -> None:
        at, group, chunk = (jax.lax.axis_index(name) for name in GRID)
        steps = pl.ds(chunk * TILE, TILE)

        def run(k_tile: Any, q_tile: Any, dv_tile: Any, within: Any, across: Any, total: Any, arrived: Any) -> None:
            def step(indices: Any, v_tile: Any, do_tile: Any, dstate: Any, numbers: Any, carry: Any) -> tuple[Any, ...]:
                (member, turn), (sums, *partial) = indices, carry
                if turns.count == 1:
                    plgpu.barrier_wait(arrived)
                dscores, *written = partial or (None,)
                scores, dscores = accumulate(
                    here,
                    (None, [(k_tile, q_tile.transpose((1, 0)))]),
                    (dscores, [(v_tile, do_tile.transpose((1, 0)))]),
                )
                between = times(scale, decays_between(numbers, BACKWARD))
                weights = (scores * between).astype(dtype)
                weighed = functools.partial(_weighed, scores, between, dtype)
                # As early as can be, for fewer registers.
                early = weighed(dscores) if turns.per_head == 1 else None
                before = multiply(here, k_tile, dstate) * along(numbers, WRITE, 0, width)
                dv = multiply(here, weights, do_tile, before)
                out = do_tile if dv_tile is None else dv_tile
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out[...] = dv.astype(dv_type)
                plgpu.commit_smem()
                part = pl.ds(turn * width, width)
                plgpu.copy_smem_to_gmem(out, TIME_FIRST.of_head(dv_ref, at, turns.head(group, member)).at[steps, part])
                (found,) = accumulate(here, (*(written or (None,)), [(v_tile, dstate.transpose((1, 0)))]))

                def end(sums: jax.Array, dscores: jax.Array, written: jax.Array) -> jax.Array:
                    """Adds what a head gives, once its products over all channels of the state are summed."""
                    written = written * along(numbers, WRITE, 0, width_of_keys)
                    of_queries, within[...] = early or weighed(dscores)
                    across[...] = jnp.sum(load(k_tile) * written, axis=1)
                    plgpu.commit_smem()
                    total[...] = decay_gradients(numbers, BACKWARD, within, across)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(total, sums_ref.at[at, turns.head(group, member), steps])
                    return multiply(here, of_queries, q_tile, sums + written)

                return turns.carried(turn, (sums, dscores, found), end, lambda: (zeros(), zeros(width_of_keys)))

            plgpu.copy_gmem_to_smem(TIME_FIRST.of_head(k_ref, at, group).at[steps], k_tile, arrived)
            plgpu.copy_gmem_to_smem(TIME_FIRST.of_group(q_ref, at, group, groups, q).at[steps], q_tile, arrived)
            if turns.count > 1:
                plgpu.barrier_wait(arrived)
            specs = [
                turns.of_steps(v, group, chunk),
                turns.of_steps(do, group, chunk),
                turns.of_states(group, chunk, 0, width_of_keys),
                turns.of_decays(group, chunk),
            ]
            refs = [v_ref.at[at], do_ref.at[at], dstates_ref.at[at], rows_ref.at[at]]
            nothing = () if turns.per_head == 1 else (zeros(), zeros(width_of_keys))
            total, *_ = turns.run(step, specs, refs, (zeros(width_of_keys), *nothing))
            k_tile[...] = total.astype(dtype)
            write(k_tile, TIME_FIRST.of_head(dk_ref, at, group).at[steps])

        def tile(size: int, dtype: Any) -> Any:
            return plgpu.SMEM((TILE, size), dtype, transforms=swizzled(dtype))

        pl.run_scoped(
            run,
            tile(width_of_keys, dtype),
            tile(width_of_keys, dtype),
            None if in_place else tile(width, dv_type),
            *[plgpu.SMEM((TILE,), jnp.float32)] * 3,
            plgpu.Barrier(num_arrivals=2),
        )

    within = TILE * ((1 + turns.per_head) * width_of_keys + 2 * channels)
    dk, dv, sums = launch.kernel(
        body,
        here,
        out_type=(
            jax.ShapeDtypeStruct(k.shape, dtype),
            jax.ShapeDtypeStruct(do.shape, dv_type),
            jax.ShapeDtypeStruct((b, h, count * TILE), jnp.float32),
        ),
        name='linear_attention_gradients',
        cost=Cost(
            flops=2 * b * h * count * TILE * (within + 2 * width_of_keys * channels),
            exponentials=b * h * count * TILE * TILE * turns.per_head,
        ),
        grid=(b, groups, count),
        grid_names=GRID,
        compiler_params=NAMED_LAYOUTS,
    )(q, k, v, do, dstates, rows)
    return dk, dv, sums.reshape(b, h, count, TILE)


def _weighed(scores: jax.Array, between: jax.Array, dtype: Any, dscores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The factor of queries in dK, and its products with scores, summed over queries."""
    dscores = dscores * between
    products = jnp.sum(jnp.where(iota(0) != iota(1), scores * dscores, 0), axis=1)
    return dscores.astype(dtype), products
