"""The kernels for chunks of `delta_rule` whose weights are in memory, on Hopper GPUs: with decays of key channels.

With A the weights of earlier writes in what steps erase, K the keys as they read S, the state before the chunk, and `X
= (I + diag(beta) A)^{-1}`, steps write `R = X diag(beta) (V - K S)`. A program is a chunk, or 64 channels of its keys.
As a factor X is two 16-bit parts, so that it is as exact as the inverse.

Arrays of steps are `b h t k`, as the kernels of weights write them, but for those that callers have, `b t h k`; beta is
`b h l 1 c`, float32, zero in padding.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.cost import Cost
from pallas_kernels.matrix_state.mosaic_gpu.channel_decays import Weights
from pallas_kernels.matrix_state.mosaic_gpu.inverse import DOUBLINGS, both, multiplied, parts, put, solved
from pallas_kernels.matrix_state.mosaic_gpu.reads import GRID
from pallas_kernels.matrix_state.mosaic_gpu.tiles import (
    NAMED_LAYOUTS,
    TILE,
    TIME_FIRST,
    along,
    along_channels,
    load,
    send,
    shared_tile,
    zeros,
    zeros_of_rows,
)
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate
from pallas_kernels.target import Target


class Solved(NamedTuple):
    """What chunks do after applying their inverse, 16-bit.

    Attributes:
      written: the values that steps would write to a zero state, `X diag(beta) V`, `b h t v`.
      reads: keys whose reads of the state are added to these, `-X diag(beta) K`, `b h t k`.
      inverse: the two parts of X, each `b h t c`; or nothing.
    """

    written: jax.Array
    reads: jax.Array
    inverse: tuple[jax.Array, ...]


def solve(here: Target, does: Weights, v: jax.Array, beta: jax.Array, *, keep: bool) -> Solved:
    """What all chunks do, of their weights and of values `b t h v`; the inverse too if it is to be kept."""
    b, h, t, k = does.k.shape
    dtype, width = v.dtype, v.shape[3]

    def body(erased_ref: Any, keys_ref: Any, v_ref: Any, beta_ref: Any, *outs: Any) -> None:
        at, head, chunk = (jax.lax.axis_index(name) for name in GRID[:3])
        steps = pl.ds(chunk * TILE, TILE)

        def run(betas: Any, given: Any, first: Any, second: Any, others: Any, arrived: Any) -> None:
            plgpu.copy_gmem_to_smem(beta_ref.at[at, head, chunk], betas, arrived)
            erased = erased_ref.at[at, head, steps]
            strict = plgpu.load(erased, layout=plgpu.Layout.WGMMA, optimized=False)
            plgpu.barrier_wait(arrived)
            # The first number of a matrix that is zero on the diagonal.
            origin = erased[0, 0].astype(jnp.int32)
            found = solved(here, given, first, second, origin, strict * along(betas, 0, 0))
            # Tiles serve several ends one after the other, so that three programs share a multiprocessor.
            factor, out = others or (first, second[0])
            for part, tile, ref in zip(parts(found, dtype), factor, outs[2:], strict=False):
                tile[...] = part
                send(tile, ref.at[at, head, steps])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            put(factor, found * along(betas, 0, 1))

            written, reads = (ref.at[at, head, steps] for ref in outs[:2])
            multiplied(here, factor, keys_ref.at[at, head], chunk, reads, out, -1.0)
            multiplied(here, factor, TIME_FIRST.of_group(v_ref, at, head, h, v), chunk, written, out)
            plgpu.wait_smem_to_gmem(0)

        pair = [shared_tile(jnp.bfloat16)] * 2
        pl.run_scoped(
            run,
            plgpu.SMEM((1, TILE), jnp.float32),
            pair,
            pair,
            pair,
            () if dtype == jnp.bfloat16 else ([shared_tile(dtype)] * 2, shared_tile(dtype)),
            plgpu.Barrier(),
        )

    shapes = [(b, h, t, width), (b, h, t, k), *[(b, h, t, TILE)] * (2 if keep else 0)]
    written, reads, *inverse = launch.kernel(
        body,
        here,
        out_type=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes),
        name='delta_rule_solve_weighed',
        cost=Cost(flops=2 * b * h * t * TILE * (2 * (k + width) + 3 * 2 * DOUBLINGS * TILE)),
        grid=(b, h, t // TILE),
        grid_names=GRID[:3],
        compiler_params=NAMED_LAYOUTS,
    )(does.erased, does.k, v, beta)
    return Solved(written, reads, tuple(inverse))


class Within(NamedTuple):
    """Gradients of what is within chunks.

    Attributes:
      dmissing: of what steps write before the inverse, `dW = X^T dR`, `b h t v`, 16-bit.
      dv: these times beta, `b t h v`, of every head.
      among: of the weights of reads by queries, `dO R^T`, `b h t c`, 16-bit; where nothing is read, any.
      erased: of A, `-beta dW R^T`, likewise.
      by_beta: the sum of products of dW with V and, taken off, with what steps erase of earlier ones, `b h t`, float32.
    """

    dmissing: jax.Array
    dv: jax.Array
    among: jax.Array
    erased: jax.Array
    by_beta: jax.Array


def within_chunks(
    here: Target,
    inverse: tuple[jax.Array, ...],
    erased: jax.Array,
    do: jax.Array,
    values: jax.Array,
    dvalues: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    dv_type: Any,
) -> Within:
    """From the two parts of X, A, dO, R and dR, with the scale in them, and V, `b t h v`."""
    b, h, t, width = dvalues.shape
    dtype = dvalues.dtype

    def body(
        coarse_ref: Any,
        fine_ref: Any,
        erased_ref: Any,
        do_ref: Any,
        values_ref: Any,
        dvalues_ref: Any,
        v_ref: Any,
        beta_ref: Any,
        *outs: Any,
    ) -> None:
        at, head, chunk = (jax.lax.axis_index(name) for name in GRID[:3])
        steps = pl.ds(chunk * TILE, TILE)
        missed_ref, dv_ref, *squares, by_beta_ref = outs

        def run(pair: Any, betas: Any, missed: Any, dv: Any, totals: Any, arrived: Any) -> None:
            for ref, tile in zip((coarse_ref, fine_ref), pair, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[at, head, steps], tile, arrived)
            plgpu.copy_gmem_to_smem(beta_ref.at[at, head, chunk], betas, arrived)
            plgpu.barrier_wait(arrived)
            transposed = [part.transpose((1, 0)) for part in pair]

            def step(turn: Any, given: Any, value: Any, dvalue: Any, own: Any, sums: tuple[Any, ...]) -> Any:
                dscores, derased, by_beta = sums
                found = both(here, transposed, dvalue)
                by_beta = by_beta + jnp.sum(found * load(own), axis=1)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                missed[...] = found.astype(dtype)
                dv[...] = (found * along(betas, 0, 0)).astype(dv_type)
                plgpu.commit_smem()
                channels = pl.ds(turn[0] * TILE, TILE)
                plgpu.copy_smem_to_gmem(missed, missed_ref.at[at, head, steps, channels])
                plgpu.copy_smem_to_gmem(dv, TIME_FIRST.of_head(dv_ref, at, head).at[steps, channels])
                written = value.transpose((1, 0))
                return *accumulate(here, (dscores, [(given, written)]), (derased, [(missed, written)])), by_beta

            sources = [ref.at[at, head] for ref in (do_ref, values_ref, dvalues_ref)]
            dscores, derased, by_beta = along_channels(
                step,
                width // TILE,
                (zeros(), zeros(), zeros_of_rows()),
                *((ref, lambda part: (chunk, part)) for ref in (*sources, TIME_FIRST.of_group(v_ref, at, head, h, v))),
            )
            weights = plgpu.load(erased_ref.at[at, head, steps], layout=plgpu.Layout.WGMMA, optimized=False)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            totals[...] = by_beta - jnp.sum(weights * derased, axis=1)
            # In place of the inverse, which has been read.
            for tile, found in zip(pair, (dscores, -derased * along(betas, 0, 0)), strict=True):
                tile[...] = found.astype(dtype)
            plgpu.commit_smem()
            for tile, ref in zip((*pair, totals), (*squares, by_beta_ref), strict=True):
                plgpu.copy_smem_to_gmem(tile, ref.at[at, head, steps])
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(
            run,
            [shared_tile(dtype)] * 2,
            plgpu.SMEM((1, TILE), jnp.float32),
            shared_tile(dtype),
            shared_tile(dv_type),
            plgpu.SMEM((TILE,), jnp.float32),
            plgpu.Barrier(num_arrivals=3),
        )

    square = jax.ShapeDtypeStruct((b, h, t, TILE), dtype)
    return Within(
        *launch.kernel(
            body,
            here,
            out_type=(
                jax.ShapeDtypeStruct(dvalues.shape, dtype),
                jax.ShapeDtypeStruct(TIME_FIRST.shape(b, h, t, width), dv_type),
                square,
                square,
                jax.ShapeDtypeStruct((b, h, t), jnp.float32),
            ),
            name='delta_rule_within_chunks',
            cost=Cost(4 * 2 * b * h * t * TILE * width),
            grid=(b, h, t // TILE),
            grid_names=GRID[:3],
            compiler_params=NAMED_LAYOUTS,
        )(*inverse, erased, do, values, dvalues, v, beta)
    )
