"""`short_conv` on a Hopper GPU: a tile of time and channels a program, whose threads have channels of their own.

A thread goes over its tokens in order and keeps the last `w - 1` inputs in registers; backward, the gradients of as
many inputs too, which later tokens still add to. It computes what the first tokens after the tile give to these once
more, in place of a sum over programs. Only the minimum is moved: x and the outputs, and backward x, dy and dx, in whose
place dy was; of the taps' gradients every program writes its sums, which are then added up in order.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import cost, precision, tiling
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.short_conv import vjp
from pallas_kernels.target import Target

ROWS = tiling.CONV_STEPS
"""Tokens of a tile."""

ALIGNED = 16
"""The bytes at whose multiples copies of tiles begin in a row, and rows in memory."""

TAPS = 8
"""The most taps: inputs that are still needed are in registers."""

GROUP = 4
"""Unrolled tokens, all loaded before the first is computed; with 8, registers leave room for fewer programs."""

# Threads read and write channels of their own in shared memory, and so need no barrier between.
PARAMETERS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
)
GRID = ('b', 'tile', 'd')


@functools.lru_cache
def form(here: Target, activation: str) -> vjp.Convolution:
    """The differentiable form for a device."""
    passes = vjp.Passes(functools.partial(_forward, here, activation), functools.partial(_backward, here, activation))
    return vjp.differentiable(passes)


def refusal(here: Target, x: jax.Array, taps: jax.Array, bias: jax.Array | None) -> str | None:
    """The reason why the call cannot be served, or `None`."""
    b, t, d = x.shape
    least, multiple = tiling.CONV_CHANNELS[-1], ALIGNED // x.dtype.itemsize
    grid = {'b': b, 'tile': pl.cdiv(t, ROWS), 'd': pl.cdiv(d, least)}
    reason = launch.capability_refusal(here) or launch.grid_refusal(**grid)
    if reason is not None:
        return reason
    dtype = precision.accumulator(x, taps, bias)
    if dtype != jnp.float32:
        return f'it would be computed in {dtype}; expected operands of at most float32'
    if 0 in x.shape or d < least or d % multiple:
        expected = f'at least {least} channels and a multiple of {multiple}'
        return f'x has shape {x.shape}; expected no dimension of size zero, {expected}'
    if taps.shape[0] > TAPS:
        return f'there are {taps.shape[0]} taps; expected at most {TAPS}'
    return None


def _forward(
    here: Target, activation: str, x: jax.Array, taps: jax.Array, bias: jax.Array | None, reach: jax.Array
) -> jax.Array:
    (b, t, d), w = x.shape, taps.shape[0]
    x, reach = _filled(x), _reach_of_tiles(reach, w)
    lanes, tiles = tiling.short_conv(d).channels, x.shape[1] // ROWS

    def body(x_ref: Any, taps_ref: Any, *rest: Any) -> None:
        *bias_ref, reach_ref, y_ref = rest
        at, place, column = (jax.lax.axis_index(name) for name in GRID)
        start, channels, shared = place * ROWS, _channels(column, lanes, d), at % reach.shape[0]

        def run(tile: Any, arrived: Any) -> None:
            plgpu.copy_gmem_to_smem(x_ref.at[at, pl.ds(start, ROWS), channels], tile, arrived)
            factors = _numbers(taps_ref, w, channels)
            constant = bias_ref[0][channels] if bias_ref else None
            before = _rows(x_ref, at, start, range(1 - w, 0), channels)
            plgpu.barrier_wait(arrived)

            def of_group(group: Any, before: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                first = group * GROUP
                given = [tile[first + row].astype(jnp.float32) for row in range(GROUP)]
                for row, own in enumerate(given):
                    seen = _seen(reach_ref[shared, start + first + row], before)
                    tile[first + row] = _activated(activation, _sum(factors, constant, seen, own)).astype(tile.dtype)
                    before = (*before, own)[1:] if w > 1 else ()
                return before

            jax.lax.fori_loop(0, ROWS // GROUP, of_group, before)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, y_ref.at[at, pl.ds(start, ROWS), channels])
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(run, plgpu.SMEM((ROWS, lanes), x.dtype), plgpu.Barrier())

    y = launch.kernel(
        body,
        here,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        name='short_conv',
        cost=_cost(x, taps, bias, activation).forward,
        grid=(b, tiles, pl.cdiv(d, lanes)),
        grid_names=GRID,
        compiler_params=PARAMETERS,
    )(x, taps, *([] if bias is None else [bias]), reach)
    return y[:, :t]


def _backward(
    here: Target,
    activation: str,
    x: jax.Array,
    taps: jax.Array,
    bias: jax.Array | None,
    reach: jax.Array,
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    (b, t, d), w = x.shape, taps.shape[0]
    x, dy, reach = _filled(x), _filled(dy), _reach_of_tiles(reach, w)
    lanes, tiles, ahead = tiling.short_conv(d).channels, x.shape[1] // ROWS, w - 1

    def body(x_ref: Any, taps_ref: Any, *rest: Any) -> None:
        *bias_ref, reach_ref, dy_ref, dx_ref, sums_ref = rest
        at, place, column = (jax.lax.axis_index(name) for name in GRID)
        start, channels, shared = place * ROWS, _channels(column, lanes, d), at % reach.shape[0]

        def run(tile: Any, gradients: Any, arrived: Any) -> None:
            steps = pl.ds(start, ROWS)
            plgpu.copy_gmem_to_smem(x_ref.at[at, steps, channels], tile, arrived)
            plgpu.copy_gmem_to_smem(dy_ref.at[at, steps, channels], gradients.at[pl.ds(0, ROWS)], arrived)
            factors = _numbers(taps_ref, w, channels)
            constant = bias_ref[0][channels] if bias_ref else None
            before = _rows(x_ref, at, start, range(1 - w, 0), channels)
            after = range(ROWS, ROWS + ahead)
            later = list(zip(*(_rows(ref, at, start, after, channels) for ref in (x_ref, dy_ref)), strict=True))
            plgpu.barrier_wait(arrived)

            def of_step(row: Any, own: jax.Array, given: jax.Array, before: Any, pending: Any) -> tuple[Any, ...]:
                """The gradient of the sum, its inputs, and the input gradients after this token, its own last."""
                reached = reach_ref[shared, start + row]
                seen = _seen(reached, before)
                dsum = given * _slope(activation, lambda: _sum(factors, constant, seen, own))
                parts = _seen(reached, [dsum * factor for factor in factors[:-1]])
                added = [so_far + part for so_far, part in zip(pending, parts, strict=True)]
                return dsum, (*seen, own), (*added, dsum * factors[-1])

            def of_group(group: Any, carry: Any) -> Any:
                before, pending, sums = carry
                first = group * GROUP
                read = [[ref[first + row].astype(jnp.float32) for ref in (tile, gradients)] for row in range(GROUP)]
                for row, (own, given) in enumerate(read):
                    dsum, seen, (done, *pending) = of_step(first + row, own, given, before, pending)
                    # Of the token that is `ahead` behind: what later ones add is in.
                    gradients[first + row] = done.astype(gradients.dtype)
                    products = [dsum * factor for factor in seen] + [dsum] * (constant is not None)
                    sums = tuple(so_far + product for so_far, product in zip(sums, products, strict=True))
                    before = (*before, own)[1:] if w > 1 else ()
                return before, tuple(pending), sums

            nothing = _zeros(lanes)
            carry = before, (nothing,) * ahead, (nothing,) * (w + (constant is not None))
            before, pending, sums = jax.lax.fori_loop(0, ROWS // GROUP, of_group, carry)
            for row, (own, given) in zip(after, later, strict=True):
                _, _, (done, *pending) = of_step(row, own, given, before, pending)
                gradients[row] = done.astype(gradients.dtype)
                before = (*before, own)[1:]
            for number, total in enumerate(sums):
                sums_ref[at, place, number, channels] = total
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(gradients.at[pl.ds(ahead, ROWS)], dx_ref.at[at, steps, channels])
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(
            run,
            plgpu.SMEM((ROWS, lanes), x.dtype),
            plgpu.SMEM((ROWS + ahead, lanes), dy.dtype),
            plgpu.Barrier(num_arrivals=2),
        )

    kinds = w + (bias is not None)
    dx, sums = launch.kernel(
        body,
        here,
        out_type=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((b, tiles, kinds, d), jnp.float32),
        ),
        name='short_conv_gradients',
        cost=_cost(x, taps, bias, activation).backward,
        grid=(b, tiles, pl.cdiv(d, lanes)),
        grid_names=GRID,
        compiler_params=PARAMETERS,
    )(x, taps, *([] if bias is None else [bias]), reach, dy)
    total = jnp.sum(sums, axis=(0, 1))
    return dx[:, :t], total[:w], None if bias is None else total[w]


def _cost(x: jax.Array, taps: jax.Array, bias: jax.Array | None, activation: str) -> Any:
    b, t, d = x.shape
    return cost.short_conv(
        b=b, t=t, d=d, w=taps.shape[0], bias=bias is not None, activation=activation, itemsize=x.dtype.itemsize
    ).model


def _channels(column: Any, lanes: int, d: int) -> Any:
    """Those of a tile; the last shares some with the one before where they do not divide, and both write the same."""
    return pl.ds(jnp.minimum(column * lanes, d - lanes), lanes)


def _filled(array: jax.Array) -> jax.Array:
    """Pads time with zeros to whole tiles."""
    return jnp.pad(array, ((0, 0), (0, -array.shape[1] % ROWS), (0, 0)))


def _reach_of_tiles(reach: jax.Array, w: int) -> jax.Array:
    """That of whole tiles and of the tokens that a tile reads after its own; what is not there reaches nothing."""
    end = -reach.shape[1] % ROWS + w - 1
    return jnp.pad(reach, ((0, 0), (0, end)), constant_values=-1)


def _numbers(ref: Any, count: int, channels: Any) -> list[jax.Array]:
    return [ref[place, channels].astype(jnp.float32) for place in range(count)]


def _rows(ref: Any, at: Any, start: Any, places: Sequence[int], channels: Any) -> tuple[jax.Array, ...]:
    """Rows around a tile, in registers; for those that do not exist others, which nothing reaches."""
    last = ref.shape[1] - 1
    return tuple(ref[at, jnp.clip(start + place, 0, last), channels].astype(jnp.float32) for place in places)


def _zeros(lanes: int) -> jax.Array:
    layout = plgpu.Layout.WG_STRIDED((lanes,), vec_size=lanes // launch.WARPGROUP)
    return plgpu.layout_cast(jnp.zeros((lanes,), jnp.float32), layout)


def _seen(reach: Any, before: Sequence[jax.Array]) -> list[jax.Array]:
    """Numbers of the tokens before, oldest first, zero where these are of other documents."""
    lags = range(len(before), 0, -1)
    return [jnp.where(reach >= lag, number, 0.0) for lag, number in zip(lags, before, strict=True)]


def _sum(
    factors: Sequence[jax.Array], constant: jax.Array | None, seen: Sequence[jax.Array], own: jax.Array
) -> jax.Array:
    total = own * factors[-1]
    for factor, number in zip(factors[:-1], seen, strict=True):
        total = total + number * factor
    return total if constant is None else total + constant.astype(jnp.float32)


def _activated(activation: str, total: jax.Array) -> jax.Array:
    return total if activation == vjp.IDENTITY else total * _sigmoid(total)


def _slope(activation: str, total: Callable[[], jax.Array]) -> Any:
    """The derivative of the activation, of a sum that is computed where it is needed."""
    if activation == vjp.IDENTITY:
        return 1.0
    number = total()
    open_by = _sigmoid(number)
    return open_by * (1.0 + number * (1.0 - open_by))


def _sigmoid(number: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-number))
