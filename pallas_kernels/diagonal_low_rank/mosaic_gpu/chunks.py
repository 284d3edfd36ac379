"""The kernels for chunks of `diagonal_low_rank` whose weights are in memory, on Hopper GPUs.

With A and B the weights of earlier writes in what steps read for their `a`, and K what these read of S, the state
before the chunk, steps read `Y = X (B V + K S)`, `X = (I - A)^{-1}`. Where what is read and values are written under
the same keys, A is B, and `R = V + Y = X (V + K S)`. A program is a chunk. As a factor X is two 16-bit parts, so that
it is as exact as the inverse.

Arrays of steps are `b h t k`, as weights are, but for values as callers have them, `b t h v`.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.cost import Cost
from pallas_kernels.diagonal_low_rank.chunk import Weights
from pallas_kernels.matrix_state.mosaic_gpu.inverse import DOUBLINGS, both, multiplied, parts, put, solved
from pallas_kernels.matrix_state.mosaic_gpu.reads import GRID
from pallas_kernels.matrix_state.mosaic_gpu.tiles import (
    NAMED_LAYOUTS,
    TILE,
    TIME_FIRST,
    along_channels,
    send,
    shared_tile,
    zeros,
)
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate
from pallas_kernels.target import Target


class Solved(NamedTuple):
    """What chunks do after applying their inverse, 16-bit.

    Attributes:
      written: what is found without a state, `X B V` or `X V`, `b h t v`.
      reads: keys whose reads of the state are added to these, `X K`, `b h t k`.
      inverse: the two parts of X, each `b h t c`; or nothing.
    """

    written: jax.Array
    reads: jax.Array
    inverse: tuple[jax.Array, ...]


def solve(here: Target, does: Weights, v: jax.Array, *, keep: bool) -> Solved:
    """What all chunks do, of their weights and of values `b t h v`; the inverse too if it is to be kept."""
    b, h, t, k = does.a.shape
    dtype, width, (inverted, *earlier) = v.dtype, v.shape[3], does.earlier

    def body(inverted_ref: Any, *refs: Any) -> None:
        earlier_refs, (a_ref, v_ref, *outs) = refs[: len(earlier)], refs[len(earlier) :]
        at, head, chunk = (jax.lax.axis_index(name) for name in GRID[:3])
        steps = pl.ds(chunk * TILE, TILE)
        written_ref, reads_ref, *inverse_refs = (ref.at[at, head, steps] for ref in outs)

        def run(others: Any, given: Any, first: Any, second: Any, apart: Any, arrived: Any) -> None:
            for ref, tile in zip(earlier_refs, others, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[at, head, steps], tile, arrived)
            own = inverted_ref.at[at, head, steps]
            strict = -plgpu.load(own, layout=plgpu.Layout.WGMMA, optimized=False)
            # The first number of a matrix that is zero on the diagonal.
            found = solved(here, given, first, second, own[0, 0].astype(jnp.int32), strict)
            # Tiles serve several ends one after the other, so that three programs share a multiprocessor.
            factor, out = apart or (first, second[0])
            for part, tile, ref in zip(parts(found, dtype), factor, inverse_refs, strict=False):
                tile[...] = part
                send(tile, ref)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            put(factor, found)
            multiplied(here, factor, a_ref.at[at, head], chunk, reads_ref, out)
            for tile in others:
                plgpu.barrier_wait(arrived)
                put(factor, both(here, factor, tile))
            multiplied(here, factor, TIME_FIRST.of_group(v_ref, at, head, h, v), chunk, written_ref, out)
            plgpu.wait_smem_to_gmem(0)

        pair = [shared_tile(jnp.bfloat16)] * 2
        pl.run_scoped(
            run,
            [shared_tile(dtype)] * len(earlier),
            pair,
            pair,
            pair,
            () if dtype == jnp.bfloat16 else ([shared_tile(dtype)] * 2, shared_tile(dtype)),
            plgpu.Barrier() if earlier else None,
        )

    shapes = [(b, h, t, width), (b, h, t, k), *[(b, h, t, TILE)] * (2 if keep else 0)]
    written, reads, *inverse = launch.kernel(
        body,
        here,
        out_type=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes),
        name='diagonal_low_rank_solve',
        cost=Cost(flops=2 * b * h * t * TILE * (2 * (k + width) + (2 * len(earlier) + 3 * 2 * DOUBLINGS) * TILE)),
        grid=(b, h, t // TILE),
        grid_names=GRID[:3],
        compiler_params=NAMED_LAYOUTS,
    )(inverted, *earlier, does.a, v)
    return Solved(written, reads, tuple(inverse))


class Within(NamedTuple):
    """Gradients of what is within chunks; lists have one entry for each of the keys.

    Attributes:
      dfound: of what X is multiplied with, `dW = X^T dY`, `b h t v`, 16-bit.
      dv: of values that are written with what is read, dW, `b t h v`, of every head; or `None`.
      among: of the weights of reads by queries, `dO Y^T` and `dO V^T`, `b h t c`, 16-bit; where nothing is read, any.
      earlier: of those of reads for `a`, `dW Y^T` and `dW V^T`, likewise.
    """

    dfound: jax.Array
    dv: jax.Array | None
    among: list[jax.Array]
    earlier: list[jax.Array]


def within_chunks(
    here: Target,
    inverse: tuple[jax.Array, ...],
    do: jax.Array,
    values: jax.Array,
    dvalues: jax.Array,
    v: jax.Array | None,
    dv_type: Any,
) -> Within:
    """From the two parts of X, dO, Y and dY, with the scale in them, and V, `b t h v`, where it has keys of its own."""
    b, h, t, width = dvalues.shape
    dtype, own = dvalues.dtype, () if v is None else (v,)

    def body(coarse_ref: Any, fine_ref: Any, do_ref: Any, values_ref: Any, dvalues_ref: Any, *refs: Any) -> None:
        at, head, chunk = (jax.lax.axis_index(name) for name in GRID[:3])
        steps = pl.ds(chunk * TILE, TILE)
        own_refs, (dfound_ref, *squares) = refs[: len(own)], refs[len(own) :]
        dv_refs = [squares.pop()] if v is None else []

        def run(pair: Any, dfound: Any, dv: Any, arrived: Any) -> None:
            for ref, tile in zip((coarse_ref, fine_ref), pair, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[at, head, steps], tile, arrived)
            plgpu.barrier_wait(arrived)
            transposed = [part.transpose((1, 0)) for part in pair]

            def step(turn: Any, asked: Any, value: Any, dvalue: Any, *rest: Any) -> Any:
                *others, sums = rest
                found = both(here, transposed, dvalue)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for tile in (dfound, *dv):
                    tile[...] = found.astype(tile.dtype)
                plgpu.commit_smem()
                channels = pl.ds(turn[0] * TILE, TILE)
                plgpu.copy_smem_to_gmem(dfound, dfound_ref.at[at, head, steps, channels])
                for tile, ref in zip(dv, dv_refs, strict=True):
                    plgpu.copy_smem_to_gmem(tile, TIME_FIRST.of_head(ref, at, head).at[steps, channels])
                pairs = [(left, written.transpose((1, 0))) for written in (value, *others) for left in (asked, dfound)]
                return accumulate(here, *((total, [pair]) for total, pair in zip(sums, pairs, strict=True)))

            sources = [ref.at[at, head] for ref in (do_ref, values_ref, dvalues_ref)]
            sources += [TIME_FIRST.of_group(ref, at, head, h, v) for ref in own_refs if v is not None]
            found = along_channels(
                step,
                width // TILE,
                (zeros(),) * (2 + 2 * len(own)),
                *((source, lambda part: (chunk, part)) for source in sources),
            )
            # In place of the inverse, which has been read, two at a time.
            for place in range(0, len(found), 2):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for tile, square in zip(pair, found[place : place + 2], strict=True):
                    tile[...] = square.astype(dtype)
                plgpu.commit_smem()
                for tile, ref in zip(pair, squares[place : place + 2], strict=True):
                    plgpu.copy_smem_to_gmem(tile, ref.at[at, head, steps])
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(
            run,
            [shared_tile(dtype)] * 2,
            shared_tile(dtype),
            [shared_tile(dv_type)] if v is None else [],
            plgpu.Barrier(num_arrivals=2),
        )

    square = jax.ShapeDtypeStruct((b, h, t, TILE), dtype)
    of_values = [] if own else [jax.ShapeDtypeStruct(TIME_FIRST.shape(b, h, t, width), dv_type)]
    dfound, *found = launch.kernel(
        body,
        here,
        out_type=(jax.ShapeDtypeStruct(dvalues.shape, dtype), *[square] * (2 + 2 * len(own)), *of_values),
        name='diagonal_low_rank_within_chunks',
        cost=Cost((4 + 2 * len(own)) * 2 * b * h * t * TILE * width),
        grid=(b, h, t // TILE),
        grid_names=GRID[:3],
        compiler_params=NAMED_LAYOUTS,
    )(*inverse, do, values, dvalues, *own)
    squares, dv = (found, None) if own else (found[:-1], found[-1])
    return Within(dfound, dv, squares[::2], squares[1::2])
