"""The kernel that computes the weights of chunks with decays per key channel; see `channel_decays`."""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cost import Cost, halved_products
from pallas_kernels.matrix_state import heads
from pallas_kernels.matrix_state.decays import COUNT, RUN
from pallas_kernels.matrix_state.mosaic_gpu.channel_decays import (
    HALVES,
    Steps,
    Weights,
    decay_over,
    halves_of,
    level_of,
    levels,
    put_decays,
    same_block,
    to_ends,
    within_blocks,
)
from pallas_kernels.matrix_state.mosaic_gpu.tiles import (
    HEADS_FIRST,
    NAMED_LAYOUTS,
    TILE,
    Layout,
    along,
    hidden_zero,
    iota,
    load,
    shared_tile,
    swizzled,
    write,
    zeros,
)
from pallas_kernels.matrix_state.mosaic_gpu.weight_gradients import weight_gradients
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate
from pallas_kernels.target import Target


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 3, 4))
def weights(
    here: Target, erases: bool, steps: Steps, among: DTypeLike | None = None, layout: Layout = HEADS_FIRST
) -> Weights:
    """Returns the weights of all chunks; those of reads by keys only if they erase.

    `among` is the type of the weights among steps; `None`: that of q. `layout` is that of `steps`.
    """
    return _find(here, erases, steps, among, layout)


def _save(here: Target, erases: bool, steps: Steps, among: DTypeLike | None, layout: Layout) -> tuple[Weights, Steps]:
    return weights(here, erases, steps, among, layout), steps


def _pull(
    here: Target, erases: bool, among: DTypeLike | None, layout: Layout, steps: Steps, gradients: Weights
) -> tuple[Steps]:
    dq, dk, dlog_decay = weight_gradients(here, steps, gradients, layout)
    dq, dk = (heads.summed(array, found, layout.heads) for array, found in ((steps.q, dq), (steps.k, dk)))
    return (Steps(dq, dk, dlog_decay, jnp.zeros_like(steps.rows)),)


weights.defvjp(_save, _pull)


