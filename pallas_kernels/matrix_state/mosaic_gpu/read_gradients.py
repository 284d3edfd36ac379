"""The kernel that computes the gradients of queries or keys, for all chunks at once."""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.cost import Cost
from pallas_kernels.matrix_state.mosaic_gpu.reads import GRID, Direction, decay_gradients, decays_between, times
from pallas_kernels.matrix_state.mosaic_gpu.tiles import (
    NAMED_LAYOUTS,
    TILE,
    TIME_FIRST,
    along,
    iota,
    load,
    shared_tile,
    write,
    zeros,
    zeros_of_rows,
)
from pallas_kernels.matrix_state.mosaic_gpu.turns import Turns
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate, multiply
from pallas_kernels.target import Target


def read_gradients(
    here: Target,
    direction: Direction,
    x: jax.Array,
    y: jax.Array,
    dz: jax.Array,
    z: jax.Array,
    states: jax.Array,
    numbers: jax.Array,
    scale: float = 1.0,
    others: jax.Array | None = None,
) -> tuple[jax.Array, list[jax.Array]]:
    """dx, `scale ((dz z^T * decays) y + reads (dz state^T))` of every chunk, summed over the heads that share x.

    x, y, z and dz are `b t h k`, and dx is as x. Also, each `b h l c`, what this gives to the gradients of log decays
    of every head (see `reads.decay_gradients`), and with `others`, states too, what is, summed over the chunk, the
    product of both. Going backward, states are gradients, which the scale is in already. A program goes over the heads
    of a group, and sums in float32.
    """
    b, h, count, k, v = states.shape
    groups, dtype, parts = x.shape[TIME_FIRST.heads], x.dtype, k // TILE
    turns, held = Turns(h, h // groups, v, dtype), others is not None
    kinds = 1 + held
    of_states = 1.0 if direction.backward else scale
    # Else it is that of all heads of the group, and read once.
    y_varies = groups % y.shape[TIME_FIRST.heads] != 0

    def body(x_ref: Any, y_ref: Any, dz_ref: Any, z_ref: Any, states_ref: Any, rows_ref: Any, *rest: Any) -> None:
        *others_ref, dx_ref, sums_ref = rest
        at, group, chunk, column = (jax.lax.axis_index(name) for name in GRID)
        steps, channels = pl.ds(chunk * TILE, TILE), pl.ds(column * TILE, TILE)

        def run(x_tile: Any, y_tile: Any, products: Any, totals: Any, arrived: Any) -> None:
            def finish(
                member: Any, of_y: Any, numbers: Any, sums: Any, dscores: Any, reads: Any, *both: Any
            ) -> jax.Array:
                """Adds what a head gives, once its products over all channels of the state are summed."""
                reads = times(of_states, reads * along(numbers, direction.reads, 0))
                dscores = times(scale, dscores * decays_between(numbers, direction))
                apart = iota(0) != iota(1)
                scores = multiply(here, x_tile, of_y.transpose((1, 0)))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                within, across = products
                within[...] = jnp.sum(jnp.where(apart, scores * dscores, 0), axis=1)
                across[...] = jnp.sum(load(x_tile) * reads, axis=1)
                plgpu.commit_smem()
                by_step = decay_gradients(numbers, direction, within, across)
                for total, array in zip(totals, (by_step, *both), strict=True):
                    total[...] = array
                plgpu.commit_smem()
                for place, array in enumerate(totals):
                    plgpu.copy_smem_to_gmem(array, sums_ref.at[at, turns.head(group, member), column, place, steps])
                return multiply(here, dscores.astype(dtype), of_y, sums + reads)

            def step(indices: Any, dz_tile: Any, z_tile: Any, state: Any, numbers: Any, *rest: Any) -> tuple[Any, ...]:
                *tiles, (sums, *partial) = rest
                if turns.count == 1:
                    plgpu.barrier_wait(arrived)
                both = []
                if held:
                    both.append(sum(_products(state, tiles[0]), *partial[2:3]))
                    if turns.per_head > 1:
                        plgpu.commit_smem()
                onto = partial[:2] or (None, None)
                factors = [(dz_tile, right.transpose((1, 0))) for right in (z_tile, state)]
                found = accumulate(here, *((start, [pair]) for start, pair in zip(onto, factors, strict=True)))
                end = functools.partial(finish, indices[0], tiles[-1] if y_varies else y_tile, numbers)
                return turns.carried(indices[1], (sums, *found, *both), end, lambda: nothing)

            plgpu.copy_gmem_to_smem(TIME_FIRST.of_head(x_ref, at, group).at[steps, channels], x_tile, arrived)
            if not y_varies:
                of_group = TIME_FIRST.of_group(y_ref, at, group, groups, y)
                plgpu.copy_gmem_to_smem(of_group.at[steps, channels], y_tile, arrived)
            nothing = () if turns.per_head == 1 else (zeros(), zeros(), *[zeros_of_rows()] * held)
            if turns.count > 1:
                plgpu.barrier_wait(arrived)
            specs = [
                turns.of_steps(dz, group, chunk),
                turns.of_steps(z, group, chunk),
                turns.of_states(group, chunk, column, TILE),
                turns.of_decays(group, chunk),
            ]
            refs = [dz_ref.at[at], z_ref.at[at], states_ref.at[at], rows_ref.at[at]]
            if held:
                specs.append(specs[2])
                refs.append(others_ref[0].at[at])
            if y_varies:
                specs.append(turns.of_steps(y, group, chunk, lambda _: column, TILE))
                refs.append(y_ref.at[at])
            total, *_ = turns.run(step, specs, refs, (zeros(), *nothing))
            x_tile[...] = total.astype(dtype)
            write(x_tile, TIME_FIRST.of_head(dx_ref, at, group).at[steps, channels])

        pl.run_scoped(
            run,
            shared_tile(dtype),
            None if y_varies else shared_tile(dtype),
            [plgpu.SMEM((TILE,), jnp.float32)] * 2,
            [plgpu.SMEM((TILE,), jnp.float32)] * kinds,
            plgpu.Barrier(num_arrivals=1 if y_varies else 2),
        )

    dx, sums = launch.kernel(
        body,
        here,
        out_type=(
            jax.ShapeDtypeStruct(TIME_FIRST.shape(b, groups, count * TILE, k), dtype),
            jax.ShapeDtypeStruct((b, h, parts, kinds, count * TILE), jnp.float32),
        ),
        name='matrix_state_read_gradients',
        cost=Cost(
            flops=b * h * count * TILE * (2 * TILE * v * parts + 2 * k * v + 4 * TILE * k),
            exponentials=b * h * count * TILE * TILE * parts,
        ),
        grid=(b, groups, count, parts),
        grid_names=GRID,
        compiler_params=NAMED_LAYOUTS,
    )(x, y, dz, z, states, numbers, *([others] if held else []))
    return dx, [jnp.sum(sums[:, :, :, kind], axis=2).reshape(b, h, count, TILE) for kind in range(kinds)]


def _products(states: Any, others: Any) -> list[jax.Array]:
    """The products of two tiles of states, summed over channels, 64 after 64 for fewer registers."""
    parts = [pl.ds(start, TILE) for start in range(0, states.shape[1], TILE)]
    return [jnp.sum(load(states.at[:, part]) * load(others.at[:, part]), axis=1) for part in parts]
