"""The Pallas form of `long_conv` for TPUs: products with blocks of a Toeplitz matrix.

A row is cut into blocks of 128 tokens, and for every channel `y_i = sum_l x_{i-l} T_l` over its blocks i, with
`T_l[s, t] = kernel_{128 l + t - s}`, zero for negative lags. The matrix of a lag is the same for all blocks and rows,
so that one product takes them all: a line is a block of one row, those of eight rows stand next to each other, and
what is `l` blocks earlier is `8 l` lines above. Matrices are made in VMEM, by rolling the line of taps.

With documents a block takes from earlier ones what belongs to the document of its own first token. Within a block
tokens are paired by the highest bit in which their places differ: pairs of one bit go from left to right halves of
parts of the block, and concern one document in each part, the one that both halves hold where they meet.

The gradient of x is the same convolution of rows from their ends, that of the kernel sums products of blocks along
the diagonals of their matrices. Lines can be rolled forward alone: there the blocks of the results stand from their
ends, so that diagonals become what a roll brings into one lane.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import cost, tiling
from pallas_kernels.cost import Cost, Passes
from pallas_kernels.long_conv.vjp import Convolution, reversible
from pallas_kernels.matrix_state.products import EXACT, PARTS, Form, multiply, parts_of
from pallas_kernels.mosaic_tpu import launch
from pallas_kernels.target import Target
from pallas_kernels.tiling import LANES, SUBLANES, LongConvTile

_BITS = LANES.bit_length() - 1
"""Bits of a place within a block; the pairs of one more are those of a token with itself."""


def refusal(here: Target, x: jax.Array, kernel: jax.Array, segments: jax.Array | None) -> str | None:
    """The reason why the call cannot be served, or `None`."""
    (_, t, d), w = x.shape, kernel.shape[0]
    if jnp.result_type(x, kernel) == jnp.float64:
        return 'arrays have type float64; expected 16 or 32 bits'
    if min(w, t) <= tiling.SHIFTS:
        return f'{min(w, t)} taps; up to {tiling.SHIFTS} are a sum of shifted rows'
    tile = tiling.long_conv_tpu(t, w, d, packed=segments is not None)
    if tile is None:
        return f't is {t}; VMEM has no room for a channel of as many tokens'
    if segments is None and not tiling.long_conv_by_products(t, w, narrow=_narrow(x)):
        return f't is {t}, with {min(w, t)} taps; Fourier transforms take less'
    return launch.generation_refusal(here)


@functools.lru_cache
def form(here: Target) -> Convolution:
    """The differentiable form for a device."""
    return reversible(functools.partial(_forward, here), functools.partial(_taps_gradient, here))


def _form(x: jax.Array) -> Form:
    """Of products of lines and taps: bfloat16, with taps in two parts, where lines have no more digits; else exact."""
    return PARTS if _narrow(x) else Form(jnp.float32, jnp.float32, EXACT)


def _parts(matrix: jax.Array, form: Form) -> list[jax.Array]:
    """The parts of a matrix of taps, of which products are summed."""
    return parts_of(matrix, 2) if form == PARTS else [matrix]


def _narrow(x: jax.Array) -> bool:
    return x.dtype == jnp.bfloat16


def _tile(x: jax.Array, kernel: jax.Array, runs: jax.Array | None) -> LongConvTile:
    tile = tiling.long_conv_tpu(x.shape[1], kernel.shape[0], x.shape[2], packed=runs is not None)
    assert tile is not None
    return tile


def _cost(x: jax.Array, kernel: jax.Array, runs: jax.Array | None) -> Passes:
    (b, t, d), w = x.shape, kernel.shape[0]
    call = cost.long_conv(b=b, t=t, d=d, w=w, packed=runs is not None, in_parts=_narrow(x), implementation='mosaic_tpu')
    return call.executed


def _cost_of_taps(x: jax.Array, kernel: jax.Array, runs: jax.Array | None) -> Cost:
    """What is left of the backward pass beside another convolution."""
    passes = _cost(x, kernel, runs)
    return Cost(passes.backward.flops - passes.forward.flops, passes.forward.bytes)


def _forward(here: Target, x: jax.Array, kernel: jax.Array, runs: jax.Array | None) -> jax.Array:
    if x.size == 0:
        return x.astype(jnp.float32)
    (b, t, d), tile, form = x.shape, _tile(x, kernel, runs), _form(x)
    marks = () if runs is None else _marks(runs, tile)
    taps = jnp.pad(kernel[:t].astype(jnp.float32), ((0, max(0, tile.lags * LANES - min(kernel.shape[0], t))), (0, 0)))
    run = launch.call(
        functools.partial(_convolve, tile, form),
        here,
        name='long_conv_forward',
        cost=_cost(x, kernel, runs).forward,
        grid=(pl.cdiv(d, tile.channels), pl.cdiv(b, SUBLANES)),
        in_specs=[_lines(tile, ahead=True), _taps(tile, tile.lags), *map(_marked, marks)],
        out_specs=_lines(tile),
        out_shape=jax.ShapeDtypeStruct((d, pl.cdiv(b, SUBLANES), tile.blocks * SUBLANES, LANES), jnp.float32),
        scratch_shapes=[
            pltpu.VMEM((tile.at_once, LANES, LANES), jnp.float32),
            pltpu.VMEM((tile.at_once, tile.pair, 2 if form == PARTS else 1, LANES, LANES), form.operands),
        ],
        compiler_params=_PARAMETERS,
    )
    y = run(_in_blocks(x, tile, ahead=True), taps[: tile.lags * LANES].T.reshape(d, tile.lags, LANES), *marks)
    return _in_rows(y, b, t)


def _taps_gradient(here: Target, x: jax.Array, kernel: jax.Array, runs: jax.Array | None, dy: jax.Array) -> jax.Array:
    (b, t, d), w = x.shape, kernel.shape[0]
    if x.size == 0:
        return jnp.zeros_like(kernel)
    tile, form = _tile(x, kernel, runs), _form(x)
    marks = () if runs is None else _marks(runs, tile)
    marks = (*marks[:-1], *(jnp.flip(taken, -1) for taken in marks[-1:]))
    run = launch.call(
        functools.partial(_correlate, tile, form),
        here,
        name='long_conv_taps_gradient',
        cost=_cost_of_taps(x, kernel, runs),
        grid=(pl.cdiv(d, tile.channels), pl.cdiv(b, SUBLANES)),
        in_specs=[_lines(tile, ahead=True), _lines(tile), *map(_marked, marks)],
        # Before the first block stand the sums of negative lags, which are left out.
        out_specs=_taps(tile, tile.lags + 1),
        out_shape=jax.ShapeDtypeStruct((d, tile.lags + 1, LANES), jnp.float32),
        scratch_shapes=[pltpu.VMEM((tile.at_once, LANES, LANES), jnp.float32)],
        compiler_params=_PARAMETERS,
    )
    dtaps = run(_in_blocks(x, tile, ahead=True), jnp.flip(_in_blocks(dy, tile), -1), *marks)
    dtaps = jnp.flip(dtaps[:, 1:], -1).reshape(d, -1)[:, : min(w, t)].T
    return jnp.pad(dtaps, ((0, w - dtaps.shape[0]), (0, 0))).astype(kernel.dtype)


_PARAMETERS = pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=tiling.VMEM)


def _lines(tile: LongConvTile, *, ahead: bool = False) -> pl.BlockSpec:
    lines = tile.blocks * SUBLANES + ahead * tile.ahead
    return pl.BlockSpec((tile.channels, None, lines, LANES), lambda channels, rows: (channels, rows, 0, 0))


def _taps(tile: LongConvTile, lags: int) -> pl.BlockSpec:
    return pl.BlockSpec((tile.channels, lags, LANES), lambda channels, rows: (channels, 0, 0))


def _marked(mark: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec((None, *mark.shape[1:]), lambda channels, rows: (rows, 0, 0))


def _in_blocks(x: jax.Array, tile: LongConvTile, *, ahead: bool = False) -> jax.Array:
    """Rows `b t d` as lines, `d (b / 8) lines 128`, in float32, with zeros before, behind, and for rows that lack."""
    b, t, d = x.shape
    rows = jnp.pad(x.astype(jnp.float32), ((0, -b % SUBLANES), (0, tile.blocks * LANES - t), (0, 0)))
    blocks = rows.reshape(-1, SUBLANES, tile.blocks, LANES, d).transpose(4, 0, 2, 1, 3)
    lines = blocks.reshape(d, -1, tile.blocks * SUBLANES, LANES)
    return jnp.pad(lines, ((0, 0), (0, 0), (ahead * tile.ahead, 0), (0, 0)))


def _in_rows(lines: jax.Array, b: int, t: int) -> jax.Array:
    d = lines.shape[0]
    blocks = lines.reshape(d, lines.shape[1], -1, SUBLANES, LANES).transpose(1, 3, 2, 4, 0)
    return blocks.reshape(-1, blocks.shape[2] * LANES, d)[:b, :t]


class _Marks(NamedTuple):
    """What documents admit, lines of int32 for every token, or references to them.

    Attributes:
      runs: its run, with lines ahead that belong to none.
      first: the run of the first token of its block.
      given: bit `l` says that it is in a left half of parts of `2^{l+1}` and of the run where the halves meet.
      taken: the same of right halves; bit 8 says that it is of its block's first run.

    The bit after those of places is one for all, in both.
    """

    runs: Any
    first: Any
    given: Any
    taken: Any


_BEGUN = 8
"""The bit of `taken` for sums over earlier blocks."""


def _marks(runs: jax.Array, tile: LongConvTile) -> _Marks:
    """By rolls of lines alone: arrays of parts of few tokens would fill few lanes of a register."""
    b, t = runs.shape
    runs = jnp.pad(runs, ((0, -b % SUBLANES), (0, tile.blocks * LANES - t)), constant_values=-1)
    lines = (
        runs.reshape(-1, SUBLANES, tile.blocks, LANES).transpose(0, 2, 1, 3).reshape(-1, tile.blocks * SUBLANES, LANES)
    )
    first, last = jnp.broadcast_to(lines[:, :, :1], lines.shape), lines
    given, taken = jnp.full_like(lines, 1 << _BITS), jnp.where(lines == first, 1 << _BITS | 1 << _BEGUN, 1 << _BITS)
    for bit in range(_BITS):
        half = 1 << bit
        left = (jnp.arange(LANES) & half == 0)[None, None]
        # The runs of the last token of every half, as each of its own tokens has them, and those of the other half.
        same = jnp.where(left, last, jnp.roll(last, half, -1)) == lines
        given |= jnp.where(same & left, half, 0)
        taken |= jnp.where(same & ~left, half, 0)
        last = jnp.where(left, jnp.roll(last, -half, -1), last)
    ahead = jnp.pad(lines, ((0, 0), (tile.ahead, 0), (0, 0)), constant_values=-1)
    return _Marks(ahead, first, given, taken)


def _convolve(tile: LongConvTile, form: Form, x_ref: Any, taps_ref: Any, *refs: Any) -> None:
    *marked, y_ref, rolled, matrices = refs
    marks = _Marks(*marked) if marked else None

    def channels(group: jax.Array, _: None) -> None:
        numbered = [(at, group * tile.at_once + at) for at in range(tile.at_once)]

        def lags(pair: jax.Array, _: None) -> None:
            first = tile.pair * pair
            for at, channel in numbered:
                before = rolled[at]
                for number in range(tile.pair):
                    matrix, before = _toeplitz(taps_ref[channel, pl.ds(first + number, 1), :], before)
                    for part, numbers in enumerate(_parts(matrix, form)):
                        matrices[at, number, part] = numbers
                rolled[at] = before

            def turn(start: jax.Array | int) -> None:
                seen = [_seen(tile, marks, start, first + number) for number in range(tile.pair)]
                for at, channel in numbered:
                    y = y_ref[channel, pl.ds(start, tile.lines), :]
                    for number in range(tile.pair):
                        lines = _only(seen[number], _earlier(tile, x_ref.at[channel], start, first + number))
                        for part in range(matrices.shape[2]):
                            y += multiply(lines, matrices[at, number, part], 'nn', form)
                    y_ref[channel, pl.ds(start, tile.lines), :] = y

            _turns(tile, first, turn)

        for at, channel in numbered:
            y_ref[channel] = jnp.zeros(y_ref.shape[1:], jnp.float32)
            rolled[at] = jnp.zeros(rolled.shape[1:], jnp.float32)
        jax.lax.fori_loop(0, tile.lags // tile.pair, lags, None)

    jax.lax.fori_loop(0, tile.channels // tile.at_once, channels, None)
    if marks is not None:

        def within(channel: jax.Array, _: None) -> None:
            _add_within(tile, form, x_ref.at[channel], taps_ref[channel, :1, :], marks, y_ref.at[channel])

        jax.lax.fori_loop(0, tile.channels, within, None)


def _add_within(tile: LongConvTile, form: Form, x_ref: Any, taps: jax.Array, marks: _Marks, y_ref: Any) -> None:
    """Keeps of a channel's sums over earlier blocks what documents admit, and adds those within blocks."""
    matrix, _ = _toeplitz(taps, jnp.zeros((LANES, LANES), jnp.float32))

    def turn(start: jax.Array | int) -> None:
        lines = pl.ds(start, tile.lines)
        x, given, taken = _earlier(tile, x_ref, start, 0), marks.given[lines, :], marks.taken[lines, :]
        y = _only(_has(taken, _BEGUN), y_ref[lines, :])
        for bit in range(_BITS + 1):
            lines_of_bit, parts = _only(_has(given, bit), x), _parts(_only(_pairs(bit, *_places()), matrix), form)
            for part in parts:
                y += _only(_has(taken, bit), multiply(lines_of_bit, part, 'nn', form))
        y_ref[lines, :] = y

    _turns(tile, 0, turn)