def _find(here: Target, erases: bool, steps: Steps, among: DTypeLike | None, layout: Layout) -> Weights:
    b, h, t, k = layout.sizes(steps.log_decay)
    dtype = steps.q.dtype

    def out(channels: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((b, h, t, channels), dtype)

    outs = Weights(among=out(TILE, among or dtype), q=out(k, dtype), writes=out(k, dtype))
    if erases:
        outs = outs._replace(erased=out(TILE, jnp.float32), k=out(k, dtype))
    arrays, structure = jax.tree.flatten(outs)

    def body(q_ref: Any, k_ref: Any, decay_ref: Any, levels_ref: Any, rows_ref: Any, *out_refs: Any) -> None:
        at, head, chunk = (jax.lax.axis_index(name) for name in ('b', 'h', 'chunk'))
        found = jax.tree.unflatten(structure, [ref.at[at, head, pl.ds(chunk * TILE, TILE)] for ref in out_refs])

        def run(tiles: Weights, keys: Any, apart: Any, numbers: Any, levels: Any, arrived: Any) -> None:
            plgpu.copy_gmem_to_smem(rows_ref.at[at, head, chunk], numbers, arrived)
            plgpu.copy_gmem_to_smem(levels_ref.at[at, head, chunk], levels, arrived)
            plgpu.barrier_wait(arrived)
            origin, (coarse, fine) = hidden_zero(numbers), apart

            def step(turn: Any, q_tile: Any, k_tile: Any, log_decay: Any, scores: Any) -> Any:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                put_decays(apart, log_decay)
                decay = functools.partial(decay_over, here, coarse, fine)
                level = level_of(levels, turn[0])

                def block(scores: Any) -> Any:
                    to, back = within_blocks(here, coarse, fine, level, origin)
                    keys[...] = (load(k_tile) * back).astype(dtype)
                    plgpu.commit_smem()
                    read = keys.transpose((1, 0))
                    readers = [(load(tile) * to).astype(dtype) for tile in (q_tile, k_tile)[: 1 + erases]]
                    found = accumulate(here, *((None, [(reader, read)]) for reader in readers))
                    reader, other, near = iota(0, origin), iota(1), same_block(level, origin)
                    masks = near & (reader >= other), near & (reader > other)
                    return _added(scores, found, masks)

                def halves(turn: Any, scores: Any) -> Any:
                    between, pairs = halves_of(jax.lax.shift_left(jnp.int32(1), turn), origin)
                    decayed = decay(between)
                    keys[...] = (load(k_tile) * decayed).astype(dtype)
                    plgpu.commit_smem()
                    read, queries = keys.transpose((1, 0)), (load(q_tile) * decayed).astype(dtype)
                    found = accumulate(here, *((None, [(reader, read)]) for reader in (queries, keys)[: 1 + erases]))
                    return _added(scores, found, (pairs, pairs))

                scores = jax.lax.fori_loop(level, HALVES, halves, block(scores))
                reach, writes = (decay(steps) * along(numbers, row, 0) for steps, row in to_ends(origin))
                tiles.q[...] = (load(q_tile) * reach).astype(dtype)
                if erases:
                    tiles.k[...] = (load(k_tile) * reach).astype(dtype)
                tiles.writes[...] = (load(k_tile) * writes).astype(dtype)
                plgpu.commit_smem()
                channels = pl.ds(turn[0] * TILE, TILE)
                for tile, ref in ((tiles.q, found.q), (tiles.k, found.k), (tiles.writes, found.writes)):
                    if ref is not None:
                        plgpu.copy_smem_to_gmem(tile, ref.at[:, channels])
                return scores

            sources = (
                layout.of_group(q_ref, at, head, h, steps.q),
                layout.of_group(k_ref, at, head, h, steps.k),
                layout.of_head(decay_ref, at, head),
            )
            sums = plgpu.emit_pipeline(
                step,
                grid=(k // TILE,),
                in_specs=[
                    plgpu.BlockSpec((TILE, TILE), lambda part: (chunk, part), transforms=swizzled(ref.dtype))
                    for ref in sources
                ],
                # More would leave no shared memory for a second program.
                max_concurrent_steps=1,
                init_carry=(zeros(),) * (1 + erases),
            )(*sources)
            one_run = along(numbers, RUN, 0) == along(numbers, RUN, 1)
            outs = ((tiles.among, found.among), (tiles.erased, found.erased))
            for scores, (tile, ref) in zip(sums, outs, strict=False):
                tile[...] = jnp.where(one_run, scores, 0).astype(ref.dtype)
                write(tile, ref)

        pl.run_scoped(
            run,
            jax.tree.map(lambda array: shared_tile(array.dtype), outs),
            shared_tile(dtype),
            [shared_tile(jnp.bfloat16)] * 2,
            plgpu.SMEM((COUNT, TILE), jnp.float32),
            plgpu.SMEM((1, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        )

    found = launch.kernel(
        body,
        here,
        out_type=tuple(arrays),
        name='matrix_state_weights',
        cost=Cost(
            flops=2 * b * h * t * k * TILE * halved_products(erases=erases)[0],
            exponentials=b * h * t * k * (HALVES + 4),
        ),
        grid=(b, h, t // TILE),
        grid_names=('b', 'h', 'chunk'),
        compiler_params=NAMED_LAYOUTS,
    )(steps.q, steps.k, steps.log_decay, levels(steps.log_decay, dtype, layout), steps.rows)
    return jax.tree.unflatten(structure, found)


def _added(scores: tuple[jax.Array, ...], found: tuple[jax.Array, ...], masks: tuple[jax.Array, ...]) -> Any:
    """Adds scores where the masks say."""
    return tuple(
        total + jnp.where(mask, products, 0) for total, products, mask in zip(scores, found, masks, strict=False)
    )
