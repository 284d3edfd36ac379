"""`selective_scan` on a Hopper GPU: tiles of time streamed through shared memory, the states in registers.

A program is one sequence and 64 channels, two by 32, over a span of time. It holds their states, `64 n`, spread over a
warpgroup: 32 channels over warps and lanes, sixteen numbers of a state over four lanes. What is summed over numbers or
channels a thread sums as far as it has them, leaves in shared memory for the steps of a segment, and then all are
summed at once: exchanges between lanes in every step take turns with the arithmetic, and their latency is not hidden.

Few sequences and channels do not fill the device (b 2, d 2048: 64 programs for 132 multiprocessors). Time is then cut
into spans. A first pass finds what a span makes of a state of zero and by what it multiplies its first state, which
follows from the sum of its steps; from these XLA computes the first states, with which the pass proper begins. The
backward pass does so with the gradients of the states, in reverse. In each that is another exponential a number, for as
many more programs; exponentials, 16 a cycle and multiprocessor, bound the forward pass.

The forward pass keeps the state at the start of every tile, `b t/rows d n`. The backward pass runs a tile once for the
states at the start of groups of steps, and then, group by group from the last, once more in registers, and in reverse.
The gradients of B and C are written by every program for its channels, `b d/64 t n`, that of A for its span, and then
summed, in a fixed order.

No kernel here has the barriers that Pallas puts around every store to shared memory (`FAST`), because
- tiles of inputs are only read, and those of outputs only written; `stream` begins a tile with a wait that all threads
  share, for the copies that empty its outputs, and ends it with `commit_smem`, a barrier of all threads, before copies
  empty the outputs and refill the inputs;
- states at the start of groups are written and read by the same threads, in one layout;
- what a step leaves to be summed is read by other threads after one `commit_smem`, and overwritten after another. What
  it leaves for B and C takes the place of states that the thread which writes it has read, and no other reads;
- no sum crosses warps, and so none goes through the memory that Pallas keeps for that, which has barriers of its own.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import cost, tiling, tuning
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.padding import to_shape
from pallas_kernels.mosaic_gpu.stream import ALIGNMENT, Tiles, stream
from pallas_kernels.selective_scan import kernels, vjp
from pallas_kernels.selective_scan.vjp import Operands, Outputs
from pallas_kernels.target import Target

TYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

PARTS, PART = 2, 32
CHANNELS = PARTS * PART
"""The channels of a program: two by thread, of 32 that warps and lanes divide."""

NUMBERS = 16
"""The numbers of a state that four lanes share, four each; states are padded to whole ones."""

MOST = 64
"""The maximum size of a channel's state: its numbers, their gradients and rates fill the registers of a warpgroup."""

SEGMENT = tiling.SELECTIVE_SCAN_SEGMENT

GROUP = 4
"""Unrolled steps, so that all of them are loaded before the first is computed."""

STAGES = 2
"""The tiles of an input in flight at a time: few, so that several programs fit a multiprocessor."""

FAST = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
)
"""The hardware exponential, accurate to about two units in the last place; rounding of `dt A` loses as much.

Why stores need no barriers is said above.
"""

STATE = plgpu.Layout.TILED(
    plgpu.Tiling(((1, PART, 1, 4, 4), (8, 1, 4, 4))), warp_dims=(-8,), lane_dims=(-4, -2), vector_dim=-1
)
"""States, `2 32 n/16 4 4`."""

BY_CHANNEL = STATE.reduce((2, 3, 4))
BY_NUMBER = STATE.reduce((0, 1))

SUMS_OF_NUMBERS = plgpu.Layout.TILED(plgpu.Tiling(((4, 1, PART, 4),)), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1)
"""What the lanes of a state have summed at the steps of a segment, `steps 2 32 4`; its sums lie `BY_TIME`."""

BY_TIME = SUMS_OF_NUMBERS.reduce(3)

SUMS_OF_CHANNELS = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 4, 1, 4, 4), (2, 4, 1, 4, 4))), warp_dims=(-10,), lane_dims=(-5, -4, -2), vector_dim=-1
)
"""What the threads of 32 channels have summed at the steps of a segment, `steps 32 n/16 4 4`."""

