"""The kernel that computes the gradients of `weights`."""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.cost import Cost, halved_products
from pallas_kernels.matrix_state.decays import COUNT, KEPT, RUN
from pallas_kernels.matrix_state.mosaic_gpu.channel_decays import (
    HALVES,
    Steps,
    Weights,
    decay_over,
    halves_of,
    level_of,
    levels,
    ones_where,
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
    write,
)
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate, multiply
from pallas_kernels.target import Target


def weight_gradients(
    here: Target, steps: Steps, gradients: Weights, layout: Layout = HEADS_FIRST, ends: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and those of the log decays of every head, as `steps` lie; in float32 where heads share the argument.

    `ends`, `b h l k`, float32, are those of the log of `channel_decays.factor`, where they are to be in these too.

    The decay of step t is in the reads by queries, or erasing keys, from t on of writes before t and of the state
    before the chunk, and in the writes of earlier keys to the state after it, so its gradient is a sum of `q dq` and `k
    dk`. A query's own key, whose parts would cancel, is left out.
    """
    b, h, t, size = layout.sizes(steps.log_decay)
    dtype, erases = steps.q.dtype, gradients.erased is not None
    gradients = jax.tree.map(lambda array: array.astype(dtype), gradients)
    arrays = jax.tree.leaves(gradients)
    over_chunks = [] if ends is None else [ends.reshape(b, h, t // TILE, size // TILE, TILE)]
    types = [dtype if array.shape[layout.heads] == h else jnp.float32 for array in (steps.q, steps.k)]

    def body(q_ref: Any, k_ref: Any, decay_ref: Any, levels_ref: Any, rows_ref: Any, *others: Any) -> None:
        gradient_refs, rest = others[: len(arrays)], others[len(arrays) :]
        ends_ref, out_refs = rest[:-3], rest[-3:]
        at, head, chunk, part = (jax.lax.axis_index(name) for name in ('b', 'h', 'chunk', 'part'))
        time, channels = pl.ds(chunk * TILE, TILE), pl.ds(part * TILE, TILE)

        def run(
            given: Any,
            apart: Any,
            gradients: Weights,
            scores: Any,
            factors: Any,
            wide: Any,
            numbers: Any,
            levels: Any,
            over: Any,
            arrived: Any,
        ) -> None:
            sources = (
                layout.of_group(q_ref, at, head, h, steps.q),
                layout.of_group(k_ref, at, head, h, steps.k),
                layout.of_head(decay_ref, at, head),
            )
            for ref, tile in zip(sources, (*given, wide), strict=True):
                plgpu.copy_gmem_to_smem(ref.at[time, channels], tile, arrived)
            for ref, array, tile in zip(gradient_refs, arrays, jax.tree.leaves(gradients), strict=True):
                columns = channels if array.shape[3] == size else slice(None)
                plgpu.copy_gmem_to_smem(ref.at[at, head, time, columns], tile, arrived)
            plgpu.copy_gmem_to_smem(rows_ref.at[at, head, chunk], numbers, arrived)
            plgpu.copy_gmem_to_smem(levels_ref.at[at, head, chunk], levels, arrived)
            for ref, tile in zip(ends_ref, over, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[at, head, chunk, pl.ds(part, 1)], tile, arrived)
            plgpu.barrier_wait(arrived)
            (q_tile, k_tile), (coarse, fine) = given, apart
            put_decays(apart, wide)
            decay = functools.partial(decay_over, here, coarse, fine)
            origin = hidden_zero(numbers)
            step, other, level = iota(0, origin), iota(1), level_of(levels, part)

            def one_run() -> jax.Array:
                return along(numbers, RUN, 0) == along(numbers, RUN, 1)

            def put(tile: Any, numbers: jax.Array) -> None:
                tile[...] = numbers.astype(dtype)
                plgpu.commit_smem()

            def block() -> tuple[jax.Array, jax.Array]:
                to, back = within_blocks(here, coarse, fine, level, origin)
                seen = same_block(level, origin) & (step > other) & one_run()
                factors[...] = (load(k_tile) * back).astype(dtype)
                if erases:
                    put(scores, jnp.where(seen, load(gradients.erased), 0))
                    wide[...] = to * multiply(here, scores, factors)
                put(scores, jnp.where(seen, load(gradients.among), 0))
                dq = to * multiply(here, scores, factors)
                put(factors, load(q_tile) * to)
                dk = back * multiply(here, scores.transpose((1, 0)), factors)
                if erases:
                    scores[...] = jnp.where(seen, load(gradients.erased), 0).astype(dtype)
                    put(factors, load(k_tile) * to)
                    dk = dk + back * multiply(here, scores.transpose((1, 0)), factors)
                return dq, dk

            def halves(turn: Any, sums: Any) -> Any:
                dq, dk = sums
                between, pairs = halves_of(jax.lax.shift_left(jnp.int32(1), turn), origin)
                decayed, seen = decay(between), pairs & one_run()
                factors[...] = (load(k_tile) * decayed).astype(dtype)
                if erases:
                    put(scores, jnp.where(seen, load(gradients.erased), 0))
                    written, read = accumulate(
                        here, (None, [(scores.transpose((1, 0)), factors)]), (None, [(scores, factors)])
                    )
                    dk = dk + decayed * written
                    # No registers are left to hold it.
                    wide[...] = load(wide) + decayed * read
                put(scores, jnp.where(seen, load(gradients.among), 0))
                dq = dq + decayed * multiply(here, scores, factors)
                put(factors, load(q_tile) * decayed)
                return dq, dk + decayed * multiply(here, scores.transpose((1, 0)), factors)

            dq, dk = jax.lax.fori_loop(level, HALVES, halves, block())
            reach, writes = (decay(steps) * along(numbers, row, 0) for steps, row in to_ends(origin))
            dq = dq + reach * load(gradients.q)
            later = load(q_tile) * dq - load(k_tile) * dk
            if erases:
                erasing = load(wide) + reach * load(gradients.k)
                later = later + load(k_tile) * erasing
                dk = dk + erasing
            writes = writes * load(gradients.writes)

            def total(steps: jax.Array, terms: jax.Array, onto: jax.Array | None) -> jax.Array:
                # In two parts, in place of the decays, which are no longer needed.
                coarse[...] = terms.astype(jnp.bfloat16)
                fine[...] = (terms - load(coarse)).astype(jnp.bfloat16)
                plgpu.commit_smem()
                ones = ones_where(steps)
                (found,) = accumulate(here, (onto, [(ones, coarse), (ones, fine)]))
                return found

            before = total(step > other, load(k_tile) * writes, None)
            of_steps = total((step <= other) & one_run(), later, before) * along(numbers, KEPT, 0)
            wide[...] = sum((along(tile, 0, 1) for tile in over), of_steps)
            outs = [layout.of_head(ref, at, head).at[time, channels] for ref in out_refs]
            write(wide, outs[2])
            own = jnp.where(step == other, load(gradients.among), 0).astype(dtype)
            for total_of, factor, ref in ((dq, k_tile, outs[0]), (dk + writes, q_tile, outs[1])):
                tile = factors if ref.dtype == dtype else wide
                tile[...] = multiply(here, own, factor, total_of).astype(ref.dtype)
                write(tile, ref)

        pl.run_scoped(
            run,
            [shared_tile(dtype)] * 2,
            [shared_tile(jnp.bfloat16)] * 2,
            jax.tree.map(lambda array: shared_tile(array.dtype), gradients),
            shared_tile(dtype),
            shared_tile(dtype),
            shared_tile(jnp.float32),
            plgpu.SMEM((COUNT, TILE), jnp.float32),
            plgpu.SMEM((1, TILE), jnp.float32),
            [plgpu.SMEM((1, TILE), jnp.float32)] * len(over_chunks),
            plgpu.Barrier(num_arrivals=5 + len(arrays) + len(over_chunks)),
        )

    return launch.kernel(
        body,
        here,
        out_type=tuple(jax.ShapeDtypeStruct(layout.shape(b, h, t, size), dtype) for dtype in (*types, jnp.float32)),
        name='matrix_state_weight_gradients',
        cost=Cost(
            flops=2 * b * h * t * size * TILE * halved_products(erases=erases)[1],
            exponentials=b * h * t * size * (HALVES + 4),
        ),
        grid=(b, h, t // TILE, size // TILE),
        grid_names=('b', 'h', 'chunk', 'part'),
        compiler_params=NAMED_LAYOUTS,
    )(steps.q, steps.k, steps.log_decay, levels(steps.log_decay, dtype, layout), steps.rows, *arrays, *over_chunks)
