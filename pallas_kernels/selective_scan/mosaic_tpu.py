"""`selective_scan` on a TPU: tiles of time in order, the states `n d` in registers, channels along the lanes.

B and C lie with time along the lanes, so that a step's directions are a column, the same for every channel; the columns
of the next steps are rolled to where the loop expects them. The forward pass keeps the state at the start of every
tile, `b t/128 n d`. The backward pass recomputes the states of a tile in VMEM, then runs the tile in reverse; sums over
channels accumulate in the block of their tile of time, those over time in one block per sequence.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import cost, tiling
from pallas_kernels.mosaic_tpu import launch
from pallas_kernels.selective_scan import kernels, vjp
from pallas_kernels.selective_scan.vjp import Operands, Outputs
from pallas_kernels.target import Target

TYPES = (jnp.bfloat16, jnp.float32)

ROWS = tiling.LANES
"""The steps of a tile."""

MOST = 64
"""The maximum size of a channel's state: with 128 numbers the states of a tile would take 8 MiB of VMEM."""

MOST_STATES = tiling.VMEM // 64 * 3
"""The maximum size of a sequence's state: two float32 arrays of it, sums over time, take at most three quarters of
VMEM, though the compiler may hold each of them twice."""

GROUP = 16
"""Unrolled steps: the sublanes of a register of 16-bit numbers."""


@functools.lru_cache
def form(here: Target) -> Callable[[Operands, jax.Array | None], Outputs]:
    """The differentiable form for a device."""
    return vjp.differentiable(functools.partial(_forward, here), functools.partial(_backward, here))


