"""The kernels of `attention` for Hopper that go over the keys of every query, for its output."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.attention.maps import Block
from pallas_kernels.attention.mosaic_gpu import sm90
from pallas_kernels.attention.mosaic_gpu.sm90 import DOWN, PAD, ROWS, TILE, Arrays, Call, Place
from pallas_kernels.mosaic_gpu.products_sm90 import multiply

RowVectors = tuple[jax.Array, ...]
"""Numbers of the 64 queries of a warpgroup."""

TURNS_FROM = 2048
"""Keys of a block of rows, in the mean, from which its two warpgroups take turns at products and exponentials.

The turn of one begins half a step late. Measured on an H200: at 1,088 keys the forward pass takes 1.05 times as long
(64 channels) and 1.07 (128), at 4,160 keys 0.98 and 0.94.
"""


class Weighing(NamedTuple):
    """How rows of weights are computed, tile by tile.

    Attributes:
      given: vectors of every query known beforehand, `b h t`.
      results: the number of per-query vectors returned besides the output.
      begin: `begin() -> rows`, the running rows before the first key.
      take: `take(rows, given, block) -> rows, weights, rescale`; the weights of a tile, and the factor of
        those of earlier tiles, or `None`.
      end: `end(rows) -> normalizer, results`; the divisor of the sums, or `None`.
    """

    given: tuple[jax.Array, ...]
    results: int
    begin: Callable[[], RowVectors]
    take: Callable[[RowVectors, RowVectors, Block], tuple[RowVectors, jax.Array, jax.Array | None]]
    end: Callable[[RowVectors], tuple[jax.Array | None, Sequence[jax.Array]]]


def online(call: Call) -> Weighing:
    """The weights of a map whose statistics are computed online; they are the results."""
    weights = call.rule.weights

    def take(rows: RowVectors, given: RowVectors, block: Block) -> tuple[RowVectors, jax.Array, jax.Array]:
        pivot, denominator = rows
        highest = jnp.maximum(pivot, weights.highest(block, functools.partial(jnp.max, axis=1)))
        numerators, denominators = weights.block(block, call.spread(highest, 0))
        rescale = weights.rescale(pivot, highest)
        return (highest, rescale * denominator + jnp.sum(denominators, axis=1)), numerators, rescale

    return Weighing(
        given=(),
        results=len(weights.statistics),
        begin=lambda: (sm90.full((ROWS,), weights.start, DOWN), sm90.zeros((ROWS,), DOWN)),
        take=take,
        end=lambda rows: weights.finish(*rows),
    )


def known(call: Call, weigh: Callable[[Block, RowVectors], jax.Array], statistics: tuple[jax.Array, ...]) -> Weighing:
    """The weights `weigh(block, statistics)` of a map whose statistics are known."""

    def take(rows: RowVectors, given: RowVectors, block: Block) -> tuple[RowVectors, jax.Array, None]:
        return rows, weigh(block, tuple(call.spread(vector, 0) for vector in given)), None

    return Weighing(given=statistics, results=0, begin=lambda: (), take=take, end=lambda rows: (None, ()))


def weighted_sum(call: Call, arrays: Arrays, weighing: Weighing) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the sums of the values, `b t h v`, and the results of `weighing`, `b h t`."""
    b, t, h, k = arrays.q.shape
    g, v = arrays.v.shape[2:]
    dtype = arrays.q.dtype
    takes_turns = call.scores() >= TURNS_FROM * t

    def body(operands: Arrays, given: Any, output: Any, results: Any, scratch: Any) -> None:
        batch, head, turn, warpgroup = (jax.lax.axis_index(name) for name in sm90.AXES)
        group = head // (h // g)
        first = call.first(turn)
        mine = sm90.rows_from(first + warpgroup * ROWS)
        steps = sm90.steps_of(call, operands, batch, group, first)
        q, o, vectors, copied, turns = scratch

        def change() -> None:
            """Hands the matrix unit to the other warpgroup, which weighs its scores while this one multiplies."""
            if takes_turns:
                plgpu.barrier_arrive(turns)
                plgpu.barrier_wait(turns)

        def around(loop: Callable[[Any], Any]) -> None:
            plgpu.copy_gmem_to_smem(operands.q.at[batch, mine, head], q.at[warpgroup], copied.at[warpgroup])
            fixed = (sm90.row_parts(call, operands, batch, head, mine), _read(call, given, batch, head, mine))
            plgpu.barrier_wait(copied.at[warpgroup])
            # One of the two is half a step behind the other.
            pl.when(warpgroup == 1)(change)
            _, rows, sums = loop((fixed, weighing.begin(), sm90.zeros((ROWS, v), TILE)))
            pl.when(warpgroup == 0)(change)
            normalizer, found = weighing.end(rows)
            if normalizer is not None:
                sums /= _over_channels(normalizer, v)
            sm90.give(sums.astype(dtype), o.at[warpgroup], output.at[batch, mine, head])
            for array, place, result in zip(found, vectors, results, strict=True):
                sm90.give(array, place.at[warpgroup], result.at[batch, head, mine])
            plgpu.wait_smem_to_gmem(0)

        def step(indices: Any, keys: Any, values: Any, vectors: Any, carry: Any) -> Any:
            (parts, given), rows, sums = carry
            tile = steps.column(indices[0])
            place = Place(first + warpgroup * ROWS, tile * call.step)
            products = multiply(call.here, q.at[warpgroup], keys.transpose((1, 0)), meanwhile=change)

            def weigh(products: jax.Array, rows: RowVectors, *, masked: bool) -> Any:
                every = sm90.column_parts(call, operands, batch, head, parts, vectors, place, masked=masked)
                block = sm90.score(call, products, every, place, masked=masked).block
                rows, weights, rescale = weighing.take(rows, given, block)
                return rows, weights.astype(dtype), rescale

            rows, weights, rescale = sm90.where_needed(call, place, steps.alike(tile), weigh, products, rows)
            if rescale is not None:
                sums *= _over_channels(rescale, v)
            # All of that comes before the change, which names no registers.
            rows, weights, sums = jax.lax.optimization_barrier((rows, weights, sums))
            change()
            return carry[0], rows, multiply(call.here, weights, values, sums)

        sm90.over_keys(step, around, call, operands, steps, batch, head, group, first)

    vector = jax.ShapeDtypeStruct((b, h, t), jnp.float32)
    rows = (sm90.WARPGROUPS, ROWS)
    output, results = sm90.kernel(
        call,
        body,
        name='attention_forward',
        products=k + v,
        heads=b * h,
        out_type=(jax.ShapeDtypeStruct((b, t, h, v), dtype), [vector] * weighing.results),
        grid=(b, h, t // PAD),
        scratch_types=(
            (
                plgpu.SMEM((*rows, k), dtype, transforms=call.swizzled()),
                plgpu.SMEM((*rows, v), dtype, transforms=call.swizzled()),
                [plgpu.SMEM(rows, jnp.float32)] * weighing.results,
                plgpu.Barrier(num_barriers=sm90.WARPGROUPS),
                plgpu.Barrier(num_arrivals=sm90.WARPGROUPS),
            ),
        ),
    )(arrays, weighing.given)
    return output, results


def _read(call: Call, vectors: Any, batch: Any, head: Any, mine: Any) -> RowVectors:
    return tuple(call.load(ref.at[batch, head, mine], 0) for ref in vectors)


def _over_channels(vector: jax.Array, channels: int) -> jax.Array:
    return jax.lax.broadcast_in_dim(vector, (ROWS, channels), (0,))
