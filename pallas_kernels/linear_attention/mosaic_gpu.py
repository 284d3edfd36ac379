"""The Pallas form of `linear_attention` for Hopper GPUs: three kernels, each of which serves both directions.

`_sweep` runs over the chunks of a sequence in order and writes down the state at each, `read` and `_pull` then work on
all chunks at once. Going forward the states are read by queries; going backward, from the last chunk to the first,
their gradients are read by keys. Kept for the backward pass is nothing but the arguments; the states, in the 16-bit
type that products want, `t / 64 * k * v` numbers a head, are computed again.

Where key channels have decays of their own, all that depends on these is found first, for all chunks at once (see
`mosaic_gpu_weights`): 16-bit numbers, `64 + 2 k` a step. What is left is the sweep and products.

Decays are put on numbers before they are rounded for a product: in float16 what decays below 6e-8 is zero there, and a
state above 65504 overflows.

A warpgroup works on tiles of 64 x 64: steps of a chunk, and channels.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic_gpu, tiling
from pallas_kernels.linear_attention import mosaic_gpu_weights, rows, vjp
from pallas_kernels.linear_attention.mosaic_gpu_tiles import (
    NAMED_LAYOUTS,
    TILE,
    along,
    along_channels,
    fill,
    group,
    iota,
    load,
    shared_tile,
    swizzled,
    write,
)
from pallas_kernels.linear_attention.mosaic_gpu_weights import Steps, Weights
from pallas_kernels.linear_attention.rows import COARSE, COUNT, FACTOR, FINE, KEPT, REACH, RUN, WRITE
from pallas_kernels.target import Target

_GRID = ('b', 'h', 'chunk', 'column')


def refusal(
    here: Target, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array | None, state: jax.Array
) -> str | None:
    """Why the call cannot be served; `None`: it can."""
    operands = jnp.result_type(q, k, v)
    if operands.itemsize != 2 or state.dtype != jnp.float32:
        return (
            f'q, k and v have type {operands}, the state {state.dtype}; expected bfloat16 or float16, and float32: '
            'products of float32 would be rounded to the 10 bits of tf32'
        )
    return mosaic_gpu.capability_refusal(here)


@functools.lru_cache
def form(here: Target) -> Callable[..., vjp.Outputs]:
    """The differentiable form on a device."""
    return vjp.differentiable(functools.partial(_forward, here), functools.partial(_backward, here))


class Inputs(NamedTuple):
    """A call in whole chunks and tiles.

    Attributes:
      q: `b hq t k`.
      k: `b hk t k`.
      v: `b hv t v`.
      rows: `b h l 8 c`, see `rows`.
      state: `b h k v`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    rows: jax.Array
    state: jax.Array


class Direction(NamedTuple):
    """Queries read keys, and what was before; or keys, whose gradients are wanted, queries and what comes after.

    Attributes:
      reads: the row that says what the state at the chunk counts at a step.
      adds: the row that says what a step counts in the state at the next chunk.
    """

    backward: bool
    reads: int
    adds: int


FORWARD = Direction(backward=False, reads=REACH, adds=WRITE)
BACKWARD = Direction(backward=True, reads=WRITE, adds=REACH)


def _inputs(arrays: vjp.Arrays) -> Inputs:
    b, h = arrays.state.shape[:2]
    t = pl.cdiv(arrays.q.shape[2], TILE) * TILE
    numbers = rows.rows(arrays.log_decay, arrays.starts, t, TILE)
    return Inputs(
        q=fill(arrays.q),
        k=fill(arrays.k),
        v=fill(arrays.v),
        rows=jnp.broadcast_to(numbers, (b, h, *numbers.shape[2:])),
        state=fill(arrays.state),
    )


def _forward(here: Target, arrays: vjp.Arrays, keep: bool) -> tuple[vjp.Outputs, None]:
    if _is_vector(arrays):
        return _forward_by_channel(here, arrays), None
    inputs = _inputs(arrays)
    states, final = _sweep(here, FORWARD, inputs.k, inputs.v, inputs.rows, inputs.state)
    o = read(here, FORWARD, inputs.q, inputs.k, inputs.v, states, inputs.rows, inputs.v.dtype)
    t, (k, v) = arrays.q.shape[2], arrays.state.shape[2:]
    return (o[:, :, :t, :v], final[:, :, :k, :v]), None


