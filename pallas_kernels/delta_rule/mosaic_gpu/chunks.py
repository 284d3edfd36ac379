"""The kernels for what is within chunks of `delta_rule` on Hopper GPUs, with one decay a head and step, or none.

With S the state before a chunk, the values that its steps write are `R = X diag(beta) (V - diag(reach) K S)`, with `X =
(I + diag(beta) A)^{-1}` and `A_ij = D_ij k_i . k_j` for `j < i`, where D are decays. A program is a chunk: products,
inverse and what it multiplies stay on the multiprocessor. As a factor X is two 16-bit parts, so that it is as exact as
the inverse.

Arguments and outputs of steps are `b t h k`, as callers have them; `rows` are those of `matrix_state.decays`, and beta
is `b h l 1 c`, float32, zero in padding.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.cost import Cost
from pallas_kernels.matrix_state.decays import COUNT, REACH, WRITE
from pallas_kernels.matrix_state.mosaic_gpu.inverse import DOUBLINGS, both, parts, put, solved
from pallas_kernels.matrix_state.mosaic_gpu.reads import BACKWARD, FORWARD, decays_between, times
from pallas_kernels.matrix_state.mosaic_gpu.tiles import (
    NAMED_LAYOUTS,
    TILE,
    TIME_FIRST,
    along,
    hidden_zero,
    iota,
    load,
    send,
    shared_tile,
    swizzled,
)
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate, multiply
from pallas_kernels.target import Target

GRID = ('b', 'h', 'chunk')

MOST = 704
"""Channels of values: two arrays of them in `missing` fill shared memory."""


class Solved(NamedTuple):
    """What chunks do after applying their inverse, 16-bit.

    Attributes:
      written: the values that steps would write to a zero state, `X diag(beta) V`, `b t h v`.
      reads: keys whose reads of the state are added to these, `-X diag(beta reach) K`, `b t h k`.
      writes: the keys under which values are in the state after the chunk, `b t h k`.
      inverse: the two parts of X, each `b h t c`; or nothing.
    """

    written: jax.Array
    reads: jax.Array
    writes: jax.Array
    inverse: tuple[jax.Array, ...]


def solve(here: Target, k: jax.Array, v: jax.Array, beta: jax.Array, rows: jax.Array, *, keep: bool) -> Solved:
    """What all chunks do; the inverse too if it is to be kept."""
    b, h, count = rows.shape[:3]
    t, dtype = count * TILE, v.dtype
    parts_of_keys, parts_of_values = k.shape[3] // TILE, v.shape[3] // TILE

    def body(k_ref: Any, v_ref: Any, beta_ref: Any, rows_ref: Any, *outs: Any) -> None:
        at, head, chunk = (jax.lax.axis_index(name) for name in GRID)
        steps = pl.ds(chunk * TILE, TILE)
        written, reads, writes = (TIME_FIRST.of_head(ref, at, head).at[steps] for ref in outs[:3])

        def run(
            keys: Any,
            values: Any,
            numbers: Any,
            betas: Any,
            first: Any,
            second: Any,
            others: Any,
            arrived: Any,
            came: Any,
        ) -> None:
            tiles = [keys.at[part] for part in range(parts_of_keys)]
            _copy(_tiles(TIME_FIRST.of_group(k_ref, at, head, h, k).at[steps]), tiles, arrived)
            _copy([rows_ref.at[at, head, chunk], beta_ref.at[at, head, chunk]], [numbers, betas], arrived)
            plgpu.barrier_wait(arrived)
            (alike,) = accumulate(here, (None, [(key, key.transpose((1, 0))) for key in tiles]))
            weights = alike * decays_between(numbers, FORWARD) * along(betas, 0, 0)
            origin = hidden_zero(numbers)
            # Tiles serve several ends one after the other, so that three programs share a multiprocessor.
            given, reading, writing = others or ([values.at[0], values.at[1]], first, second)
            found = solved(here, given, first, second, origin, jnp.where(iota(0, origin) > iota(1), weights, 0.0))
            tiles = [values.at[part] for part in range(parts_of_values)]
            _copy(_tiles(TIME_FIRST.of_group(v_ref, at, head, h, v).at[steps]), tiles, came)
            for part, tile, out in zip(parts(found, dtype), writing, outs[3:], strict=False):
                tile[...] = part
                send(tile, out.at[at, head, steps])
            found = found * along(betas, 0, 1)
            put(reading, -found * along(numbers, REACH, 1))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            put(writing, found)

            # Loops, as the registers of two turns at once would leave room for a program less.
            def of_keys(part: Any, _: None) -> None:
                key, channels = keys.at[part], pl.ds(part * TILE, TILE)
                stays = (load(key) * along(numbers, WRITE, 0)).astype(dtype)
                key[...] = both(here, reading, key).astype(dtype)
                send(key, reads.at[:, channels])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                key[...] = stays
                send(key, writes.at[:, channels])

            def of_values(part: Any, _: None) -> None:
                value = values.at[part]
                value[...] = both(here, writing, value).astype(dtype)
                send(value, written.at[:, pl.ds(part * TILE, TILE)])

            jax.lax.fori_loop(0, parts_of_keys, of_keys, None)
            plgpu.barrier_wait(came)
            jax.lax.fori_loop(0, parts_of_values, of_values, None)
            plgpu.wait_smem_to_gmem(0)

        pair, own = [shared_tile(jnp.bfloat16)] * 2, [shared_tile(dtype)] * 2
        pl.run_scoped(
            run,
            plgpu.SMEM((parts_of_keys, TILE, TILE), dtype, transforms=swizzled(dtype)),
            plgpu.SMEM((max(2, parts_of_values), TILE, TILE), dtype, transforms=swizzled(dtype)),
            plgpu.SMEM((COUNT, TILE), jnp.float32),
            plgpu.SMEM((1, TILE), jnp.float32),
            pair,
            pair,
            () if dtype == jnp.bfloat16 else (pair, own, own),
            plgpu.Barrier(num_arrivals=parts_of_keys + 2),
            plgpu.Barrier(num_arrivals=parts_of_values),
        )

    products = 3 * parts_of_keys + 2 * parts_of_values + 3 * 2 * DOUBLINGS
    keys = jax.ShapeDtypeStruct(TIME_FIRST.shape(b, h, t, k.shape[3]), dtype)
    values = jax.ShapeDtypeStruct(TIME_FIRST.shape(b, h, t, v.shape[3]), dtype)
    inverses = [jax.ShapeDtypeStruct((b, h, t, TILE), dtype)] * (2 if keep else 0)
    written, reads, writes, *inverse = launch.kernel(
        body,
        here,
        out_type=(values, keys, keys, *inverses),
        name='delta_rule_solve',
        cost=Cost(flops=products * 2 * b * h * count * TILE**3, exponentials=b * h * count * TILE**2),
        grid=(b, h, count),
        grid_names=GRID,
        compiler_params=NAMED_LAYOUTS,
    )(k, v, beta, rows)
    return Solved(written, reads, writes, tuple(inverse))


class Queries(NamedTuple):
    """What queries do in the sweep from the last chunk to the first, 16-bit.

    Attributes:
      reads: the queries that read the state before the chunk, `scale diag(reach) Q`, `b t h k`.
      within: the gradients of the values that steps write, from reads in the same chunk, `b t h v`.
    """

    reads: jax.Array
    within: jax.Array


def queries(here: Target, q: jax.Array, k: jax.Array, do: jax.Array, rows: jax.Array, scale: float) -> Queries:
    """What the queries of all chunks do, for gradients of their outputs, `b t h v`, which are multiplied by `scale`."""
    b, h, count = rows.shape[:3]
    t, dtype = count * TILE, do.dtype

    def body(q_ref: Any, k_ref: Any, do_ref: Any, rows_ref: Any, reads_ref: Any, within_ref: Any) -> None:
        at, head, chunk = (jax.lax.axis_index(name) for name in GRID)
        steps = pl.ds(chunk * TILE, TILE)
        reads, within = (_tiles(TIME_FIRST.of_head(ref, at, head).at[steps]) for ref in (reads_ref, within_ref))

        def run(asked: Any, keys: Any, given: Any, numbers: Any, arrived: Any) -> None:
            _copy(_tiles(TIME_FIRST.of_group(q_ref, at, head, h, q).at[steps]), asked, arrived)
            _copy(_tiles(TIME_FIRST.of_group(k_ref, at, head, h, k).at[steps]), keys, arrived)
            _copy(_tiles(TIME_FIRST.of_head(do_ref, at, head).at[steps]), given, arrived)
            _copy([rows_ref.at[at, head, chunk]], [numbers], arrived)
            plgpu.barrier_wait(arrived)
            pairs = zip(keys, asked, strict=True)
            (scores,) = accumulate(here, (None, [(key, query.transpose((1, 0))) for key, query in pairs]))
            weights = (scores * decays_between(numbers, BACKWARD)).astype(dtype)
            for tile, out in zip(given, within, strict=True):
                tile[...] = times(scale, multiply(here, weights, tile)).astype(dtype)
                send(tile, out)
            for query, out in zip(asked, reads, strict=True):
                query[...] = times(scale, load(query) * along(numbers, REACH, 0)).astype(dtype)
                send(query, out)
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(
            run,
            [shared_tile(dtype)] * (k.shape[3] // TILE),
            [shared_tile(dtype)] * (k.shape[3] // TILE),
            [shared_tile(dtype)] * (do.shape[3] // TILE),
            plgpu.SMEM((COUNT, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=(2 * k.shape[3] + do.shape[3]) // TILE + 1),
        )

    return Queries(
        *launch.kernel(
            body,
            here,
            out_type=(
                jax.ShapeDtypeStruct(TIME_FIRST.shape(b, h, t, k.shape[3]), dtype),
                jax.ShapeDtypeStruct(do.shape, dtype),
            ),
            name='delta_rule_queries',
            cost=Cost(2 * b * h * t * TILE * (k.shape[3] + do.shape[3]), exponentials=b * h * t * TILE),
            grid=(b, h, count),
            grid_names=GRID,
            compiler_params=NAMED_LAYOUTS,
        )(q, k, do, rows)
    )


class Missing(NamedTuple):
    """Gradients of what steps write, `diag(beta) (V - diag(reach) K S)`, before the inverse.

    Attributes:
      dmissing: `X^T dR`, `b t h v`, 16-bit.
      dv: these times beta, `b t h v`.
      by_value: the sum of their products with V, `b h t`, float32.
    """

    dmissing: jax.Array
    dv: jax.Array
    by_value: jax.Array


def missing(
    here: Target,
    inverse: tuple[jax.Array, ...],
    dvalues: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    dv_type: Any,
) -> Missing:
    """From dR, `dvalues`, `b t h v`, and the two parts of X."""
    b, t, h, _ = dvalues.shape
    count, dtype = t // TILE, dvalues.dtype

    def body(coarse_ref: Any, fine_ref: Any, dvalues_ref: Any, v_ref: Any, beta_ref: Any, *outs: Any) -> None:
        at, head, chunk = (jax.lax.axis_index(name) for name in GRID)
        steps = pl.ds(chunk * TILE, TILE)
        missing_out, dv_out = (_tiles(TIME_FIRST.of_head(ref, at, head).at[steps]) for ref in outs[:2])

        def run(pair: Any, given: Any, values: Any, betas: Any, dv_tile: Any, sums: Any, arrived: Any) -> None:
            _copy([ref.at[at, head, steps] for ref in (coarse_ref, fine_ref)], pair, arrived)
            _copy(_tiles(TIME_FIRST.of_head(dvalues_ref, at, head).at[steps]), given, arrived)
            _copy(_tiles(TIME_FIRST.of_group(v_ref, at, head, h, v).at[steps]), values, arrived)
            _copy([beta_ref.at[at, head, chunk]], [betas], arrived)
            plgpu.barrier_wait(arrived)
            by_value = None
            for tile, value, out, dv in zip(given, values, missing_out, dv_out, strict=True):
                found = both(here, [part.transpose((1, 0)) for part in pair], tile)
                tile[...] = found.astype(dtype)
                send(tile, out)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                dv_tile[...] = (found * along(betas, 0, 0)).astype(dv_type)
                send(dv_tile, dv)
                product = jnp.sum(found * load(value), axis=1)
                by_value = product if by_value is None else by_value + product
            sums[...] = by_value
            send(sums, outs[2].at[at, head, steps])
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(
            run,
            [shared_tile(dtype)] * 2,
            [shared_tile(dtype)] * (v.shape[3] // TILE),
            [shared_tile(dtype)] * (v.shape[3] // TILE),
            plgpu.SMEM((1, TILE), jnp.float32),
            shared_tile(dv_type),
            plgpu.SMEM((TILE,), jnp.float32),
            plgpu.Barrier(num_arrivals=2 * v.shape[3] // TILE + 3),
        )

    return Missing(
        *launch.kernel(
            body,
            here,
            out_type=(
                jax.ShapeDtypeStruct(dvalues.shape, dtype),
                jax.ShapeDtypeStruct(dvalues.shape, dv_type),
                jax.ShapeDtypeStruct((b, h, t), jnp.float32),
            ),
            name='delta_rule_missing',
            cost=Cost(2 * 2 * b * h * t * TILE * v.shape[3]),
            grid=(b, h, count),
            grid_names=GRID,
            compiler_params=NAMED_LAYOUTS,
        )(*inverse, dvalues, v, beta)
    )


def _tiles(ref: Any) -> list[Any]:
    """The tiles of channels of a chunk."""
    return [ref.at[:, pl.ds(start, TILE)] for start in range(0, ref.shape[1], TILE)]


def _copy(sources: Any, tiles: Any, arrived: Any) -> None:
    for source, tile in zip(sources, tiles, strict=True):
        plgpu.copy_gmem_to_smem(source, tile, arrived)
