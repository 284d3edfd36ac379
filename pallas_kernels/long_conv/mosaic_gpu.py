"""The Pallas form of `long_conv` for Hopper: products with blocks of a Toeplitz matrix.

A row is cut into blocks of 64 tokens, and for every channel `y_i = sum_l x_{i-l} T_l` over its blocks i, with
`T_l[s, t] = kernel_{64 l + t - s}`. A line is a block of one row; those of all `b` rows stand next to each other, so
that what is `l` blocks earlier is `b l` lines above, and one product takes 64 lines of any blocks. The taps lie in
memory sixteen times, each time a token later: four copies of 16 x 64 of them are a block of the matrix. Beside x in
bfloat16 taps are two bfloat16 numbers.

Runs are contiguous: with documents a block takes from an earlier one only what belongs to the last run of that one, and
only where it is its own first. Everything else of x is zero beforehand, and a line stops at a lag of its own. Within a
block tokens are paired by the highest bit in which their places differ: pairs of one bit go from left to right halves
of parts of the block, and concern one document in each part, the one that both halves hold where they meet.

The gradient of x is the same convolution of rows from their ends. That of the kernel sums products of lines, and these
along diagonals: with zeros on both sides, every row is read from where its diagonals begin.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import cost, tiling
from pallas_kernels.cost import Cost, Passes
from pallas_kernels.long_conv.vjp import Convolution, reversible
from pallas_kernels.matrix_state.mosaic_gpu.tiles import NAMED_LAYOUTS, TILE, iota, shared_tile, swizzled, zeros
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate, multiply
from pallas_kernels.target import Target
from pallas_kernels.tiling import HopperConvLines

TILES = tiling.CONV_LINES // TILE
"""The tiles of lines of a program, which share the blocks of the matrix."""

PARTS = tiling.CONV_PARTS

COPIED = 16
"""The rows of a block of the matrix that are copied at once; each begins a tap later than the one before."""

NARROW = (plgpu.TilingTransform((8, COPIED)), plgpu.SwizzleTransform(2 * COPIED))  # type: ignore[abstract]
"""The layout of the matrix in shared memory: copies into it begin at any multiple of 16 taps."""

WIDE = TILE + 8
"""The columns of lines in memory, of which the last are not read, so that rows begin in different banks."""

SLOTS = 2
"""The steps whose operands are in shared memory at a time."""

BITS = TILE.bit_length() - 1
"""Bits of a place within a block; the pairs of one more are those of a token with itself."""

TAKEN, BEGUN = 8, 16
"""Where the bits of tokens as later ones begin, and that of sums over earlier blocks, see `_Marks`."""

STRIDED = plgpu.Layout.WG_STRIDED((2 * TILE,), 1)


def refusal(here: Target, x: jax.Array, kernel: jax.Array, segments: jax.Array | None) -> str | None:
    """The reason why the call cannot be served, or `None`."""
    (b, t, d), w = x.shape, kernel.shape[0]
    if 0 in x.shape:
        return f'x has shape {x.shape}; expected an array with entries'
    if x.dtype != jnp.bfloat16:
        return f'x has type {x.dtype}; expected bfloat16'
    if min(w, t) <= tiling.SHIFTS:
        return f'{min(w, t)} taps; up to {tiling.SHIFTS} are a sum of shifted rows'
    if not tiling.long_conv_hopper_by_products(t, w, packed=segments is not None):
        return f't is {t}, with {min(w, t)} taps; Fourier transforms take less'
    lines = tiling.long_conv_hopper(b, t, w)
    return launch.capability_refusal(here) or launch.grid_refusal(channel=d, part=max(lines.programs, lines.lags))


@functools.lru_cache
def form(here: Target) -> Convolution:
    """The differentiable form for a device."""
    return reversible(functools.partial(_forward, here), functools.partial(_taps_gradient, here))


class _Marks(NamedTuple):
    """What documents admit.

    Attributes:
      limits: the last lag of every line, `lines`; 0 where it is of no block before it.
      last: of the lines of a program, `programs`.
      tails: whether a token is of the last run of its block, `b t`.
      begun: whether it is of the first, `b t`.
      bits: `lines 64`; `l` says that a token is in a left half of parts of `2^{l+1}` and of the run where the halves
        meet, `TAKEN + l` the same of right halves, `BEGUN` that it is of its block's first run. The bit after those of
        places is one for all, on both sides.
    """

    limits: jax.Array
    last: jax.Array
    tails: jax.Array
    begun: jax.Array
    bits: jax.Array


def _marks(runs: jax.Array, cut: HopperConvLines) -> _Marks:
    b, t = runs.shape
    runs = jnp.pad(runs, ((0, 0), (0, cut.blocks * TILE - t)), constant_values=-1).reshape(b, -1, TILE)
    first, last = runs[:, :, :1], runs[:, :, -1:]
    # As many blocks as end in the run with which another, behind them, begins: those just before it.
    behind = jnp.arange(cut.blocks)[:, None] < jnp.arange(cut.blocks)[None]
    same = (last == jnp.swapaxes(first, 1, 2)) & behind[None]
    limits = jnp.minimum(jnp.sum(same, axis=1, dtype=jnp.int32), cut.lags - 1)
    bits = jnp.where(runs == first, 1 << BEGUN, 0) | (1 << BITS | 1 << TAKEN + BITS)
    for bit in range(BITS):
        halves = runs.reshape(*runs.shape[:2], -1, 2, 1 << bit)
        met = (halves == halves[..., :1, -1:]).astype(jnp.int32)
        sides = jnp.array([1 << bit, 1 << TAKEN + bit], jnp.int32)[None, None, None, :, None]
        bits |= (met * sides).reshape(runs.shape)

    def lines(marks: jax.Array) -> jax.Array:
        turned = jnp.swapaxes(marks, 0, 1).reshape(-1, *marks.shape[2:])
        return jnp.pad(turned, [(0, cut.lines - turned.shape[0]), *((0, 0) for _ in marks.shape[2:])])

    def rows(marks: jax.Array) -> jax.Array:
        return marks.reshape(b, -1)[:, :t]

    of_lines = lines(limits)
    of_programs = jnp.max(of_lines.reshape(cut.programs, -1), axis=1)
    return _Marks(of_lines, of_programs, rows(runs == last), rows(runs == first), lines(bits))


def _ahead(cut: HopperConvLines) -> int:
    """Blocks of zeros before those of a row: products take lines of some that are too early."""
    return -(-tiling.CONV_LINES // cut.b)


def _blocks(x: jax.Array, cut: HopperConvLines, *, right: int = 0) -> jax.Array:
    """Rows `b t d` as blocks, `b n 64 d`, with zeros ahead, behind for whole programs and copies, and to the right."""
    b, t, d = x.shape
    blocks = jnp.pad(x, ((0, 0), (0, cut.blocks * TILE - t), (0, 0))).reshape(b, cut.blocks, TILE, d)
    ahead, whole = _ahead(cut), -(-(cut.lines + WIDE - TILE) // b)
    # The bytes from a row of lines to the next one are a multiple of 16.
    behind = whole + -(ahead + whole) % (8 // math.gcd(8, b)) - cut.blocks
    return jnp.pad(blocks, ((0, 0), (ahead, behind), (0, right), (0, 0)))


def _lines(x: jax.Array, cut: HopperConvLines, width: int = TILE) -> jax.Array:
    """Rows as lines, `d (n b) width`."""
    blocks = _blocks(x, cut, right=width - TILE)
    return blocks.transpose(3, 1, 0, 2).reshape(x.shape[2], -1, width)


def _places(x: jax.Array, cut: HopperConvLines) -> jax.Array:
    """Rows as places in lines, `d 64 (n b)`."""
    return _blocks(x, cut).transpose(3, 2, 1, 0).reshape(x.shape[2], TILE, -1)


def _rows(lines: jax.Array, cut: HopperConvLines, t: int) -> jax.Array:
    """Lines as rows, `b t d`."""
    d = lines.shape[0]
    blocks = lines[:, : cut.b * cut.blocks].reshape(d, cut.blocks, cut.b, TILE)
    return blocks.transpose(2, 1, 3, 0).reshape(cut.b, -1, d)[:, :t]


def _parts(taps: jax.Array) -> jax.Array:
    """Numbers in two parts of bfloat16, `2 ...`."""
    high = jax.lax.reduce_precision(taps, 8, 7)
    return jnp.stack([high, taps - high]).astype(jnp.bfloat16)


def _later(kernel: jax.Array, cut: HopperConvLines) -> jax.Array:
    """The taps in two parts, `2 d 16 n`, in the last axis from -48 on, each time a token later."""
    ahead, width = TILE - COPIED, (cut.lags + 1) * TILE
    taps = kernel.astype(jnp.float32).T[:, : width - ahead]
    padded = jnp.pad(_parts(taps), ((0, 0), (0, 0), (ahead + COPIED, width - ahead - taps.shape[1])))
    return jnp.stack([padded[:, :, COPIED - row : COPIED - row + width] for row in range(COPIED)], axis=2)


def _pairs(kernel: jax.Array) -> jax.Array:
    """The first block of the matrix by the highest bit in which places differ, in two parts, `2 d 7 64 64`."""
    earlier, later = jnp.arange(TILE)[:, None], jnp.arange(TILE)[None]
    taps = jnp.pad(kernel[:TILE].astype(jnp.float32).T, ((0, 0), (0, max(0, TILE - kernel.shape[0]))))
    matrix = taps[:, jnp.maximum(later - earlier, 0)]
    bits = jnp.arange(BITS + 1)[:, None, None] == _highest_bits(earlier, later)[None]
    return _parts(jnp.where(bits[None], matrix[:, None], 0))


def _highest_bits(earlier: jax.Array, later: jax.Array) -> jax.Array:
    """The highest bit in which two places differ, `BITS` where they are one; -1 where the earlier is not before."""
    differ = [((earlier ^ later) >> bit > 0).astype(jnp.int32) for bit in range(BITS)]
    bits = functools.reduce(jnp.add, differ) - 1
    return jnp.where(earlier == later, BITS, jnp.where(earlier < later, bits, -1))


def _forward(here: Target, x: jax.Array, kernel: jax.Array, runs: jax.Array | None) -> jax.Array:
    b, t, d = x.shape
    cut = tiling.long_conv_hopper(b, t, kernel.shape[0])
    own, later, ahead = _lines(x, cut, WIDE), _later(kernel, cut), b * _ahead(cut)
    operands: tuple[jax.Array, ...] = (own, later)
    if runs is not None:
        marks = _marks(runs, cut)
        tails = _lines(_only(marks.tails[:, :, None], x), cut, WIDE)
        operands = (tails, later, own, _pairs(kernel), marks.limits, marks.last, marks.bits)

    def body(lines_ref: Any, later_ref: Any, *rest: Any) -> None:
        *of_runs, y_ref = rest
        channel, program = jax.lax.axis_index('channel'), jax.lax.axis_index('program')
        first = program * tiling.CONV_LINES

        def run(lines: Any, matrix: Any, out: Any, arrived: Any, own_arrived: Any, pairs_arrived: Any) -> None:
            def tile_of(slot: Any, tile: int) -> Any:
                return lines.at[slot, pl.ds(tile * TILE, TILE), pl.ds(0, TILE)]

            def fetch(lag: Any) -> None:
                slot = lag % SLOTS
                earlier = lines_ref.at[channel, pl.ds(ahead + first - b * lag, tiling.CONV_LINES)]
                plgpu.copy_gmem_to_smem(earlier, lines.at[slot], arrived.at[slot])
                for part, row in itertools.product(range(PARTS), range(0, TILE, COPIED)):
                    taps = later_ref.at[part, channel, :, pl.ds((lag + 1) * TILE - COPIED - row, TILE)]
                    plgpu.copy_gmem_to_smem(taps, matrix.at[slot, part, pl.ds(row, COPIED)], arrived.at[slot])

            def onto(sums: tuple[jax.Array | None, ...], given: list[jax.Array], slot: Any) -> tuple[jax.Array, ...]:
                factors = [[(each, matrix.at[slot, part]) for part in range(PARTS)] for each in given]
                return accumulate(here, *zip(sums, factors, strict=True))

            def turn(lag: Any, sums: tuple[jax.Array, ...], last: Any) -> tuple[jax.Array, ...]:
                slot = lag % SLOTS
                # All threads have read what is copied over now.
                plgpu.commit_smem()
                pl.when(lag < last)(lambda: fetch(lag + 1))
                plgpu.barrier_wait(arrived.at[slot])
                return onto(sums, [_numbers(tile_of(slot, tile)) for tile in range(TILES)], slot)

            def in_one_document() -> tuple[jax.Array, ...]:
                last = jnp.minimum(jax.lax.div(first + tiling.CONV_LINES - 1, b), cut.lags - 1)
                fetch(0)
                return jax.lax.fori_loop(0, last + 1, lambda lag, sums: turn(lag, sums, last), nothing)

            def of_earlier_blocks(limits_ref: Any, last: Any) -> tuple[jax.Array, ...]:
                limits = [_spread(limits_ref.at[pl.ds(first + tile * TILE, TILE)], 0) for tile in range(TILES)]

                def turn_to_limits(lag: Any, carry: Any) -> Any:
                    sums, kept = carry
                    sums = turn(lag, sums, last)
                    pairs = zip(limits, sums, kept, strict=True)
                    return sums, tuple(jnp.where(limit >= lag, new, old) for limit, new, old in pairs)

                pl.when(last > 0)(lambda: fetch(1))
                return jax.lax.fori_loop(1, last + 1, turn_to_limits, (nothing, nothing))[1]

            def within_block(pairs_ref: Any, marks: jax.Array, given: jax.Array, before: jax.Array) -> jax.Array:
                def fetch_pairs(bit: Any) -> None:
                    slot = bit % SLOTS
                    for part in range(PARTS):
                        source = pairs_ref.at[part, channel, bit]
                        plgpu.copy_gmem_to_smem(source, matrix.at[slot, part], pairs_arrived.at[slot])

                def of_bit(bit: Any, y: jax.Array) -> jax.Array:
                    plgpu.commit_smem()
                    pl.when(bit < BITS)(lambda: fetch_pairs(bit + 1))
                    plgpu.barrier_wait(pairs_arrived.at[bit % SLOTS])
                    (found,) = onto((None,), [_only(_has(marks, bit), given).astype(x.dtype)], bit % SLOTS)
                    return y + _only(_has(marks, TAKEN + bit), found)

                plgpu.commit_smem()
                fetch_pairs(0)
                return jax.lax.fori_loop(0, BITS + 1, of_bit, _only(_has(marks, BEGUN), before))

            def in_documents() -> list[jax.Array]:
                own_ref, pairs_ref, limits_ref, last_ref, bits_ref = of_runs
                before = of_earlier_blocks(limits_ref, last_ref[program])
                plgpu.commit_smem()
                plgpu.copy_gmem_to_smem(
                    own_ref.at[channel, pl.ds(ahead + first, tiling.CONV_LINES)], lines.at[0], own_arrived
                )
                plgpu.barrier_wait(own_arrived)
                y = []
                for tile in range(TILES):
                    marks = _numbers(bits_ref.at[pl.ds(first + tile * TILE, TILE)])
                    given = _numbers(tile_of(0, tile)).astype(jnp.float32)
                    y.append(within_block(pairs_ref, marks, given, before[tile]))
                return y

            nothing = tuple(zeros() for _ in range(TILES))
            y = in_documents() if of_runs else in_one_document()
            for tile in range(TILES):
                out[tile] = y[tile]
            plgpu.commit_smem()
            for tile in range(TILES):
                plgpu.copy_smem_to_gmem(out.at[tile], y_ref.at[channel, pl.ds(first + tile * TILE, TILE)])
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(
            run,
            plgpu.SMEM((SLOTS, tiling.CONV_LINES, WIDE), x.dtype),
            plgpu.SMEM((SLOTS, PARTS, TILE, TILE), x.dtype, transforms=NARROW),
            plgpu.SMEM((TILES, TILE, TILE), jnp.float32, transforms=swizzled(jnp.float32)),
            plgpu.Barrier(num_arrivals=1 + PARTS * TILE // COPIED, num_barriers=SLOTS),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=PARTS, num_barriers=SLOTS),
        )

    y = launch.kernel(
        body,
        here,
        out_type=jax.ShapeDtypeStruct((d, cut.lines, TILE), jnp.float32),
        name='long_conv_forward',
        cost=_cost(x, kernel, runs).forward,
        grid=(d, cut.programs),
        grid_names=('channel', 'program'),
        compiler_params=NAMED_LAYOUTS,
    )(*operands)
    return _rows(y, cut, t)


def _taps_gradient(here: Target, x: jax.Array, kernel: jax.Array, runs: jax.Array | None, dy: jax.Array) -> jax.Array:
    (b, t, d), w = x.shape, kernel.shape[0]
    cut = tiling.long_conv_hopper(b, t, w)
    places, later, ahead = _places(x, cut), _lines(dy, cut), b * _ahead(cut)
    operands: tuple[jax.Array, ...] = (places, later)
    if runs is not None:
        marks = _marks(runs, cut)
        far = (_places(_only(marks.tails[:, :, None], x), cut), _lines(_only(marks.begun[:, :, None], dy), cut))
        furthest = jnp.max(marks.last, keepdims=True)
        operands = (*far, places, later, marks.limits, marks.bits, marks.bits.T, furthest)
    tiles = cut.lines // TILE

    def body(*refs: Any) -> None:
        *far, sums_ref = refs
        far, of_runs = far[:2], far[2:]
        channel, lag = jax.lax.axis_index('channel'), jax.lax.axis_index('lag')

        def run(places: Any, later: Any, taken: Any, arrived: Any) -> jax.Array:
            def over_lines(arrays: Any, lag: Any, begin: Any, end: Any, turn: Turn, sums: jax.Array) -> jax.Array:
                """Sums over tiles of lines of the second array, and those of the first so many blocks earlier."""

                def fetch(step: Any) -> None:
                    slot, earlier = step % SLOTS, pl.ds(ahead + step * TILE - b * lag, WIDE)
                    plgpu.copy_gmem_to_smem(arrays[0].at[channel, :, earlier], places.at[slot], arrived.at[slot])
                    lines = arrays[1].at[channel, pl.ds(ahead + step * TILE, TILE)]
                    plgpu.copy_gmem_to_smem(lines, later.at[slot], arrived.at[slot])

                def of_step(step: Any, sums: jax.Array) -> jax.Array:
                    slot = step % SLOTS
                    plgpu.commit_smem()
                    pl.when(step + 1 < end)(lambda: fetch(step + 1))
                    plgpu.barrier_wait(arrived.at[slot])
                    return turn(pl.ds(step * TILE, TILE), _numbers(places.at[slot, :, pl.ds(0, TILE)]), slot, sums)

                pl.when(begin < end)(lambda: fetch(begin))
                return jax.lax.fori_loop(begin, end, of_step, sums)

            def between(lines: Any, given: jax.Array, slot: Any, sums: jax.Array) -> jax.Array:
                if of_runs:
                    seen = _spread(of_runs[2].at[lines], 1) >= lag
                    given = _only(seen, given.astype(jnp.float32)).astype(x.dtype)
                return multiply(here, given, later.at[slot], sums)

            def within(lines: Any, given: jax.Array, slot: Any, sums: jax.Array) -> jax.Array:
                of_taken, of_given = _numbers(of_runs[3].at[lines]), _numbers(of_runs[4].at[:, lines])
                gradients = plgpu.load(later.at[slot], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                numbers, bits = given.astype(jnp.float32), _highest_bits(iota(0), iota(1))

                def of_bit(bit: Any, sums: jax.Array) -> jax.Array:
                    taken[...] = _only(_has(of_taken, TAKEN + bit), gradients).astype(x.dtype)
                    plgpu.commit_smem()
                    found = multiply(here, _only(_has(of_given, bit), numbers).astype(x.dtype), taken)
                    # The product has been waited for by all before any writes its factor again.
                    plgpu.commit_smem()
                    return sums + _only(bits == bit, found)

                return jax.lax.fori_loop(0, BITS + 1, of_bit, sums)

            begin = jax.lax.div(b * lag, TILE)
            if not of_runs:
                return over_lines(far, lag, begin, tiles, between, zeros())
            own, reached = lag == 0, lag <= of_runs[5][0]
            sums = over_lines(of_runs[:2], 0, 0, jnp.where(own, tiles, 0), within, zeros())
            return over_lines(far, lag, begin, jnp.where(~own & reached, tiles, begin), between, sums)

        sums = pl.run_scoped(
            run,
            plgpu.SMEM((SLOTS, TILE, WIDE), x.dtype),
            plgpu.SMEM((SLOTS, TILE, TILE), x.dtype, transforms=swizzled(x.dtype)),
            shared_tile(x.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
        )
        sums_ref[channel, lag] = _diagonals(sums)

    sums = launch.kernel(
        body,
        here,
        out_type=jax.ShapeDtypeStruct((d, cut.lags, 2 * TILE), jnp.float32),
        name='long_conv_taps_gradient',
        cost=_cost_of_taps(x, kernel, runs),
        grid=(d, cut.lags),
        grid_names=('channel', 'lag'),
        compiler_params=NAMED_LAYOUTS,
    )(*operands)
    # Tap i of a block is on the diagonal i of its lag, and on i - 64 of the next.
    own, next_lag = sums[:, :, TILE - 1 : 2 * TILE - 1], sums[:, 1:, : TILE - 1]
    dtaps = own + jnp.pad(next_lag, ((0, 0), (0, 1), (1, 0)))
    dtaps = dtaps.reshape(d, -1)[:, : min(w, t)].T
    return jnp.pad(dtaps, ((0, w - dtaps.shape[0]), (0, 0))).astype(kernel.dtype)


Turn = Callable[[Any, jax.Array, Any, jax.Array], jax.Array]
"""From lines, what is earlier as the left factor of a product, and the slot of what is later, onto sums."""


def _diagonals(matrix: jax.Array) -> jax.Array:
    """The sums of a tile along its diagonals, `128`: those of column minus row `i - 63` at `i`."""

    def run(between: Any) -> jax.Array:
        nothing = plgpu.layout_cast(jnp.zeros((2 * TILE,), jnp.float32), STRIDED)
        for row in range(TILE):
            between[row, pl.ds(0, 2 * TILE)] = nothing
            between[row, pl.ds(TILE, 2 * TILE)] = nothing
        plgpu.commit_smem()
        between[:, pl.ds(TILE, TILE)] = matrix
        plgpu.commit_smem()
        rows = [plgpu.load(between.at[row, pl.ds(1 + row, 2 * TILE)], layout=STRIDED) for row in range(TILE)]
        return functools.reduce(jnp.add, rows)

    # So wide that rows begin in different banks.
    return pl.run_scoped(run, plgpu.SMEM((TILE, 3 * TILE + 8), jnp.float32))


def _numbers(ref: Any) -> jax.Array:
    """A tile as a left factor of a product is."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)


def _spread(ref: Any, axis: int) -> jax.Array:
    """A number of every row, or of every column, all over a tile."""
    numbers = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(numbers, (TILE, TILE), (axis,)), plgpu.Layout.WGMMA)


def _has(marks: jax.Array, bit: Any) -> jax.Array:
    return (marks >> bit) & 1 != 0


def _only(where: jax.Array, numbers: jax.Array) -> jax.Array:
    return jnp.where(where, numbers, jnp.zeros((), numbers.dtype))


def _cost(x: jax.Array, kernel: jax.Array, runs: jax.Array | None) -> Passes:
    (b, t, d), w = x.shape, kernel.shape[0]
    return cost.long_conv(b=b, t=t, d=d, w=w, packed=runs is not None, implementation='mosaic_gpu').executed


def _cost_of_taps(x: jax.Array, kernel: jax.Array, runs: jax.Array | None) -> Cost:
    """What is left of the backward pass beside another convolution."""
    passes = _cost(x, kernel, runs)
    return Cost(passes.backward.flops - passes.forward.flops, passes.forward.bytes)