def _correlate(tile: LongConvTile, form: Form, x_ref: Any, dy_ref: Any, *refs: Any) -> None:
    *marked, dtaps_ref, sums = refs
    marks = _Marks(*marked) if marked else None

    @pl.when(pl.program_id(1) == 0)
    def start() -> None:
        dtaps_ref[...] = jnp.zeros_like(dtaps_ref)

    def channels(group: jax.Array, _: None) -> None:
        numbered = [(at, group * tile.at_once + at) for at in range(tile.at_once)]

        def lag(number: jax.Array, _: None) -> None:
            sums[...] = jnp.zeros_like(sums)

            def turn(start: jax.Array | int) -> None:
                seen, lines = _seen(tile, marks, start, number), pl.ds(start, tile.lines)
                begun = None if marks is None else _has(marks.taken[lines, :], _BEGUN)
                for at, channel in numbered:
                    x = _only(seen, _earlier(tile, x_ref.at[channel], start, number))
                    sums[at] += multiply(x, _only(begun, dy_ref[channel, lines, :]), 'tn', form)

            _turns(tile, number, turn)
            for at, channel in numbered:
                own, before = _diagonals(sums[at])
                dtaps_ref[channel, pl.ds(number + 1, 1), :] += own
                dtaps_ref[channel, pl.ds(number, 1), :] += before

        jax.lax.fori_loop(0, tile.lags, lag, None)

    jax.lax.fori_loop(0, tile.channels // tile.at_once, channels, None)
    if marks is not None:

        def within(channel: jax.Array, _: None) -> None:
            found = _summed_within(tile, form, x_ref.at[channel], dy_ref.at[channel], marks, sums.at[0])
            dtaps_ref[channel, 1:2, :] += found

        jax.lax.fori_loop(0, tile.channels, within, None)


def _summed_within(tile: LongConvTile, form: Form, x_ref: Any, dy_ref: Any, marks: _Marks, sums: Any) -> jax.Array:
    """The gradient of a channel's first taps by pairs within blocks."""
    sums[...] = jnp.zeros_like(sums)
    earlier, later = _places()
    later = LANES - 1 - later

    def turn(start: jax.Array | int) -> None:
        lines = pl.ds(start, tile.lines)
        x, dy = _earlier(tile, x_ref, start, 0), dy_ref[lines, :]
        given, taken = marks.given[lines, :], marks.taken[lines, :]
        for bit in range(_BITS + 1):
            found = multiply(_only(_has(given, bit), x), _only(_has(taken, bit), dy), 'tn', form)
            sums[...] += _only(_pairs(bit, earlier, later), found)

    _turns(tile, 0, turn)
    return _diagonals(sums[...])[0]


def _turns(tile: LongConvTile, lag: jax.Array | int, turn: Callable[[jax.Array | int], None]) -> None:
    """Calls `turn` with the first of every `tile.lines` lines, but for those before which no block is so early."""
    if tile.turns == 1:
        # No loop, so that the products overlap with what is around them.
        turn(0)
    else:
        skipped = jax.lax.div(jnp.int32(lag) * SUBLANES, tile.lines)

        def at(i: jax.Array, _: None) -> None:
            turn(pl.multiple_of(i * tile.lines, SUBLANES))

        jax.lax.fori_loop(skipped, tile.turns, at, None)


def _earlier(tile: LongConvTile, ref: Any, start: jax.Array | int, lag: jax.Array | int) -> jax.Array:
    """The lines that are `lag` blocks before those from `start`, of an array with zeros ahead."""
    first = jnp.int32(tile.ahead + start - SUBLANES * lag)
    return ref[pl.ds(pl.multiple_of(first, SUBLANES), tile.lines), :]


def _seen(tile: LongConvTile, marks: _Marks | None, start: jax.Array | int, lag: jax.Array) -> jax.Array | None:
    """Which tokens of earlier blocks belong to the run of a block's first token; none of the block itself."""
    if marks is None:
        return None
    return (_earlier(tile, marks.runs, start, lag) == marks.first[pl.ds(start, tile.lines), :]) & (lag > 0)


def _only(where: jax.Array | None, numbers: jax.Array) -> jax.Array:
    return numbers if where is None else jnp.where(where, numbers, 0)


def _has(bits: jax.Array, bit: int) -> jax.Array:
    return bits & (1 << bit) != 0


def _places() -> tuple[jax.Array, jax.Array]:
    """The lines and the lanes of a matrix."""
    lines, lanes = (jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    return lines, lanes


def _pairs(bit: int, earlier: jax.Array, later: jax.Array) -> jax.Array:
    """Whether a bit is the highest in which two places differ, or, after all bits, whether they are the same."""
    if bit == _BITS:
        return earlier == later
    return ((earlier ^ later) >> bit == 1) & (earlier < later)


def _toeplitz(taps: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The matrix of a lag, from its line of 128 taps and the rolled lines of the lag before; and its rolled lines.

    `T[s, t]` is tap `t - s` of the line, or `128 + t - s` of the one before.
    """
    rolled = pltpu.roll(jnp.broadcast_to(taps, (LANES, LANES)), 0, 1, stride=1, stride_axis=0)
    earlier, later = _places()
    return jnp.where(earlier <= later, rolled, before), rolled


def _diagonals(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums along diagonals of products of s and `127 - t`, `1 128` each, from the end.

    In lane `127 - i` are those of `t - s = i`, and those of `t - s = i - 128`.
    """
    rolled = pltpu.roll(matrix, 0, 1, stride=1, stride_axis=0)
    line, lane = _places()
    own = jnp.sum(jnp.where(line <= lane, rolled, 0), axis=0, keepdims=True)
    return own, jnp.sum(jnp.where(line <= lane, 0, rolled), axis=0, keepdims=True)