def _is_vector(arrays: vjp.Arrays) -> bool:
    return arrays.log_decay is not None and arrays.log_decay.shape[3] > 1


def _backward(here: Target, arrays: vjp.Arrays, kept: None, gradients: vjp.Outputs) -> vjp.Arrays:
    if _is_vector(arrays):
        return _backward_by_channel(here, arrays, gradients)
    inputs = _inputs(arrays)
    do, dfinal = fill(gradients[0]), fill(gradients[1])
    h, dtype = inputs.state.shape[1], inputs.v.dtype

    def rounded(argument: jax.Array) -> Any:
        # Gradients that heads share are added up before they are rounded.
        return dtype if argument.shape[1] == h else jnp.float32

    states, _ = _sweep(here, FORWARD, inputs.k, inputs.v, inputs.rows, inputs.state)
    dstates, dstate = _sweep(here, BACKWARD, inputs.q, do, inputs.rows, dfinal)
    q, k, v = inputs.q, inputs.k, inputs.v
    dv = read(here, BACKWARD, k, q, do, dstates, inputs.rows, rounded(arrays.v))
    dq, reads = _pull(here, FORWARD, q, k, do, v, states, inputs.rows, rounded(arrays.q))
    dk, writes = _pull(here, BACKWARD, k, q, v, do, dstates, inputs.rows, rounded(arrays.k))

    dlog_decay = None
    if arrays.log_decay is not None:
        held = jnp.einsum('bhlkv,bhlkv->bhl', states, dstates, preferred_element_type=jnp.float32)
        dlog_decay = _pull_decays(inputs.rows, reads, writes, held)
    t, (key_size, value_size) = arrays.q.shape[2], arrays.state.shape[2:]
    return vjp.Arrays(
        q=dq[:, :, :t, :key_size],
        k=dk[:, :, :t, :key_size],
        v=dv[:, :, :t, :value_size],
        log_decay=None if dlog_decay is None else dlog_decay[:, :, :t, None],
        state=dstate[:, :, :key_size, :value_size],
        starts=None,
    )


class Weighed(NamedTuple):
    """What chunks do whose key channels have decays of their own.

    Attributes:
      weights: see there.
      factor: what the state before a chunk counts in the one after it, `b h l k`.
    """

    weights: Weights
    factor: jax.Array


def _weigh(here: Target, starts: jax.Array | None, q: jax.Array, k: jax.Array, log_decay: jax.Array) -> Weighed:
    b, h, t, _ = log_decay.shape
    numbers = rows.rows(None, starts, pl.cdiv(t, TILE) * TILE, TILE)
    steps = Steps(fill(q), fill(k), fill(log_decay), jnp.broadcast_to(numbers, (b, h, *numbers.shape[2:])))
    return Weighed(mosaic_gpu_weights.weights(here, False, steps), mosaic_gpu_weights.factor(steps))


def _forward_by_channel(here: Target, arrays: vjp.Arrays) -> vjp.Outputs:
    assert arrays.log_decay is not None
    weights, factor = _weigh(here, arrays.starts, arrays.q, arrays.k, arrays.log_decay)
    v = fill(arrays.v)
    states, final = _sweep(here, FORWARD, weights.writes, v, factor, fill(arrays.state))
    o = read_weighed(here, FORWARD, weights.among, v, weights.q, states, v.dtype)
    t, (key_size, value_size) = arrays.q.shape[2], arrays.state.shape[2:]
    return o[:, :, :t, :value_size], final[:, :, :key_size, :value_size]


