"""`selective_scan` on a Hopper GPU: tiles of time streamed through shared memory, the states in registers.

A program is one sequence and 64 channels over all of time, and holds their states, `64 n`, spread over a warpgroup as
in matrix products: a row, one channel, over four threads. So sums over n take two exchanges between threads
and those over channels three and one through shared memory, and b 4, d 2048 make 128 programs for 132 multiprocessors.

The forward pass keeps the state at the start of every tile, `b t/rows d n`. The backward pass recomputes the states of
a tile in shared memory, then runs the tile in reverse. The gradients of B and C are written by every program for its
channels, `b d/64 t n`, that of A for its sequence, and then summed, in a fixed order.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import cost, tiling, tuning
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.stream import ALIGNMENT, Tiles, stream
from pallas_kernels.selective_scan import kernels, vjp
from pallas_kernels.selective_scan.vjp import Operands, Outputs
from pallas_kernels.target import Target

TYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

CHANNELS = 64
"""The channels of a program: the rows of a warpgroup's matrix."""

MOST = 64
"""The maximum size of a channel's state: seven such arrays for 64 channels fill the registers of a warpgroup."""

GROUP = 4
"""Unrolled steps, so that all of them are loaded before the first is computed."""

STAGES = 2

FAST = plgpu.CompilerParams(approx_math=True)
"""The hardware exponential, accurate to about two units in the last place; rounding of `dt A` loses as much."""

STATE = plgpu.Layout.WGMMA
BY_CHANNEL = STATE.reduce(1)
BY_NUMBER = STATE.reduce(0)


@functools.lru_cache
def form(here: Target) -> Callable[[Operands, jax.Array | None], Outputs]:
    """The differentiable form for a device."""
    return vjp.differentiable(functools.partial(_forward, here), functools.partial(_backward, here))


def refusal(here: Target, operands: Operands) -> str | None:
    """The reason why the call cannot be served, or `None`."""
    b, _, d = operands.x.shape
    return (
        launch.capability_refusal(here)
        or launch.grid_refusal(b=b, channels=pl.cdiv(d, CHANNELS))
        or kernels.refusal(operands, MOST)
    )


def tiled_by(here: Target, operands: Operands) -> str:
    """Where the tile of a call is from, see `tuning.source`."""
    return tuning.source(here, tiling.selective_scan_gpu, *_sizes(operands))


class At(NamedTuple):
    """The inputs of one step: x, dt by channel, `64`; B, C for every channel, `64 n`; the factor of the past."""

    x: jax.Array
    dt: jax.Array
    B: jax.Array
    C: jax.Array
    kept: jax.Array | None

    def across(self, by_channel: jax.Array) -> jax.Array:
        return jax.lax.broadcast_in_dim(by_channel, self.B.shape, (0,))

    def decay(self, A: jax.Array) -> jax.Array:
        decay = jnp.exp(self.across(self.dt) * A)
        return decay if self.kept is None else decay * self.kept

    def written(self) -> jax.Array:
        return self.across(self.dt * self.x) * self.B


