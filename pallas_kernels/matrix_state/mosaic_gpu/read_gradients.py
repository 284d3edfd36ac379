"""The kernel that computes the gradients of queries or keys, for all chunks at once."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.cost import Cost
from pallas_kernels.matrix_state.decays import COUNT
from pallas_kernels.matrix_state.mosaic_gpu.reads import GRID, Direction, decays_between, times
from pallas_kernels.matrix_state.mosaic_gpu.tiles import (
    NAMED_LAYOUTS,
    TILE,
    TIME_FIRST,
    along,
    along_channels,
    iota,
    load,
    shared_tile,
    write,
    zeros,
)
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate, multiply
from pallas_kernels.target import Target


def gradients(
    here: Target,
    direction: Direction,
    x: jax.Array,
    y: jax.Array,
    dz: jax.Array,
    z: jax.Array,
    states: jax.Array,
    numbers: jax.Array,
    out_dtype: Any,
    scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """dx, `scale ((dz z^T * decays) y + reads (dz state^T))` of every chunk, `b t h k`, as x, y, z and dz.

    Also `x dx` summed over channels, `b h 2 t`: the parts from other steps of the chunk and from the state.
    """
    b, h, count, k, v = states.shape
    dtype, parts = x.dtype, k // TILE

    def body(
        x_ref: Any, y_ref: Any, dz_ref: Any, z_ref: Any, states_ref: Any, rows_ref: Any, dx_ref: Any, sums_ref: Any
    ) -> None:
        at, head, chunk, column = (jax.lax.axis_index(name) for name in GRID)
        steps, channels = pl.ds(chunk * TILE, TILE), pl.ds(column * TILE, TILE)

        def of(ref: Any, array: jax.Array) -> Any:
            return TIME_FIRST.of_group(ref, at, head, h, array)

        def step(_: Any, dz_tile: Any, z_tile: Any, state: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            dscores, reads = sums
            return accumulate(
                here,
                (dscores, [(dz_tile, z_tile.transpose((1, 0)))]),
                (reads, [(dz_tile, state.transpose((1, 0)))]),
            )

        def run(x_tile: Any, y_tile: Any, numbers: Any, dx: Any, within: Any, across: Any, arrived: Any) -> None:
            plgpu.copy_gmem_to_smem(of(x_ref, x).at[steps, channels], x_tile, arrived)
            plgpu.copy_gmem_to_smem(of(y_ref, y).at[steps, channels], y_tile, arrived)
            plgpu.copy_gmem_to_smem(rows_ref.at[at, head, chunk], numbers, arrived)
            dscores, reads = along_channels(
                step,
                v // TILE,
                (zeros(), zeros()),
                (of(dz_ref, dz), lambda part: (chunk, part)),
                (of(z_ref, z), lambda part: (chunk, part)),
                (states_ref.at[at, head, chunk], lambda part: (column, part)),
            )
            plgpu.barrier_wait(arrived)
            reads = times(scale, reads * along(numbers, direction.reads, 0))
            dscores = times(scale, dscores * decays_between(numbers, direction))
            others = iota(0) != iota(1)
            scores = multiply(here, x_tile, y_tile.transpose((1, 0)))
            within[...] = jnp.sum(jnp.where(others, scores * dscores, 0), axis=1)
            across[...] = jnp.sum(load(x_tile) * reads, axis=1)
            dx[...] = multiply(here, dscores.astype(dtype), y_tile, reads).astype(out_dtype)
            write(dx, TIME_FIRST.of_head(dx_ref, at, head).at[steps, channels])
            write(within, sums_ref.at[at, head, column, 0, steps])
            write(across, sums_ref.at[at, head, column, 1, steps])

        pl.run_scoped(
            run,
            shared_tile(dtype),
            shared_tile(dtype),
            plgpu.SMEM((COUNT, TILE), jnp.float32),
            shared_tile(out_dtype),
            plgpu.SMEM((TILE,), jnp.float32),
            plgpu.SMEM((TILE,), jnp.float32),
            plgpu.Barrier(num_arrivals=3),
        )

    dx, sums = launch.kernel(
        body,
        here,
        out_type=(
            jax.ShapeDtypeStruct(TIME_FIRST.shape(b, h, count * TILE, k), out_dtype),
            jax.ShapeDtypeStruct((b, h, parts, 2, count * TILE), jnp.float32),
        ),
        name='matrix_state_read_gradients',
        cost=Cost(
            flops=b * h * count * TILE * (2 * TILE * v * parts + 2 * k * v + 4 * TILE * k),
            exponentials=b * h * count * TILE * TILE * parts,
        ),
        grid=(b, h, count, parts),
        grid_names=GRID,
        compiler_params=NAMED_LAYOUTS,
    )(x, y, dz, z, states, numbers)
    return dx, jnp.sum(sums, axis=2).reshape(b, h, 2, count, TILE)