TO_BASE_2 = math.log2(math.e)


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
    """The inputs of one step, by channel `2 32`, by number `n/16 4 4`; the factor of the past."""

    by_channel: dict[str, jax.Array]
    by_number: dict[str, jax.Array]
    kept: jax.Array | None

    @property
    def dt(self) -> jax.Array:
        return self.by_channel['dt']

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the states."""
        return (PARTS, PART, *next(iter(self.by_number.values())).shape)

    def across(self, by_channel: jax.Array) -> jax.Array:
        return _across(by_channel, self.shape)

    def of(self, name: str) -> jax.Array:
        """An input for every number of the states."""
        if name in self.by_channel:
            return self.across(self.by_channel[name])
        return plgpu.layout_cast(jax.lax.broadcast_in_dim(self.by_number[name], self.shape, (2, 3, 4)), STATE)

    def decay(self, A: jax.Array) -> jax.Array:
        decay = jnp.exp2(self.of('dt') * A)
        return decay if self.kept is None else decay * self.kept

    def read(self) -> jax.Array:
        """The factor of B in what is written."""
        return self.across(self.dt * self.by_channel['x'])


class Summary(NamedTuple):
    """A span so far: the state that it makes of zero, its steps, and whether it keeps its past, one or zero, `2 32`."""

    state: jax.Array
    dt: jax.Array
    kept: jax.Array


class Call(NamedTuple):
    """A call cut into spans, which lie where sequences do: its operands, tokens that forget, and tile."""

    operands: Operands
    starts: jax.Array | None
    tile: tiling.SpanTile

    @property
    def tiles(self) -> int:
        """The tiles of a span."""
        return self.operands.x.shape[1] // self.tile.rows

    def inputs(self, *names: str) -> dict[str, jax.Array]:
        """Inputs that vary with time; the factors of the past `b tiles rows`, the last padded."""
        inputs = {name: _split(name, getattr(self.operands, name)) for name in names}
        if self.starts is not None:
            (b, t, _), rows = self.operands.x.shape, self.tile.rows
            kept = kernels.kept(self.starts, t).reshape(b, t // rows, rows)
            inputs['kept'] = jnp.pad(kept, ((0, 0), (0, 0), (0, -rows % (ALIGNMENT // kept.itemsize))))
        return inputs


def _forward(
    here: Target, operands: Operands, starts: jax.Array | None, keep: bool
) -> tuple[Outputs, jax.Array | None]:
    """Keeps the states at the beginning of the tiles, `(b tiles) blocks 2 32 n/16 4 4`."""
    (whole, length, width), n = operands.x.shape, operands.A.shape[1]
    call = _cut(here, operands, starts)
    operands, rows = call.operands, call.tile.rows
    (b, t, d), A = operands.x.shape, _in_blocks(operands.A)
    first = _in_blocks(operands.state)
    state = _at_spans(here, call, call.inputs('x', 'dt', 'B'), A, first, _step, reverse=False)

    def body(
        refs: Any, A_ref: Any, state_ref: Any, result_refs: Any, kept_refs: Any, final_ref: Any, sums: Any
    ) -> None:
        i, c = _program()
        A = _load_state(A_ref.at[c]) * TO_BASE_2

        def of_tile(step: Any, tiles: Any, results: Any, h: jax.Array) -> jax.Array:
            for kept_ref in kept_refs:
                kept_ref[i * call.tiles + step, c] = h

            def of_group(j: Any, h: jax.Array) -> jax.Array:
                for row, at in _steps(tiles, j * GROUP, range(GROUP)):
                    h = _step(at, A, h)
                    sums[row] = _over_numbers(h * at.of('C'))
                return h

            h = jax.lax.fori_loop(0, rows // GROUP, of_group, h)
            plgpu.commit_smem()
            _write(results['y'].at[0], _sum_of_numbers(sums))
            return h

        tiles = functools.partial(_tiles, rows=rows, i=i, c=c, place=lambda k: k)
        h = _load_state(state_ref.at[i, c])
        final_ref[i, c] = stream(of_tile, call.tiles, tiles(refs), tiles(result_refs), h, stages=STAGES)

    results = {'y': jax.ShapeDtypeStruct((b, t, d // PART, PART), operands.x.dtype)}
    states = [jax.ShapeDtypeStruct((b * call.tiles, *A.shape), jnp.float32)] if keep else []
    results, states, final = launch.kernel(
        body,
        here,
        out_type=(results, states, jax.ShapeDtypeStruct(state.shape, jnp.float32)),
        scratch_types=[plgpu.SMEM((rows, PARTS, PART, 4), jnp.float32)],
        name='selective_scan_forward',
        cost=_cost(call, 'forward'),
        grid=(b, d // CHANNELS),
        grid_names=('b', 'd'),
        compiler_params=FAST,
    )(call.inputs('x', 'dt', 'B', 'C'), A, state)
    y = results['y'].reshape(whole, -1, d)[:, :length, :width]
    final = final.reshape(whole, call.tile.spans, d, -1)[:, -1, :width, :n]
    return (y, final), (states[0] if keep else None)


def _backward(
    here: Target, operands: Operands, starts: jax.Array | None, states: jax.Array, gradients: Outputs
) -> Operands:
    """The states before groups of steps are computed again, then those of a group, which is run in reverse.

    With `r_t = dy_t C_t + decay_{t+1} r_{t+1}` the gradient of `h_t`, that of the write is `r_t` and that of the decay
    `r_t h_{t-1}`.
    """
    given, (dy, dfinal) = operands, gradients
    call = _cut(here, operands, starts)
    operands, rows = call.operands, call.tile.rows
    (b, t, d), n, A = operands.x.shape, operands.A.shape[1], _in_blocks(operands.A)
    dy = to_shape(dy.astype(operands.x.dtype), (given.x.shape[0], call.tile.spans * t, d))
    dy = _split('dy', _in_spans(dy, call.tile.spans))
    dfinal = _in_blocks(to_shape(dfinal, operands.state.shape))
    inputs = call.inputs('x', 'dt', 'B', 'C') | {'dy': dy}
    of_gradients = {name: array for name, array in inputs.items() if name not in ('x', 'B')}
    dfinal = _at_spans(here, call, of_gradients, A, dfinal, _step_of_gradient, reverse=True)
    group = tiling.selective_scan_gpu_group(n)
    segments, groups = rows // SEGMENT, SEGMENT // group

    def body(
        refs: Any, A_ref: Any, states_ref: Any, dfinal_ref: Any, result_refs: Any, dA_ref: Any, dstate_ref: Any,
        left: Any, sums: Any, *edges: Any,
    ) -> None:  # fmt: skip
        i, c = _program()
        A = _load_state(A_ref.at[c]) * TO_BASE_2
        of_segment = functools.partial(_of_segment, A, group, left, sums)

        def kept(step: Any) -> jax.Array:
            return _load_state(states_ref.at[i * call.tiles + jnp.maximum(call.tiles - 1 - step, 0), c])

        def of_tile(
            step: Any, tiles: Any, results: Any, carry: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            dcarried, dA, h = carry
            # Read a tile ahead: nothing else hides what a load from global memory takes.
            following = kept(step + 1)
            earlier, last = (segments - 1) * groups, (segments - 1) * SEGMENT

            def in_last(j: Any) -> Any:
                return left.at[:, j * group]

            def in_earlier(j: Any) -> Any:
                return edges[0].at[j]

            def back(j: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                # Before what the last segment left is overwritten; after the last of a tile `stream` does it.
                plgpu.commit_smem()
                s = segments - 2 - j
                return of_segment(tiles, results, lambda g: in_earlier(s * groups + g), s * SEGMENT, carry)

            if segments > 1:
                h = jax.lax.fori_loop(0, earlier, _ahead(tiles, A, group, in_earlier, 0), h)
            h = jax.lax.fori_loop(0, groups - 1, _ahead(tiles, A, group, in_last, last), h)
            in_last(groups - 1)[...] = h
            dcarried, dA = of_segment(tiles, results, in_last, last, (dcarried, dA))
            if segments > 1:
                dcarried, dA = jax.lax.fori_loop(0, segments - 1, back, (dcarried, dA))
            return dcarried, dA, following

        tiles = functools.partial(_tiles, rows=rows, i=i, c=c, place=lambda k: call.tiles - 1 - k)
        carry = (_load_state(dfinal_ref.at[i, c]), _all(0, A.shape, STATE), kept(0))
        dcarried, dA, _ = stream(of_tile, call.tiles, tiles(refs), tiles(result_refs), carry, stages=STAGES)
        dA_ref[i, c] = dA
        dstate_ref[i, c] = dcarried

    partial = jax.ShapeDtypeStruct((b * (d // CHANNELS), t, *A.shape[3:]), jnp.float32)
    blocks = jax.ShapeDtypeStruct((b, *A.shape), jnp.float32)
    results = {
        'dx': jax.ShapeDtypeStruct(inputs['x'].shape, operands.x.dtype),
        'ddt': jax.ShapeDtypeStruct(inputs['x'].shape, operands.dt.dtype),
        'dB': partial,
        'dC': partial,
    }
    scratch = [(PARTS, SEGMENT, *A.shape[2:]), (2, SEGMENT, PARTS, PART, 4)]
    if segments > 1:
        scratch.append(((segments - 1) * groups, *A.shape[1:]))
    results, dA, dstate = launch.kernel(
        body,
        here,
        out_type=(results, blocks, blocks),
        scratch_types=[plgpu.SMEM(shape, jnp.float32) for shape in scratch],
        name='selective_scan_backward',
        cost=_cost(call, 'backward'),
        grid=(b, d // CHANNELS),
        grid_names=('b', 'd'),
        compiler_params=FAST,
    )(inputs, A, states, dfinal)
    dB, dC = (jnp.sum(results[name].reshape(b, -1, t, n), axis=1) for name in ('dB', 'dC'))
    sizes = given.x.shape[0], call.tile.spans * t
    dx, ddt, dB, dC = (array.reshape(*sizes, -1) for array in (results['dx'], results['ddt'], dB, dC))
    dstate = dstate[:: call.tile.spans].reshape(-1, d, n)
    return kernels.cut(Operands(dx, ddt, jnp.sum(dA, axis=0).reshape(d, n), dB, dC, dstate), given)


def _ahead(
    tiles: dict[str, Any], A: jax.Array, group: int, edge: Callable[[Any], Any], start: Any
) -> Callable[[Any, jax.Array], jax.Array]:
    """The body of a loop over groups of steps from `start` on, which leaves the state before group `j` in `edge(j)`."""

    def of_group(j: Any, h: jax.Array) -> jax.Array:
        edge(j)[...] = h
        for _, at in _steps(tiles, start + j * group, range(group)):
            h = _step(at, A, h)
        return h

    return of_group


def _of_segment(
    A: jax.Array,
    group: int,
    left: Any,
    sums: Any,
    tiles: dict[str, Any],
    results: dict[str, Any],
    edge: Callable[[Any], Any],
    start: Any,
    carry: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Writes the gradients of the steps of a segment and returns those of the state before it and, so far, of A.

    Groups are run again from their states in `edge`, the last first. Sums over the numbers of a state go through
    `sums`, those over channels through `left`, both in shared memory.
    """
    groups = SEGMENT // group

    def of_group(j: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dcarried, dA = carry
        first = SEGMENT - (j + 1) * group
        steps = [at for _, at in _steps(tiles, start + first, range(group))]
        h, decays = [_load_state(edge(groups - 1 - j))], [at.decay(A) for at in steps]
        for at, decay in zip(steps, decays, strict=True):
            h.append(decay * h[-1] + at.read() * at.of('B'))
        for k in range(group)[::-1]:
            at, row, dy = steps[k], first + k, steps[k].of('dy')
            r = dy * at.of('C') + dcarried
            dcarried = decays[k] * r
            dexponent = dcarried * h[k]
            sums[0, row] = _over_numbers(r * at.of('B'))
            sums[1, row] = _over_numbers(dexponent * A)
            left[0, row] = jnp.sum(r * at.read(), axis=0)
            left[1, row] = jnp.sum(h[k + 1] * dy, axis=0)
            dA = dA + dexponent * at.of('dt')
        return dcarried, dA

    carry = jax.lax.fori_loop(0, groups, of_group, carry)
    plgpu.commit_smem()
    segment = pl.ds(start, SEGMENT)
    dwritten, dexponents = (_sum_of_numbers(sums.at[part]) for part in range(2))
    x, dt = (_load(tiles[name].at[0, segment], BY_TIME) for name in ('x', 'dt'))
    _write(results['dx'].at[0, segment], dwritten * dt)
    _write(results['ddt'].at[0, segment], dwritten * x + dexponents * (1 / TO_BASE_2))
    for part, name in enumerate(('dB', 'dC')):
        _write(results[name].at[0, segment], jnp.sum(_load(left.at[part], SUMS_OF_CHANNELS), axis=1))
    return carry


def _step(at: At, A: jax.Array, h: jax.Array) -> jax.Array:
    return at.decay(A) * h + at.read() * at.of('B')


def _step_of_gradient(at: At, A: jax.Array, dcarried: jax.Array) -> jax.Array:
    return at.decay(A) * (at.of('dy') * at.of('C') + dcarried)


def _at_spans(
    here: Target,
    call: Call,
    inputs: dict[str, jax.Array],
    A: jax.Array,
    first: jax.Array,
    step: Callable[[At, jax.Array, jax.Array], jax.Array],
    *,
    reverse: bool,
) -> jax.Array:
    """What every span begins with, `(b spans) blocks ...`, of what the first one to run does, `b blocks ...`.

    Spans are run from zero, all but the last to run, which no other follows.
    """
    spans, rows = call.tile.spans, call.tile.rows
    if spans == 1:
        return first
    b = first.shape[0]

    def body(refs: Any, A_ref: Any, state_ref: Any, decay_ref: Any) -> None:
        s = jax.lax.axis_index('s')
        i, c = jax.lax.axis_index('b') * spans + s + reverse, jax.lax.axis_index('d')
        A = _load_state(A_ref.at[c]) * TO_BASE_2

        def of_tile(_: Any, tiles: Any, results: Any, summary: Summary) -> Summary:
            del results

            def of_group(j: Any, summary: Summary) -> Summary:
                start = (rows // GROUP - 1 - j if reverse else j) * GROUP
                for _, at in _steps(tiles, start, range(GROUP)[::-1] if reverse else range(GROUP)):
                    kept = summary.kept if at.kept is None else summary.kept * at.kept
                    summary = Summary(step(at, A, summary.state), summary.dt + at.dt, kept)
                return summary

            return jax.lax.fori_loop(0, rows // GROUP, of_group, summary)

        nothing = Summary(_all(0, A.shape, STATE), _all(0, A.shape[:2], BY_CHANNEL), _all(1, A.shape[:2], BY_CHANNEL))
        place = (lambda k: call.tiles - 1 - k) if reverse else (lambda k: k)
        found = stream(of_tile, call.tiles, _tiles(refs, rows, i, c, place), {}, nothing, stages=STAGES)
        state_ref[jax.lax.axis_index('b'), s, c] = found.state
        decay_ref[jax.lax.axis_index('b'), s, c] = jnp.exp2(_across(found.dt, A.shape) * A) * _across(
            found.kept, A.shape
        )

    summary = jax.ShapeDtypeStruct((b, spans - 1, *A.shape), jnp.float32)
    states, decays = launch.kernel(
        body,
        here,
        out_type=(summary, summary),
        name='selective_scan_summary_of_' + ('gradients' if reverse else 'states'),
        cost=_cost(call, 'forward'),
        grid=(b, spans - 1, A.shape[0]),
        grid_names=('b', 's', 'd'),
        compiler_params=FAST,
    )(inputs, A)
    found = [first]
    for s in range(spans - 1)[:: -1 if reverse else 1]:
        found.append(decays[:, s] * found[-1] + states[:, s])
    return jnp.stack(found[:: -1 if reverse else 1], axis=1).reshape(b * spans, *A.shape)


def _cut(here: Target, operands: Operands, starts: jax.Array | None) -> Call:
    """The operands padded to whole tiles of as many spans as there are, with these as sequences."""
    tile = tuning.tile(here, tiling.selective_scan_gpu, *_sizes(operands))
    operands = kernels.filled(operands, {'t': tile.rows * tile.spans, 'd': CHANNELS, 'n': NUMBERS}, TYPES)
    b, t, _ = operands.x.shape
    cut = {name: _in_spans(getattr(operands, name), tile.spans) for name in ('x', 'dt', 'B', 'C')}
    if starts is not None:
        starts = to_shape(starts, (b, t)).reshape(b * tile.spans, -1)
    return Call(operands._replace(**cut), starts, tile)


def _in_spans(array: jax.Array, spans: int) -> jax.Array:
    """`b t d` as `(b spans) (t / spans) d`."""
    b, t, d = array.shape
    return array.reshape(b * spans, t // spans, d)


def _split(name: str, array: jax.Array) -> jax.Array:
    """An array of `inputs` as it is copied: `b t d` as `b t d/32 32`, `b t n` as `b t n/16 4 4`."""
    *outer, size = array.shape
    return array.reshape(*outer, *((size // NUMBERS, 4, 4) if name in ('B', 'C') else (size // PART, PART)))


def _in_blocks(array: jax.Array) -> jax.Array:
    """`... d n` as `... blocks 2 32 n/16 4 4`."""
    *outer, d, n = array.shape
    return array.reshape(*outer, d // CHANNELS, PARTS, PART, n // NUMBERS, 4, 4)


def _sizes(operands: Operands) -> tuple[int, int, int, int, int, int]:
    """The arguments of the rule: sizes of a call, as they are padded."""
    b, t, d = operands.x.shape
    t, n = (-(-size // whole) * whole for size, whole in ((t, SEGMENT), (operands.A.shape[1], NUMBERS)))
    x_bytes, dt_bytes = (array.dtype.itemsize if array.dtype in TYPES else 4 for array in (operands.x, operands.dt))
    return b, t, pl.cdiv(d, CHANNELS), n, x_bytes, dt_bytes


def _cost(call: Call, what: str) -> cost.Cost:
    (b, t, d), n = call.operands.x.shape, call.operands.A.shape[1]
    return getattr(cost.selective_scan(b=b, t=t, d=d, n=n, implementation='mosaic_gpu').executed, what)


def _program() -> tuple[Any, Any]:
    """The sequence of a program, and its block of channels."""
    return jax.lax.axis_index('b'), jax.lax.axis_index('d')


def _tiles(refs: dict[str, Any], rows: int, i: Any, c: Any, place: Callable[[Any], Any]) -> dict[str, Tiles]:
    """The tiles of a program in arrays by name."""

    def tiles(name: str, ref: Any) -> Tiles:
        match name:
            case 'kept':
                return Tiles(ref, (1, 1, ref.shape[-1]), lambda k: (i, place(k), 0))
            case 'B' | 'C':
                return Tiles(ref, (1, rows, *ref.shape[2:]), lambda k: (i, place(k), 0, 0, 0))
            case 'dB' | 'dC':
                row = i * jax.lax.axis_size('d') + c
                return Tiles(ref, (1, rows, *ref.shape[2:]), lambda k: (row, place(k), 0, 0, 0))
        return Tiles(ref, (1, rows, PARTS, PART), lambda k: (i, place(k), c, 0))

    return {name: tiles(name, ref) for name, ref in refs.items()}


def _steps(tiles: dict[str, Any], start: Any, order: range) -> list[tuple[Any, At]]:
    """Rows of a tile in order, and the inputs of their steps."""

    def rows(row: Any, layout: Any, *names: str) -> dict[str, jax.Array]:
        return {name: _load(tiles[name].at[0, row], layout) for name in names if name in tiles}

    def read(row: Any) -> At:
        by_channel, by_number = rows(row, BY_CHANNEL, 'x', 'dt', 'dy'), rows(row, BY_NUMBER, 'B', 'C')
        return At(by_channel, by_number, tiles['kept'][0, 0, row] if 'kept' in tiles else None)

    return [(start + row, read(start + row)) for row in order]


def _across(by_channel: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(by_channel, shape, (0, 1)), STATE)


def _all(number: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, number, jnp.float32), layout)


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _load_state(ref: Any) -> jax.Array:
    return _load(ref, STATE)


def _over_numbers(states: jax.Array) -> jax.Array:
    """Sums of the numbers of every thread, `2 32 4`."""
    return jnp.sum(jnp.sum(states, axis=4), axis=2)


def _sum_of_numbers(sums: Any) -> jax.Array:
    return jnp.sum(_load(sums, SUMS_OF_NUMBERS), axis=3)


def _write(ref: Any, numbers: jax.Array) -> None:
    ref[...] = numbers.astype(ref.dtype)