def _forward(
    here: Target, operands: Operands, starts: jax.Array | None, keep: bool
) -> tuple[Outputs, jax.Array | None]:
    """Keeps the states at the beginning of the tiles, `(b tiles) d n`: a copy has few dimensions."""
    (_, length, width), n = operands.x.shape, operands.A.shape[1]
    operands, rows = _filled(here, operands)
    b, t, d = operands.x.shape
    inputs = _inputs(operands, starts, rows)

    def body(refs: Any, A_ref: Any, state_ref: Any, result_refs: Any, final_ref: Any) -> None:
        i, c, channels = _program()
        A = _load_state(A_ref.at[channels])

        def of_tile(_: Any, tiles: Any, results: Any, h: jax.Array) -> jax.Array:
            if keep:
                results['states'][0] = h

            def of_group(j: Any, h: jax.Array) -> jax.Array:
                for row, at in _steps(tiles, j * GROUP, range(GROUP)):
                    h = at.decay(A) * h + at.written()
                    _write(results['y'].at[0, row], jnp.sum(h * at.C, axis=1))
                return h

            return jax.lax.fori_loop(0, rows // GROUP, of_group, h)

        tiles = functools.partial(_tiles, rows=rows, i=i, c=c, place=lambda k: k)
        h = _load_state(state_ref.at[i, channels])
        final_ref[i, channels] = stream(of_tile, t // rows, tiles(refs), tiles(result_refs), h, stages=STAGES)

    results = {'y': jax.ShapeDtypeStruct((b, t, d), operands.x.dtype)}
    if keep:
        results['states'] = jax.ShapeDtypeStruct((b * (t // rows), *operands.A.shape), jnp.float32)
    results, final = launch.kernel(
        body,
        here,
        out_type=(results, jax.ShapeDtypeStruct(operands.state.shape, jnp.float32)),
        name='selective_scan_forward',
        cost=cost.selective_scan(b=b, t=t, d=d, n=n, implementation='mosaic_gpu').executed.forward,
        grid=(b, d // CHANNELS),
        grid_names=('b', 'd'),
        compiler_params=FAST,
    )(inputs, operands.A, operands.state)
    return (results['y'][:, :length, :width], final[:, :width, :n]), results.get('states')


def _backward(
    here: Target, operands: Operands, starts: jax.Array | None, states: jax.Array, gradients: Outputs
) -> Operands:
    """The states before every step, `rows 64 n`, are recomputed tile by tile.

    With `r_t = dy_t C_t + decay_{t+1} r_{t+1}` the gradient of `h_t`, that of the write is `r_t` and that of the decay
    `r_t h_{t-1}`.
    """
    given, (dy, dfinal) = operands, gradients
    operands, rows = _filled(here, operands)
    (b, t, d), n = operands.x.shape, operands.A.shape[1]
    ends = [(0, whole - size) for size, whole in zip(dy.shape, (b, t, d), strict=True)]
    inputs = _inputs(operands, starts, rows) | {'dy': jnp.pad(dy.astype(operands.x.dtype), ends), 'states': states}
    dfinal = jnp.pad(dfinal, [(0, whole - size) for size, whole in zip(dfinal.shape, (b, d, n), strict=True)])

    def body(
        refs: Any, A_ref: Any, dfinal_ref: Any, result_refs: Any, dA_ref: Any, dstate_ref: Any, before_ref: Any
    ) -> None:
        i, c, channels = _program()
        A = _load_state(A_ref.at[channels])

        def again(tiles: Any, j: Any, h: jax.Array) -> jax.Array:
            for row, at in _steps(tiles, j * GROUP, range(GROUP)):
                before_ref[row] = h
                h = at.decay(A) * h + at.written()
            return h

        def of_group(tiles: Any, results: Any, j: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dcarried, dA, h = carry
            for row, at in _steps(tiles, (rows // GROUP - 1 - j) * GROUP, range(GROUP)[::-1]):
                dy = _load(tiles['dy'].at[0, row], BY_CHANNEL)
                before = _load_state(before_ref.at[row])
                r = at.across(dy) * at.C + dcarried
                dcarried = at.decay(A) * r
                dexponent = dcarried * before
                dwritten = jnp.sum(r * at.B, axis=1)
                _write(results['dx'].at[0, row], dwritten * at.dt)
                _write(results['ddt'].at[0, row], dwritten * at.x + jnp.sum(dexponent * A, axis=1))
                _write(results['dB'].at[0, 0, row], jnp.sum(r * at.across(at.dt * at.x), axis=0))
                _write(results['dC'].at[0, 0, row], jnp.sum(h * at.across(dy), axis=0))
                dA, h = dA + dexponent * at.across(at.dt), before
            return dcarried, dA, h

        def of_tile(_: Any, tiles: Any, results: Any, carry: tuple[jax.Array, jax.Array]) -> Any:
            h = _load_state(tiles['states'].at[0])
            h = jax.lax.fori_loop(0, rows // GROUP, functools.partial(again, tiles), h)
            each = functools.partial(of_group, tiles, results)
            return jax.lax.fori_loop(0, rows // GROUP, each, (*carry, h))[:2]

        tiles = functools.partial(_tiles, rows=rows, i=i, c=c, place=lambda k: t // rows - 1 - k)
        dA = plgpu.layout_cast(jnp.zeros((CHANNELS, n), jnp.float32), STATE)
        carry = (_load_state(dfinal_ref.at[i, channels]), dA)
        dcarried, dA = stream(of_tile, t // rows, tiles(refs), tiles(result_refs), carry, stages=STAGES)
        dA_ref[i, channels] = dA
        dstate_ref[i, channels] = dcarried

    partial = jax.ShapeDtypeStruct((b, d // CHANNELS, t, n), jnp.float32)
    whole = jax.ShapeDtypeStruct((b, d, n), jnp.float32)
    results = {
        'dx': jax.ShapeDtypeStruct((b, t, d), operands.x.dtype),
        'ddt': jax.ShapeDtypeStruct((b, t, d), operands.dt.dtype),
        'dB': partial,
        'dC': partial,
    }
    results, dA, dstate = launch.kernel(
        body,
        here,
        out_type=(results, whole, whole),
        scratch_types=[plgpu.SMEM((rows, CHANNELS, n), jnp.float32)],
        name='selective_scan_backward',
        cost=cost.selective_scan(b=b, t=t, d=d, n=n, implementation='mosaic_gpu').executed.backward,
        grid=(b, d // CHANNELS),
        grid_names=('b', 'd'),
        compiler_params=FAST,
    )(inputs, operands.A, dfinal)
    dB, dC = (jnp.sum(results[name], axis=1) for name in ('dB', 'dC'))
    return kernels.cut(Operands(results['dx'], results['ddt'], jnp.sum(dA, axis=0), dB, dC, dstate), given)


def _filled(here: Target, operands: Operands) -> tuple[Operands, int]:
    """The operands padded to whole tiles, and the steps of a tile."""
    operands = kernels.filled(operands, {'t': 8, 'd': CHANNELS, 'n': 8}, TYPES)
    return operands, tuning.tile(here, tiling.selective_scan_gpu, *_sizes(operands))


def _sizes(operands: Operands) -> tuple[int, int, int, int]:
    """The arguments of the rule, of a call or of one that was padded."""
    t, n = (-(-size // 8) * 8 for size in (operands.x.shape[1], operands.A.shape[1]))
    return t, n, operands.x.dtype.itemsize, operands.dt.dtype.itemsize


def _inputs(operands: Operands, starts: jax.Array | None, rows: int) -> dict[str, jax.Array]:
    """The inputs that vary with time; the factors of the past `b tiles rows`, the last padded."""
    inputs = {'x': operands.x, 'dt': operands.dt, 'B': operands.B, 'C': operands.C}
    if starts is not None:
        b, t, _ = operands.x.shape
        kept = kernels.kept(starts, t).reshape(b, t // rows, rows)
        inputs['kept'] = jnp.pad(kept, ((0, 0), (0, 0), (0, -rows % (ALIGNMENT // kept.itemsize))))
    return inputs


def _program() -> tuple[Any, Any, Any]:
    """The sequence of a program, its index along channels, and its channels."""
    c = jax.lax.axis_index('d')
    return jax.lax.axis_index('b'), c, pl.ds(c * CHANNELS, CHANNELS)


def _tiles(refs: dict[str, Any], rows: int, i: Any, c: Any, place: Callable[[Any], Any]) -> dict[str, Tiles]:
    """The tiles of a program in arrays by name."""

    def tiles(name: str, ref: Any) -> Tiles:
        n = ref.shape[-1]
        match name:
            case 'kept':
                return Tiles(ref, (1, 1, n), lambda k: (i, place(k), 0))
            case 'B' | 'C':
                return Tiles(ref, (1, rows, n), lambda k: (i, place(k), 0))
            case 'states':
                of_sequence = ref.shape[0] // jax.lax.axis_size('b')
                return Tiles(ref, (1, CHANNELS, n), lambda k: (i * of_sequence + place(k), c, 0))
            case 'dB' | 'dC':
                return Tiles(ref, (1, 1, rows, n), lambda k: (i, c, place(k), 0))
        return Tiles(ref, (1, rows, CHANNELS), lambda k: (i, place(k), c))

    return {name: tiles(name, ref) for name, ref in refs.items()}


def _steps(tiles: dict[str, Any], start: Any, order: range) -> list[tuple[Any, At]]:
    """Rows of a tile in order, and the inputs of their steps."""

    def read(row: Any) -> At:
        B, C = (_load(tiles[name].at[0, row], BY_NUMBER) for name in ('B', 'C'))
        B, C = (jax.lax.broadcast_in_dim(part, (CHANNELS, *part.shape), (1,)) for part in (B, C))
        x, dt = (_load(tiles[name].at[0, row], BY_CHANNEL) for name in ('x', 'dt'))
        return At(x, dt, B, C, tiles['kept'][0, 0, row] if 'kept' in tiles else None)

    return [(start + row, read(start + row)) for row in order]


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout).astype(jnp.float32)


def _load_state(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=STATE, optimized=False)


def _write(ref: Any, numbers: jax.Array) -> None:
    ref[...] = numbers.astype(ref.dtype)