def _backward_by_channel(here: Target, arrays: vjp.Arrays, gradients: vjp.Outputs) -> vjp.Arrays:
    """Products of the matrices of a chunk whose factors are at hand are left to XLA."""
    dtype, h = arrays.v.dtype, arrays.state.shape[1]
    do, v = fill(gradients[0]), fill(arrays.v)
    weigh = functools.partial(_weigh, here, arrays.starts)
    (weights, factor), pull = jax.vjp(weigh, arrays.q, arrays.k, arrays.log_decay)
    states, _ = _sweep(here, FORWARD, weights.writes, v, factor, fill(arrays.state))
    dstates, dstate = _sweep(here, BACKWARD, weights.q, do, factor, fill(gradients[1]))
    rounded = dtype if v.shape[1] == h else jnp.float32
    dv = read_weighed(here, BACKWARD, weights.among, do, weights.writes, dstates, rounded)

    def by_chunk(array: jax.Array) -> jax.Array:
        return jnp.repeat(array, h // array.shape[1], axis=1).reshape(*states.shape[:3], TILE, -1)

    def product(letters: str, left: jax.Array, right: jax.Array) -> jax.Array:
        found = jnp.einsum(letters, left, right, preferred_element_type=dtype)
        return found.reshape(*states.shape[:2], -1, found.shape[-1])

    do_chunks, v_chunks = by_chunk(do), by_chunk(v)
    dweights = Weights(
        among=product('bhltv,bhlsv->bhlts', do_chunks, v_chunks),
        q=product('bhltv,bhlkv->bhltk', do_chunks, states),
        writes=product('bhlsv,bhlkv->bhlsk', v_chunks, dstates),
    )
    dfactor = jnp.einsum('bhlkv,bhlkv->bhlk', states, dstates, preferred_element_type=jnp.float32)
    dq, dk, dlog_decay = pull(Weighed(dweights, dfactor))
    t, (key_size, value_size) = arrays.q.shape[2], arrays.state.shape[2:]
    return vjp.Arrays(
        q=dq,
        k=dk,
        v=dv[:, :, :t, :value_size],
        log_decay=dlog_decay,
        state=dstate[:, :, :key_size, :value_size],
        starts=None,
    )


def _pull_decays(numbers: jax.Array, reads: jax.Array, writes: jax.Array, held: jax.Array) -> jax.Array:
    """What the log decays get, `b h t`.

    The decay of step t is in every score of a query at or after t and a key before t, in what queries from t on read of
    the state, and in what keys before t write. `reads` and `writes` are `q dq` and `k dk` of scores and of the state.
    """
    run = numbers[..., RUN, :, None]
    later = jnp.triu(jnp.ones((1, 1, 1, TILE, TILE), bool))
    of_run = later & (run == run.swapaxes(-1, -2))
    within = jnp.where(of_run, (reads[:, :, 0] - writes[:, :, 0])[..., None, :], 0)
    across = jnp.where(later, reads[:, :, 1][..., None, :], writes[:, :, 1][..., None, :])
    sums = jnp.sum(within + across, axis=-1) + numbers[..., FACTOR, :] * held[..., None]
    return (sums * numbers[..., KEPT, :]).reshape(*sums.shape[:2], -1)


def _sweep(
    here: Target, direction: Direction, x: jax.Array, y: jax.Array, numbers: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The state, `l k v`, at every chunk before it is gone through, and the last one.

    A program carries one tile of the state, in float32 registers, through all chunks: `S = factor S + x^T (adds y)`.
    `numbers` are rows, or the factors of key channels, `b h l k`; x then has what is added, and `adds` is one.
    """
    b, h, k, v = state.shape
    count, dtype, by_channel = x.shape[2] // TILE, x.dtype, numbers.ndim == 4

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
                if not by_channel:
                    adds = along(numbers.at[0], direction.adds, 0)
                    scaled[...] = (load(y_tile) * adds).astype(dtype)
                plgpu.commit_smem()
                rows_of = pl.ds(place(turn[0]) * k + row * TILE, TILE)
                plgpu.copy_smem_to_gmem(kept, states_ref.at[at, head, rows_of, tile[1]])
                factor = along(numbers, 0, 0) if by_channel else along(numbers.at[0], FACTOR, 0)
                added = y_tile if by_channel else scaled
                return mosaic_gpu.multiply(here, x_tile.transpose((1, 0)), added, state * factor)

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
            )(x_ref.at[at, group(head, h, x)], y_ref.at[at, group(head, h, y)], rows_ref.at[at, head])
            write(final, final_ref.at[at, head, *tile])

        pl.run_scoped(
            run,
            shared_tile(dtype),
            shared_tile(dtype),
            shared_tile(jnp.float32),
        )

    states, final = mosaic_gpu.kernel(
        body,
        here,
        out_type=(jax.ShapeDtypeStruct((b, h, count * k, v), dtype), jax.ShapeDtypeStruct(state.shape, jnp.float32)),
        grid=(b, h, k // TILE, v // TILE),
        grid_names=('b', 'h', 'row', 'column'),
        compiler_params=NAMED_LAYOUTS,
    )(x, y, numbers, state)
    return states.reshape(b, h, count, k, v), final


def read(
    here: Target,
    direction: Direction,
    x: jax.Array,
    y: jax.Array,
    z: jax.Array,
    states: jax.Array,
    numbers: jax.Array,
    out_dtype: Any,
) -> jax.Array:
    """`(x y^T * decays) z + reads (x state)` of every chunk, `b h t v`."""
    b, h, count, k, v = states.shape
    dtype = x.dtype

    def body(x_ref: Any, y_ref: Any, z_ref: Any, states_ref: Any, rows_ref: Any, out_ref: Any) -> None:
        at, head, chunk, column = (jax.lax.axis_index(name) for name in _GRID)
        steps, channels = pl.ds(chunk * TILE, TILE), pl.ds(column * TILE, TILE)

        def step(_: Any, x_tile: Any, y_tile: Any, state: Any, sums: tuple[Any, Any]) -> tuple[Any, Any]:
            scores, before = sums
            scores = mosaic_gpu.multiply(here, x_tile, y_tile.transpose((1, 0)), scores)
            return scores, mosaic_gpu.multiply(here, x_tile, state, before)

        def run(z_tile: Any, numbers: Any, out: Any, arrived: Any) -> None:
            plgpu.copy_gmem_to_smem(z_ref.at[at, group(head, h, z), steps, channels], z_tile, arrived)
            plgpu.copy_gmem_to_smem(rows_ref.at[at, head, chunk], numbers, arrived)
            scores, before = along_channels(
                step,
                k // TILE,
                (x_ref.at[at, group(head, h, x)], lambda part: (chunk, part)),
                (y_ref.at[at, group(head, h, y)], lambda part: (chunk, part)),
                (states_ref.at[at, head, chunk], lambda part: (part, column)),
            )
            plgpu.barrier_wait(arrived)
            weights = (scores * _decays(numbers, direction)).astype(dtype)
            total = mosaic_gpu.multiply(here, weights, z_tile, before * along(numbers, direction.reads, 0))
            out[...] = total.astype(out_dtype)
            write(out, out_ref.at[at, head, steps, channels])

        pl.run_scoped(
            run,
            shared_tile(dtype),
            plgpu.SMEM((COUNT, TILE), jnp.float32),
            shared_tile(out_dtype),
            plgpu.Barrier(num_arrivals=2),
        )

    return mosaic_gpu.kernel(
        body,
        here,
        out_type=jax.ShapeDtypeStruct((b, h, count * TILE, v), out_dtype),
        grid=(b, h, count, v // TILE),
        grid_names=_GRID,
        compiler_params=NAMED_LAYOUTS,
    )(x, y, z, states, numbers)


def read_weighed(
    here: Target,
    direction: Direction,
    weights: jax.Array,
    z: jax.Array,
    x: jax.Array,
    states: jax.Array,
    out_dtype: Any,
) -> jax.Array:
    """`weights z + x state` of every chunk, `b h t v`; going backward the weights, `b h t c`, are transposed."""
    b, h, count, k, v = states.shape

    def body(weights_ref: Any, z_ref: Any, x_ref: Any, states_ref: Any, out_ref: Any) -> None:
        at, head, chunk, column = (jax.lax.axis_index(name) for name in _GRID)
        steps, channels = pl.ds(chunk * TILE, TILE), pl.ds(column * TILE, TILE)

        def step(_: Any, x_tile: Any, state: Any, sums: tuple[Any]) -> tuple[Any]:
            return (mosaic_gpu.multiply(here, x_tile, state, sums[0]),)

        def run(weights_tile: Any, z_tile: Any, out: Any, arrived: Any) -> None:
            plgpu.copy_gmem_to_smem(weights_ref.at[at, head, steps], weights_tile, arrived)
            plgpu.copy_gmem_to_smem(z_ref.at[at, group(head, h, z), steps, channels], z_tile, arrived)
            (before,) = along_channels(
                step,
                k // TILE,
                (x_ref.at[at, head], lambda part: (chunk, part)),
                (states_ref.at[at, head, chunk], lambda part: (part, column)),
                sums=1,
            )
            plgpu.barrier_wait(arrived)
            left = weights_tile.transpose((1, 0)) if direction.backward else weights_tile
            out[...] = mosaic_gpu.multiply(here, left, z_tile, before).astype(out_dtype)
            write(out, out_ref.at[at, head, steps, channels])

        pl.run_scoped(
            run,
            shared_tile(weights.dtype),
            shared_tile(z.dtype),
            shared_tile(out_dtype),
            plgpu.Barrier(num_arrivals=2),
        )

    return mosaic_gpu.kernel(
        body,
        here,
        out_type=jax.ShapeDtypeStruct((b, h, count * TILE, v), out_dtype),
        grid=(b, h, count, v // TILE),
        grid_names=_GRID,
        compiler_params=NAMED_LAYOUTS,
    )(weights, z, x, states)


def _pull(
    here: Target,
    direction: Direction,
    x: jax.Array,
    y: jax.Array,
    dz: jax.Array,
    z: jax.Array,
    states: jax.Array,
    numbers: jax.Array,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """dx, `(dz z^T * decays) y + reads (dz state^T)` of every chunk, `b h t k`.

    Also `x dx` added up over channels, `b h 2 t`: what it gets of other steps of the chunk, and of the state.
    """
    b, h, count, k, v = states.shape
    dtype, parts = x.dtype, k // TILE

    def body(
        x_ref: Any, y_ref: Any, dz_ref: Any, z_ref: Any, states_ref: Any, rows_ref: Any, dx_ref: Any, sums_ref: Any
    ) -> None:
        at, head, chunk, column = (jax.lax.axis_index(name) for name in _GRID)
        steps, channels = pl.ds(chunk * TILE, TILE), pl.ds(column * TILE, TILE)

        def step(_: Any, dz_tile: Any, z_tile: Any, state: Any, sums: tuple[Any, Any]) -> tuple[Any, Any]:
            dscores, reads = sums
            dscores = mosaic_gpu.multiply(here, dz_tile, z_tile.transpose((1, 0)), dscores)
            return dscores, mosaic_gpu.multiply(here, dz_tile, state.transpose((1, 0)), reads)

        def run(x_tile: Any, y_tile: Any, numbers: Any, dx: Any, within: Any, across: Any, arrived: Any) -> None:
            plgpu.copy_gmem_to_smem(x_ref.at[at, group(head, h, x), steps, channels], x_tile, arrived)
            plgpu.copy_gmem_to_smem(y_ref.at[at, group(head, h, y), steps, channels], y_tile, arrived)
            plgpu.copy_gmem_to_smem(rows_ref.at[at, head, chunk], numbers, arrived)
            dscores, reads = along_channels(
                step,
                v // TILE,
                (dz_ref.at[at, group(head, h, dz)], lambda part: (chunk, part)),
                (z_ref.at[at, group(head, h, z)], lambda part: (chunk, part)),
                (states_ref.at[at, head, chunk], lambda part: (column, part)),
            )
            plgpu.barrier_wait(arrived)
            reads = reads * along(numbers, direction.reads, 0)
            dscores = dscores * _decays(numbers, direction)
            others = iota(0) != iota(1)
            scores = mosaic_gpu.multiply(here, x_tile, y_tile.transpose((1, 0)))
            within[...] = jnp.sum(jnp.where(others, scores * dscores, 0), axis=1)
            across[...] = jnp.sum(load(x_tile) * reads, axis=1)
            dx[...] = mosaic_gpu.multiply(here, dscores.astype(dtype), y_tile, reads).astype(out_dtype)
            write(dx, dx_ref.at[at, head, steps, channels])
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

    dx, sums = mosaic_gpu.kernel(
        body,
        here,
        out_type=(
            jax.ShapeDtypeStruct((b, h, count * TILE, k), out_dtype),
            jax.ShapeDtypeStruct((b, h, parts, 2, count * TILE), jnp.float32),
        ),
        grid=(b, h, count, parts),
        grid_names=_GRID,
        compiler_params=NAMED_LAYOUTS,
    )(x, y, dz, z, states, numbers)
    return dx, jnp.sum(sums, axis=2).reshape(b, h, 2, count, TILE)


def _decays(numbers: Any, direction: Direction) -> jax.Array:
    """The decays between the steps of a chunk, zero where a query does not see a key; queries are rows, or columns."""
    query, key = (1, 0) if direction.backward else (0, 1)
    coarse, fine = (along(numbers, row, query) - along(numbers, row, key) for row in (COARSE, FINE))
    seen = (iota(query) >= iota(key)) & (along(numbers, RUN, query) == along(numbers, RUN, key))
    return jnp.exp(jnp.where(seen, coarse + fine, -jnp.inf))
