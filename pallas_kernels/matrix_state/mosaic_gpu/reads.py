"""The kernels that compute the reads of all chunks at once: of steps of the same chunk, and of the state before it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.cost import Cost
from pallas_kernels.matrix_state.decays import COARSE, COUNT, FINE, REACH, RUN, WRITE
from pallas_kernels.matrix_state.mosaic_gpu.tiles import (
    HEADS_FIRST,
    NAMED_LAYOUTS,
    TILE,
    TIME_FIRST,
    Layout,
    along,
    along_channels,
    iota,
    load,
    shared_tile,
    spread,
    write,
    zeros,
)
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate, multiply
from pallas_kernels.target import Target

GRID = ('b', 'h', 'chunk', 'column')


class Direction(NamedTuple):
    """Forward, queries read keys and the past; backward, keys, for their gradients, read queries and the future.

    Attributes:
      reads: the row of decays from the state at the chunk to a step.
      adds: the row of decays from a step to the state at the next chunk.
    """

    backward: bool
    reads: int
    adds: int


FORWARD = Direction(backward=False, reads=REACH, adds=WRITE)


BACKWARD = Direction(backward=True, reads=WRITE, adds=REACH)


def read(
    here: Target,
    direction: Direction,
    x: jax.Array,
    y: jax.Array,
    z: jax.Array,
    states: jax.Array,
    numbers: jax.Array,
    out_dtype: Any,
    layout: Layout = HEADS_FIRST,
    scale: float = 1.0,
) -> jax.Array:
    """`scale ((x y^T * decays) z + reads (x state))` of every chunk; `layout` is that of x, y, z and the result.

    Going backward, states are gradients, which the scale is in already: it multiplies what is read of steps alone.
    """
    b, h, count, k, v = states.shape
    dtype = x.dtype
    of_scores, of_all = (scale, 1.0) if direction.backward else (1.0, scale)

    def body(x_ref: Any, y_ref: Any, z_ref: Any, states_ref: Any, rows_ref: Any, out_ref: Any) -> None:
        at, head, chunk, column = (jax.lax.axis_index(name) for name in GRID)
        steps, channels = pl.ds(chunk * TILE, TILE), pl.ds(column * TILE, TILE)

        def step(_: Any, x_tile: Any, y_tile: Any, state: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            scores, before = sums
            return accumulate(here, (scores, [(x_tile, y_tile.transpose((1, 0)))]), (before, [(x_tile, state)]))

        def run(z_tile: Any, numbers: Any, out: Any, arrived: Any) -> None:
            plgpu.copy_gmem_to_smem(layout.of_group(z_ref, at, head, h, z).at[steps, channels], z_tile, arrived)
            plgpu.copy_gmem_to_smem(rows_ref.at[at, head, chunk], numbers, arrived)
            scores, before = along_channels(
                step,
                k // TILE,
                (zeros(), zeros()),
                (layout.of_group(x_ref, at, head, h, x), lambda part: (chunk, part)),
                (layout.of_group(y_ref, at, head, h, y), lambda part: (chunk, part)),
                (states_ref.at[at, head, chunk], lambda part: (part, column)),
            )
            plgpu.barrier_wait(arrived)
            weights = times(of_scores, scores * decays_between(numbers, direction)).astype(dtype)
            total = multiply(here, weights, z_tile, before * along(numbers, direction.reads, 0))
            out[...] = times(of_all, total).astype(out_dtype)
            write(out, layout.of_head(out_ref, at, head).at[steps, channels])

        pl.run_scoped(
            run,
            shared_tile(dtype),
            plgpu.SMEM((COUNT, TILE), jnp.float32),
            shared_tile(out_dtype),
            plgpu.Barrier(num_arrivals=2),
        )

    return launch.kernel(
        body,
        here,
        out_type=jax.ShapeDtypeStruct(layout.shape(b, h, count * TILE, v), out_dtype),
        name='matrix_state_read',
        cost=Cost(
            flops=2 * b * h * count * TILE * (TILE * (k * v // TILE + v) + k * v),
            exponentials=b * h * count * TILE * v,
        ),
        grid=(b, h, count, v // TILE),
        grid_names=GRID,
        compiler_params=NAMED_LAYOUTS,
    )(x, y, z, states, numbers)


class Read(NamedTuple):
    """What else is read of the steps of a chunk: by weights, `b h t c`, of values z, in their layout."""

    weights: jax.Array
    z: jax.Array
    layout: Layout


def read_weighed(
    here: Target,
    direction: Direction,
    weights: jax.Array,
    z: jax.Array,
    x: jax.Array,
    states: jax.Array,
    out_dtype: Any,
    layouts: tuple[Layout, Layout] = (HEADS_FIRST, HEADS_FIRST),
    scale: float = 1.0,
    more: Sequence[Read] = (),
) -> jax.Array:
    """`scale (weights z + x state)` of every chunk; going backward the weights, `b h t c`, are transposed.

    `layouts` are those of z and of the result; x is `b h t k`. Weights times z of `more` are added.
    """
    of_values, of_result = layouts
    b, h, count, k, v = states.shape
    reads = [Read(weights, z, of_values), *more]

    def body(weights_ref: Any, z_ref: Any, x_ref: Any, states_ref: Any, *refs: Any) -> None:
        *more_refs, out_ref = refs
        sources = list(zip([weights_ref, *more_refs[::2]], [z_ref, *more_refs[1::2]], reads, strict=True))
        at, head, chunk, column = (jax.lax.axis_index(name) for name in GRID)
        steps, channels = pl.ds(chunk * TILE, TILE), pl.ds(column * TILE, TILE)

        def step(_: Any, x_tile: Any, state: Any, sums: tuple[Any]) -> tuple[Any]:
            return (multiply(here, x_tile, state, sums[0]),)

        def run(tiles: Any, out: Any, arrived: Any) -> None:
            for (of_weights, of_z, read), (left, right) in zip(sources, tiles, strict=True):
                plgpu.copy_gmem_to_smem(of_weights.at[at, head, steps], left, arrived)
                values = read.layout.of_group(of_z, at, head, h, read.z).at[steps, channels]
                plgpu.copy_gmem_to_smem(values, right, arrived)
            (total,) = along_channels(
                step,
                k // TILE,
                (zeros(),),
                (x_ref.at[at, head], lambda part: (chunk, part)),
                (states_ref.at[at, head, chunk], lambda part: (part, column)),
            )
            plgpu.barrier_wait(arrived)
            for left, right in tiles:
                left = left.transpose((1, 0)) if direction.backward else left
                total = multiply(here, left, right, total)
            out[...] = times(scale, total).astype(out_dtype)
            write(out, of_result.of_head(out_ref, at, head).at[steps, channels])

        pl.run_scoped(
            run,
            [(shared_tile(read.weights.dtype), shared_tile(read.z.dtype)) for read in reads],
            shared_tile(out_dtype),
            plgpu.Barrier(num_arrivals=2 * len(reads)),
        )

    return launch.kernel(
        body,
        here,
        out_type=jax.ShapeDtypeStruct(of_result.shape(b, h, count * TILE, v), out_dtype),
        name='matrix_state_read_weighed',
        cost=Cost(2 * b * h * count * TILE * v * (TILE * len(reads) + k)),
        grid=(b, h, count, v // TILE),
        grid_names=GRID,
        compiler_params=NAMED_LAYOUTS,
    )(weights, z, x, states, *(array for read in more for array in read[:2]))


def queries(here: Target, among: jax.Array, do: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """The gradients of the values that steps write, from reads in the same chunk, and those of outputs, `b h t v`.

    Both for gradients of outputs `b t h v`, which are multiplied by `scale`.
    """
    b, h, t, _ = among.shape
    dtype, width = do.dtype, do.shape[3]

    def body(among_ref: Any, do_ref: Any, within_ref: Any, scaled_ref: Any) -> None:
        at, head, chunk = (jax.lax.axis_index(name) for name in GRID[:3])
        steps = pl.ds(chunk * TILE, TILE)

        def run(weights: Any, within: Any, scaled: Any, arrived: Any) -> None:
            plgpu.copy_gmem_to_smem(among_ref.at[at, head, steps], weights, arrived)
            plgpu.barrier_wait(arrived)

            def step(turn: Any, given: Any, _: Any) -> tuple[()]:
                found = times(scale, multiply(here, weights.transpose((1, 0)), given))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                within[...] = found.astype(dtype)
                scaled[...] = times(scale, load(given)).astype(dtype)
                plgpu.commit_smem()
                channels = pl.ds(turn[0] * TILE, TILE)
                for tile, ref in ((within, within_ref), (scaled, scaled_ref)):
                    plgpu.copy_smem_to_gmem(tile, ref.at[at, head, steps, channels])
                return ()

            source = TIME_FIRST.of_head(do_ref, at, head)
            along_channels(step, width // TILE, (), (source, lambda part: (chunk, part)))
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(run, *[shared_tile(dtype)] * 3, plgpu.Barrier())

    return launch.kernel(
        body,
        here,
        out_type=(jax.ShapeDtypeStruct((b, h, t, width), dtype),) * 2,
        name='matrix_state_queries_weighed',
        cost=Cost(2 * b * h * t * TILE * width),
        grid=(b, h, t // TILE),
        grid_names=GRID[:3],
        compiler_params=NAMED_LAYOUTS,
    )(among, do)


def times(scale: float, total: jax.Array) -> jax.Array:
    return total if scale == 1 else scale * total


def decays_between(numbers: Any, direction: Direction) -> jax.Array:
    """The decays between the steps of a chunk, zero where a query does not see a key; queries are rows, or columns."""
    query, key = (1, 0) if direction.backward else (0, 1)
    coarse, fine = (along(numbers, row, query) - along(numbers, row, key) for row in (COARSE, FINE))
    seen = (iota(query) >= iota(key)) & (along(numbers, RUN, query) == along(numbers, RUN, key))
    return jnp.exp(jnp.where(seen, coarse + fine, -jnp.inf))


def decay_gradients(numbers: Any, direction: Direction, within: Any, across: Any) -> jax.Array:
    """What the reads of queries, or the writes of keys, give to the gradients of log decays of the steps of a chunk.

    `within` and `across`, in shared memory, are products of queries or keys with their gradients, of scores and of the
    state; which of them a decay is in, `decays.pull` says.
    """
    step, other = iota(0), iota(1)
    of_run = (other >= step) & (along(numbers, RUN, 0) == along(numbers, RUN, 1))
    of_scores = jnp.where(of_run, spread(within, 1), 0)
    if direction.backward:
        return jnp.sum(jnp.where(other < step, spread(across, 1), 0) - of_scores, axis=1)
    return jnp.sum(jnp.where(other >= step, spread(across, 1), 0) + of_scores, axis=1)
