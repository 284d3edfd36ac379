"""The kernel that runs over the chunks of a sequence in order, from the first to the last or back."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import tiling
from pallas_kernels.cost import Cost
from pallas_kernels.matrix_state.decays import COUNT, FACTOR
from pallas_kernels.matrix_state.mosaic_gpu.reads import Direction, times
from pallas_kernels.matrix_state.mosaic_gpu.tiles import (
    HEADS_FIRST,
    NAMED_LAYOUTS,
    TILE,
    TIME_FIRST,
    along,
    load,
    shared_tile,
    swizzled,
    write,
)
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.products_sm90 import multiply
from pallas_kernels.target import Target


def sweep(
    here: Target,
    direction: Direction,
    x: jax.Array,
    y: jax.Array,
    numbers: jax.Array,
    state: jax.Array,
    scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """The state, `l k v`, before every chunk, and the last one.

    A program carries one tile of the state, in float32 registers, through all chunks: `S = factor S + x^T (adds y)`.
    x and y are `b t h k`. `numbers` are rows, whose `adds` are multiplied by the scale, or the factors of key channels,
    `b h l k`; x, then `b h t k`, includes the write decays, and `adds` is one.
    """
    b, h, k, v = state.shape
    dtype, by_channel = x.dtype, numbers.ndim == 4
    of_x = HEADS_FIRST if by_channel else TIME_FIRST
    count = y.shape[1] // TILE

    def body(x_ref: Any, y_ref: Any, rows_ref: Any, state_ref: Any, states_ref: Any, final_ref: Any) -> None:
        at, head = jax.lax.axis_index('b'), jax.lax.axis_index('h')
        row, column = jax.lax.axis_index('row'), jax.lax.axis_index('column')
        tile = (pl.ds(row * TILE, TILE), pl.ds(column * TILE, TILE))

        def place(turn: Any) -> Any:
            return count - 1 - turn if direction.backward else turn

        def run(scaled: Any, kept: Any, final: Any) -> None:
            def step(turn: Any, x_tile: Any, y_tile: Any, numbers: Any, state: jax.Array) -> jax.Array:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                kept[...] = state.astype(dtype)
                # All that is read of slots is read before the commit, see `tiles`.
                factor = along(numbers, 0, 0) if by_channel else along(numbers.at[0], FACTOR, 0)
                if not by_channel:
                    adds = along(numbers.at[0], direction.adds, 0)
                    scaled[...] = (load(y_tile) * times(scale, adds)).astype(dtype)
                plgpu.commit_smem()
                rows_of = pl.ds(place(turn[0]) * k + row * TILE, TILE)
                plgpu.copy_smem_to_gmem(kept, states_ref.at[at, head, rows_of, tile[1]])
                added = y_tile if by_channel else scaled
                return multiply(here, x_tile.transpose((1, 0)), added, state * factor)

            final[...] = plgpu.emit_pipeline(
                step,
                grid=(count,),
                in_specs=(
                    plgpu.BlockSpec((TILE, TILE), lambda turn: (place(turn), row), transforms=swizzled(x.dtype)),
                    plgpu.BlockSpec((TILE, TILE), lambda turn: (place(turn), column), transforms=swizzled(x.dtype)),
                    plgpu.BlockSpec((1, TILE), lambda turn: (place(turn), row))
                    if by_channel
                    else plgpu.BlockSpec((1, COUNT, TILE), lambda turn: (place(turn), 0, 0)),
                ),
                max_concurrent_steps=min(tiling.PIPELINE_HOPPER, count),
                init_carry=plgpu.load(state_ref.at[at, head, *tile], layout=plgpu.Layout.WGMMA, optimized=False),
            )(of_x.of_group(x_ref, at, head, h, x), TIME_FIRST.of_group(y_ref, at, head, h, y), rows_ref.at[at, head])
            write(final, final_ref.at[at, head, *tile])

        pl.run_scoped(
            run,
            shared_tile(dtype),
            shared_tile(dtype),
            shared_tile(jnp.float32),
        )

    states, final = launch.kernel(
        body,
        here,
        out_type=(jax.ShapeDtypeStruct((b, h, count * k, v), dtype), jax.ShapeDtypeStruct(state.shape, jnp.float32)),
        name='linear_attention_sweep',
        cost=Cost(b * h * count * k * v * (2 * TILE + 1)),
        grid=(b, h, k // TILE, v // TILE),
        grid_names=('b', 'h', 'row', 'column'),
        compiler_params=NAMED_LAYOUTS,
    )(x, y, numbers, state)
    return states.reshape(b, h, count, k, v), final