def refusal(here: Target, operands: Operands) -> str | None:
    """The reason why the call cannot be served, or `None`."""
    reason = launch.generation_refusal(here) or kernels.refusal(operands, MOST)
    d, n = (-(-size // whole) * whole for size, whole in zip(operands.A.shape, (tiling.LANES, 8), strict=True))
    if reason is None and d * n > MOST_STATES:
        reason = f'the state of a sequence has {d} x {n} numbers with padding; expected at most {MOST_STATES}'
    return reason


class Arrays(NamedTuple):
    """The inputs of the kernels: x, dt `b t d`; columns `b (n n n) t`, of B, C and the factor of the past; A `n d`."""

    x: Any
    dt: Any
    columns: Any
    A: Any


class At(NamedTuple):
    """The inputs of one step: x, dt by channel, `1 d`; B, C and the factor of the past, `n 1`."""

    x: jax.Array
    dt: jax.Array
    B: jax.Array
    C: jax.Array
    kept: jax.Array | None = None

    def decay(self, A: jax.Array) -> jax.Array:
        decay = jnp.exp(self.dt * A)
        return decay if self.kept is None else decay * self.kept

    def written(self) -> jax.Array:
        return (self.dt * self.x) * self.B


def _arrays(operands: Operands, starts: jax.Array | None) -> tuple[Arrays, jax.Array]:
    """The inputs of the kernels, padded to whole tiles, and the state, `b n d`."""
    operands = kernels.filled(operands, {'t': ROWS, 'd': tiling.LANES, 'n': 8}, TYPES)
    columns = [operands.B.swapaxes(1, 2), operands.C.swapaxes(1, 2)]
    if starts is not None:
        columns.append(jnp.broadcast_to(kernels.kept(starts, operands.x.shape[1])[:, None], columns[0].shape))
    arrays = Arrays(operands.x, operands.dt, jnp.concatenate(columns, axis=1), operands.A.T)
    return arrays, operands.state.swapaxes(1, 2)


def _forward(
    here: Target, operands: Operands, starts: jax.Array | None, keep: bool
) -> tuple[Outputs, jax.Array | None]:
    """Keeps the states at the beginning of the tiles, `b tiles n d`."""
    (_, length, width), size = operands.x.shape, operands.A.shape[1]
    arrays, state = _arrays(operands, starts)
    (b, t, d), n = arrays.x.shape, state.shape[1]
    channels = tiling.selective_scan_tpu(d, n)
    steps = pl.BlockSpec((1, ROWS, channels), lambda i, c, k: (i, k, c))
    of_state = pl.BlockSpec((1, n, channels), lambda i, c, k: (i, 0, c))
    columns = pl.BlockSpec((1, arrays.columns.shape[1], ROWS), lambda i, c, k: (i, 0, k))
    of_A = pl.BlockSpec((n, channels), lambda i, c, k: (0, c))
    shapes = [jax.ShapeDtypeStruct((b, t, d), arrays.x.dtype), jax.ShapeDtypeStruct(state.shape, jnp.float32)]
    specs = [steps, of_state]
    if keep:
        shapes.append(jax.ShapeDtypeStruct((b, t // ROWS, n, d), jnp.float32))
        specs.append(pl.BlockSpec((1, 1, n, channels), lambda i, c, k: (i, k, 0, c)))
    y, final, *states = launch.call(
        functools.partial(_forward_kernel, n=n),
        here,
        name='selective_scan_forward',
        cost=cost.selective_scan(b=b, t=t, d=d, n=n, implementation='mosaic_tpu').executed.forward,
        grid=(b, d // channels, t // ROWS),
        in_specs=(Arrays(steps, steps, columns, of_A), of_state),
        out_specs=specs,
        out_shape=shapes,
        scratch_shapes=[pltpu.VMEM((ROWS, channels), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel', 'arbitrary')),
    )(arrays, state)
    return (y[:, :length, :width], final.swapaxes(1, 2)[:, :width, :size]), states[0] if keep else None


def _forward_kernel(refs: Arrays, state_ref: Any, y_ref: Any, h_ref: Any, *rest: Any, n: int) -> None:
    """One tile. The state is carried in the output of the last one."""
    *states_ref, row_ref = rest

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        h_ref[...] = state_ref[...]

    h = h_ref[0]
    for ref in states_ref:
        ref[0, 0] = h
    A = refs.A[...]

    def group(i: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h, columns = carry
        start = pl.multiple_of(i * GROUP, GROUP)
        for row, at in _steps(refs, columns, start, n):
            h = at.decay(A) * h + at.written()
            row_ref[pl.ds(start + row, 1)] = jnp.sum(h * at.C, axis=0, keepdims=True)
        return h, pltpu.roll(columns, ROWS - GROUP, 1)

    h_ref[0], _ = jax.lax.fori_loop(0, ROWS // GROUP, group, (h, refs.columns[0]))
    y_ref[0] = row_ref[...].astype(y_ref.dtype)


def _backward(
    here: Target, operands: Operands, starts: jax.Array | None, states: jax.Array, gradients: Outputs
) -> Operands:
    """The states before every step are recomputed, `128 n d` of one tile of channels at a time.

    With `r_t = dy_t C_t + decay_{t+1} r_{t+1}` the gradient of `h_t`, that of the write is `r_t` and that of the decay
    `r_t h_{t-1}`.
    """
    dy, dfinal = gradients
    arrays, _ = _arrays(operands, starts)
    (b, t, d), n = arrays.x.shape, arrays.A.shape[0]
    channels = tiling.selective_scan_tpu(d, n)
    blocks, tiles = d // channels, t // ROWS
    dy = jnp.pad(
        dy.astype(arrays.x.dtype), [(0, whole - size) for size, whole in zip(dy.shape, (b, t, d), strict=True)]
    )
    dfinal = dfinal.swapaxes(1, 2)
    dfinal = jnp.pad(dfinal, [(0, whole - size) for size, whole in zip(dfinal.shape, (b, n, d), strict=True)])

    steps = pl.BlockSpec((1, ROWS, channels), lambda i, k, c: (i, tiles - 1 - k, c))
    columns = pl.BlockSpec((1, arrays.columns.shape[1], ROWS), lambda i, k, c: (i, 0, tiles - 1 - k))
    dcolumns = pl.BlockSpec((1, 2 * n, ROWS), lambda i, k, c: (i, 0, tiles - 1 - k))
    of_states = pl.BlockSpec((1, 1, n, channels), lambda i, k, c: (i, tiles - 1 - k, 0, c))
    of_state = pl.BlockSpec((1, n, channels), lambda i, k, c: (i, 0, c))
    of_A = pl.BlockSpec((n, channels), lambda i, k, c: (0, c))
    of_sequence = pl.BlockSpec((1, blocks, n, channels), lambda i, k, c: (i, 0, 0, 0))
    sums = jax.ShapeDtypeStruct((b, blocks, n, channels), jnp.float32)
    dx, ddt, dcolumns, dstate, dA = launch.call(
        functools.partial(_backward_kernel, n=n),
        here,
        name='selective_scan_backward',
        cost=cost.selective_scan(b=b, t=t, d=d, n=n, implementation='mosaic_tpu').executed.backward,
        grid=(b, tiles, blocks),
        in_specs=(Arrays(steps, steps, columns, of_A), of_states, steps, of_state),
        out_specs=[steps, steps, dcolumns, of_sequence, of_sequence],
        out_shape=[
            jax.ShapeDtypeStruct((b, t, d), arrays.x.dtype),
            jax.ShapeDtypeStruct((b, t, d), arrays.dt.dtype),
            jax.ShapeDtypeStruct((b, 2 * n, t), jnp.float32),
            sums,
            sums,
        ],
        scratch_shapes=[
            pltpu.VMEM((ROWS, n, channels), jnp.float32),
            pltpu.VMEM((ROWS, channels), jnp.float32),
            pltpu.VMEM((ROWS, channels), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary', 'arbitrary'), vmem_limit_bytes=tiling.VMEM
        ),
    )(arrays, states, dy, dfinal)
    dB, dC = dcolumns[:, :n].swapaxes(1, 2), dcolumns[:, n:].swapaxes(1, 2)
    dA = jnp.sum(dA, axis=0).swapaxes(1, 2).reshape(d, n)
    dstate = dstate.swapaxes(2, 3).reshape(b, d, n)
    return kernels.cut(Operands(dx, ddt, dA, dB, dC, dstate), operands)


def _backward_kernel(
    refs: Arrays,
    states_ref: Any,
    dy_ref: Any,
    dfinal_ref: Any,
    dx_ref: Any,
    ddt_ref: Any,
    dcolumns_ref: Any,
    dstate_ref: Any,
    dA_ref: Any,
    before_ref: Any,
    dx_rows: Any,
    ddt_rows: Any,
    *,
    n: int,
) -> None:
    """One tile. The gradient from later steps is carried in the output of the gradient of the state."""
    k, c = pl.program_id(1), pl.program_id(2)

    @pl.when(k == 0)
    def _() -> None:
        dstate_ref[0, c] = dfinal_ref[0]
        dA_ref[0, c] = jnp.zeros(dA_ref.shape[2:], jnp.float32)

    @pl.when(c == 0)
    def _() -> None:
        dcolumns_ref[...] = jnp.zeros(dcolumns_ref.shape, jnp.float32)

    A, columns = refs.A[...], refs.columns[0]

    def again(i: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h, columns = carry
        start = pl.multiple_of(i * GROUP, GROUP)
        for row, at in _steps(refs, columns, start, n):
            before_ref[start + row] = h
            h = at.decay(A) * h + at.written()
        return h, pltpu.roll(columns, ROWS - GROUP, 1)

    def group(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        dcarried, dA, h, dcolumns, columns = carry
        columns = pltpu.roll(columns, GROUP, 1)
        start = pl.multiple_of(ROWS - GROUP - i * GROUP, GROUP)
        dys = dy_ref[0, pl.ds(start, GROUP)].astype(jnp.float32)
        for row, at in _steps(refs, columns, start, n)[::-1]:
            dy, before = dys[row : row + 1], before_ref[start + row]
            r = dy * at.C + dcarried
            dcarried = at.decay(A) * r
            dexponent = dcarried * before
            dwritten = jnp.sum(r * at.B, axis=0, keepdims=True)
            dx_rows[pl.ds(start + row, 1)] = dwritten * at.dt
            ddt_rows[pl.ds(start + row, 1)] = dwritten * at.x + jnp.sum(dexponent * A, axis=0, keepdims=True)
            dB = jnp.sum(r * (at.dt * at.x), axis=1, keepdims=True)
            dC = jnp.sum(h * dy, axis=1, keepdims=True)
            here = jax.lax.broadcasted_iota(jnp.int32, dcolumns.shape, 1) == start + row
            dcolumns = jnp.where(here, jnp.concatenate([dB, dC]), dcolumns)
            dA, h = dA + dexponent * at.dt, before
        return dcarried, dA, h, dcolumns, columns

    last, _ = jax.lax.fori_loop(0, ROWS // GROUP, again, (states_ref[0, 0], columns))
    carry = (dstate_ref[0, c], dA_ref[0, c], last, jnp.zeros(dcolumns_ref.shape[1:], jnp.float32), columns)
    dstate_ref[0, c], dA_ref[0, c], _, dcolumns, _ = jax.lax.fori_loop(0, ROWS // GROUP, group, carry)
    dcolumns_ref[0] += dcolumns
    dx_ref[0] = dx_rows[...].astype(dx_ref.dtype)
    ddt_ref[0] = ddt_rows[...].astype(ddt_ref.dtype)


def _steps(refs: Arrays, columns: jax.Array, start: Any, n: int) -> list[tuple[int, At]]:
    """The inputs of the steps of a group, which has the first columns."""
    x, dt = (ref[0, pl.ds(start, GROUP)].astype(jnp.float32) for ref in (refs.x, refs.dt))

    def step(row: int) -> At:
        by_number = [columns[first : first + n, row : row + 1] for first in range(0, columns.shape[0], n)]
        return At(x[row : row + 1], dt[row : row + 1], *by_number)

    return [(row, step(row)) for row in range(GROUP)]
