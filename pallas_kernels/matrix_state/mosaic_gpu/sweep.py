"""The kernel that runs over the chunks of a sequence in order, from the first to the last or back."""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import tiling, tuning
from pallas_kernels.cost import Cost
from pallas_kernels.matrix_state.mosaic_gpu.tiles import (
    HEADS_FIRST,
    NAMED_LAYOUTS,
    TILE,
    Layout,
    along,
    load,
    shared_tile,
    swizzled,
    write,
)
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate
from pallas_kernels.target import Target


class Sweep(NamedTuple):
    """The inputs of the chunks of one sweep, 16-bit; with heads before time or after it, as the sweep is told.

    Attributes:
      reads: multiplied with the state and added to the values, `b h t k`.
      adds: keys under which these sums are added to the state, `b h t k`.
      values: `b h t v`.
      more: other keys, `b h t k`, and values, `b h t v`, added to the state; or nothing.
    """

    reads: jax.Array
    adds: jax.Array
    values: jax.Array
    more: tuple[jax.Array, ...]


def sweep(
    here: Target,
    given: Sweep,
    factor: jax.Array,
    state: jax.Array,
    *,
    backward: bool,
    layout: Layout = HEADS_FIRST,
    of_more: Layout | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state, `b h l k v`, before every chunk, the sums, in the layout of the inputs, and the last state.

    `sums = values + reads S`, `S = factor S + adds^T sums`, plus `more`, whose values are in the layout `of_more` where
    heads may share them; `factor` is `b h l 1 k` or, for all key channels, `b h l 1 1`. A program carries a column of
    tiles of the state, all its key channels, in float32 registers, through all chunks.
    """
    b, h, k, v = state.shape
    dtype, parts = given.values.dtype, k // TILE
    count = layout.sizes(given.values)[2] // TILE
    stages = tuning.tile(here, tiling.delta_rule_hopper, k, 2 + bool(given.more))
    assert stages is not None
    factors = jnp.broadcast_to(factor, (b, h, count, 1, k)).reshape(b, h, count, parts, TILE)

    def body(reads_ref: Any, adds_ref: Any, values_ref: Any, *others: Any) -> None:
        more_refs, (factors_ref, state_ref, states_ref, sums_ref, final_ref) = others[:-5], others[-5:]
        at, head, column = (jax.lax.axis_index(name) for name in ('b', 'h', 'column'))
        channels = pl.ds(column * TILE, TILE)

        def place(turn: Any) -> Any:
            return count - 1 - turn if backward else turn

        def tiles(ref: Any, index: Any, *, shared: Any = None) -> tuple[Any, plgpu.BlockSpec]:
            transforms = swizzled(dtype)
            spec = plgpu.BlockSpec((TILE, TILE), lambda turn: (place(turn), index), transforms=transforms)
            if shared is not None and of_more is not None:
                return of_more.of_group(ref, at, head, h, shared), spec
            return layout.of_head(ref, at, head), spec

        def tile_of(part: int) -> tuple[Any, Any]:
            return pl.ds(part * TILE, TILE), channels

        def run(kept: Any, sums_tile: Any) -> None:
            def step(turn: Any, factors: Any, values: Any, *rest: Any) -> tuple[jax.Array, ...]:
                *keys, state = rest
                reads, adds, more = keys[:parts], keys[parts : 2 * parts], keys[2 * parts :]
                chunk = place(turn[0])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for part in range(parts):
                    kept[part][...] = state[part].astype(dtype)
                # All that is read of slots is read before the commit, see `tiles`.
                sums = load(values)
                held = [state[part] * along(factors.at[0], part, 0) for part in range(parts)]
                plgpu.commit_smem()
                for part in range(parts):
                    channel = pl.ds(chunk * k + part * TILE, TILE)
                    plgpu.copy_smem_to_gmem(kept[part], states_ref.at[at, head, channel, channels])
                before = [(sums, list(zip(reads, kept, strict=True)))]
                if more:
                    before += [(held[part], [(more[part].transpose((1, 0)), more[parts])]) for part in range(parts)]
                    sums, *held = accumulate(here, *before)
                else:
                    (sums,) = accumulate(here, *before)
                sums_tile[...] = sums.astype(dtype)
                plgpu.commit_smem()
                sums_of = layout.of_head(sums_ref, at, head).at[pl.ds(chunk * TILE, TILE), channels]
                plgpu.copy_smem_to_gmem(sums_tile, sums_of)
                return accumulate(
                    here, *((held[part], [(adds[part].transpose((1, 0)), sums_tile)]) for part in range(parts))
                )

            sources = [
                (factors_ref.at[at, head], plgpu.BlockSpec((1, parts, TILE), lambda turn: (place(turn), 0, 0))),
                tiles(values_ref, column),
                *(tiles(ref, part) for ref in (reads_ref, adds_ref, *more_refs[:1]) for part in range(parts)),
                *(tiles(ref, column, shared=array) for ref, array in zip(more_refs[1:], given.more[1:], strict=True)),
            ]
            last = plgpu.emit_pipeline(
                step,
                grid=(count,),
                in_specs=[spec for _, spec in sources],
                max_concurrent_steps=min(stages, count),
                init_carry=tuple(
                    plgpu.load(state_ref.at[at, head, *tile_of(part)], layout=plgpu.Layout.WGMMA, optimized=False)
                    for part in range(parts)
                ),
            )(*(ref for ref, _ in sources))
            plgpu.wait_smem_to_gmem(0)

            def end(final: Any) -> None:
                for part in range(parts):
                    final[...] = last[part]
                    write(final, final_ref.at[at, head, *tile_of(part)])

            # In place of the chunks, which are over.
            pl.run_scoped(end, shared_tile(jnp.float32))

        pl.run_scoped(run, [shared_tile(dtype)] * parts, shared_tile(dtype))

    states, sums, final = launch.kernel(
        body,
        here,
        out_type=(
            jax.ShapeDtypeStruct((b, h, count * k, v), dtype),
            jax.ShapeDtypeStruct(layout.shape(b, h, count * TILE, v), dtype),
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
        ),
        name='matrix_state_sweep',
        cost=Cost(2 * b * h * count * TILE * k * v * (2 + bool(given.more))),
        grid=(b, h, v // TILE),
        grid_names=('b', 'h', 'column'),
        compiler_params=NAMED_LAYOUTS,
    )(given.reads, given.adds, given.values, *given.more, factors, state)
    return states.reshape(b, h, count, k, v), sums, final


def tiled_by(
    here: Target, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array | None, state: jax.Array, *_: jax.Array
) -> str:
    """Where the tiles of a call are from, see `tuning.source`: a table if those of either direction are."""
    channels = -(-state.shape[2] // TILE) * TILE
    found = [tuning.source(here, tiling.delta_rule_hopper, channels, keys) for keys in (2, 3)]
    return tuning.TABLE if tuning.TABLE in found else tuning.HEURISTIC
