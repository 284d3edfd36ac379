"""Block sizes: frozen records, chosen from shapes and the kind of device alone.

The same call always runs the same program. `tuning` has other tiles where some were measured on a device. Figures in
comments were measured on two CPU cores, float32.
"""

import dataclasses
import functools
import math
from collections.abc import Collection


@dataclasses.dataclass(frozen=True)
class AttentionTile:
    """Queries and keys of one block of attention scores."""

    queries: int
    keys: int


@dataclasses.dataclass(frozen=True)
class ConvTile:
    """Tokens and channels of a program of a short convolution."""

    steps: int
    channels: int


CONV_STEPS = 64
CONV_CHANNELS = 256, 128
"""Two or one a thread; with fewer than the last there is no tile."""


def short_conv(d: int) -> ConvTile:
    """The tile that computes the fewest channels beyond `d`, and the wider one on a tie.

    Where its width does not divide `d`, the last tile overlaps the one before it.
    """
    fitting = (count for count in CONV_CHANNELS if count <= d)
    return ConvTile(CONV_STEPS, min(fitting, key=lambda count: -(-d // count) * count))


def attention(t: int, s: int) -> AttentionTile | None:
    """The block of attention between `t` queries and `s` keys; `None`: one dense block.

    Up to 2^20 scores a head the dense block is fastest (6 ms against 8 at t = s = 256); beyond, memory is the limit.
    """
    if t * s <= 2**20:
        return None
    return AttentionTile(queries=min(512, t), keys=min(512, s))


def visible_tiles(
    t: int, s: int, tile: AttentionTile, *, causal: bool, window: int | None, sinks: int
) -> list[tuple[range, range]]:
    """For every tile of queries the tiles of keys in which some may see some key: those of sinks, then the others.

    Query i is at `i + s - t` of the keys, of which there is at least one.
    """
    found = []
    for first in range(s - t, s, tile.queries):
        last = min(first + tile.queries, s) - 1
        reach = s + t if window is None else window - 1
        end = min(s, last + 1 if causal else last + reach + 1)
        held = -(-max(0, min(sinks, last + 1 if causal else s, s)) // tile.keys)
        near = max(held, max(0, first - reach) // tile.keys)
        found.append((range(held), range(near, -(-max(0, end) // tile.keys))))
    return found


def cross_entropy(n: int, o: int) -> int | None:
    """The tokens of one part, with 2^22 logits or so (16 MiB in float32).

    `None`: all `n` at once, up to four such parts.
    """
    if n * o <= 2**24:
        return None
    return min(n, max(128, 2**22 // o))


def keeps_weights(count: int) -> bool:
    """Whether the `count` weights of a dense block of attention are kept for the backward pass, or recomputed.

    Recomputing them costs a fifth of the core's time; up to 2^22, 16 MiB in float32, they are kept.
    """
    return 0 < count <= 2**22


@dataclasses.dataclass(frozen=True)
class ScanTile:
    """Unrolled steps of a recurrence in one iteration of the loop."""

    steps: int


def linear_scan(t: int, platform: str) -> ScanTile | None:
    """The steps of one iteration of a loop over time; `None`: a parallel scan.

    A CPU runs the loop at the speed of its memory (t = 8192: 4 ms forward and backward, a parallel scan 40); on other
    devices every iteration of a loop costs a launch.
    """
    return ScanTile(steps=min(8, t)) if platform == 'cpu' and t > 0 else None


TOEPLITZ = 64
"""The most tokens whose convolution is a product with a matrix of all pairs; beyond, transforms do less."""


SHIFTS = 16
"""The most taps of a kernel that takes a sum of shifted rows, beyond `TOEPLITZ` tokens.

At t = 65536 both passes took 0.08 of the processor time of transforms with 4 taps, and 2.5 times as much with 64.
"""


def selective_scan(t: int) -> ScanTile:
    """The steps between two states kept for the backward pass, which holds the states of as many steps at a time."""
    return ScanTile(steps=max(1, min(32, t)))


def selective_scan_at_once(t: int, numbers: int) -> ScanTile:
    """The steps of a chunk whose states, of `numbers` numbers each, exist at the same time.

    Up to 2^24 numbers, 64 MiB in float32, of which half a dozen arrays exist at once: the fifty or so launches of a
    chunk are then a quarter of its time, and would be half at a third of the numbers. At least 32 steps, as in order,
    since a state is kept for every chunk. Chunks are equal, so that there is little padding.
    """
    most = max(32, 2**24 // max(1, numbers))
    return ScanTile(steps=max(1, -(-t // max(1, -(-t // most)))))


CPU_CACHES = 2**23
"""Bytes that the cores of a CPU keep in their caches together from one call to the next."""


@dataclasses.dataclass(frozen=True)
class ChunkTile:
    """Steps of one chunk, a power of two, and steps of one group of chunks, which are processed at once."""

    steps: int
    group: int


def linear_attention(b: int, t: int, channels: int, platform: str, *, vector: bool) -> ChunkTile:
    """The chunks of `b` sequences of `t` steps with `channels` channels, over all heads.

    With a decay for every channel chunks are shorter: one product serves a chunk as long as its decays stay moderate.
    On a CPU a group is what fits in the caches (t = 8192: half the time of one group), and its arrays are most of the
    memory of the forward pass; elsewhere it fills the device.
    """
    longest = 32 if vector else 64
    steps = min(longest, 1 << (t - 1).bit_length())
    numbers = 2**17 if platform == 'cpu' else 2**24
    return ChunkTile(steps=steps, group=max(1, numbers // max(1, b * channels * steps)) * steps)


def linear_attention_tpu(t: int, k: int, v: int, *, vector: bool) -> ChunkTile:
    """Chunks that fill a matrix unit, and groups large enough that a turn of the grid, 0.3 us or so, does not show.

    The blocks of a group, float32 and twice each, take 10 MiB at most up to 256 channels. With a decay for every key
    channel a longer chunk would spend more on decays than it saves in products.
    """
    return _grouped(64 if vector else 128, t, k, v)


def _grouped(steps: int, t: int, k: int, v: int) -> ChunkTile:
    """Chunks of so many steps, in groups of at most 2^16 numbers of the widest argument, or of one chunk."""
    most = max(1, 2**16 // (steps * max(k, v, 128)))
    return ChunkTile(steps=steps, group=steps * min(most, -(-t // steps)))


def heads_tpu(b: int, h: int, counts: Collection[int], k: int, v: int, size: int) -> int:
    """The heads of a program, up to four: of `h` heads that share arrays of `counts`, of each its own or one for all.

    A chunk is a chain of products, and those of other heads fill the turns in which it waits. By the compiler's
    schedule for a v5e, a chunk of linear attention or of the delta rule has between two fifths and three quarters of
    the instructions that it has alone; of eight heads it has no fewer. The blocks of all of them, of numbers of `size`
    bytes, are in VMEM, and two programs are left for the cores of a TPU that has two.
    """
    most = min(b * h // 2, 2**17 // (size * max(k, 128) * max(v, 128)))
    fit = (n for n in (4, 2) if n <= most and h % n == 0 and all(m == h or h // m % n == 0 for m in counts))
    return next(fit, 1)


PIPELINE_HOPPER = 4
"""Chunks of linear attention in shared memory at once, 18 KiB each: two blocks of threads fit in a multiprocessor."""


SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory available to a block of threads on Hopper."""

GRID = 65_535
"""The most blocks along the second and the third axis of CUDA grids; the first takes 2^31 - 1."""

REGISTERS = 232
"""Registers of a thread where two warpgroups compute and a third, with 40, copies."""


@dataclasses.dataclass(frozen=True)
class HopperAttentionTile:
    """The columns of one step of each kernel of attention on Hopper, next to 128 rows.

    Attributes:
      forward: keys.
      query_gradients: keys.
      key_gradients: queries.
      together: whether one kernel forms the gradients of keys and of values; otherwise one runs after the other.
    """

    forward: int
    query_gradients: int
    key_gradients: int
    together: bool


ATTENTION_STEPS = (128, 64, 32)
"""Columns of a step: fewer would have numbers of columns begin off the 128 bytes where copies to shared memory may."""


ATTENTION_TILES = {'forward': 4, 'query_gradients': 6, 'key_gradients': 5}
"""The 16-bit numbers of each score that a kernel of attention on Hopper holds in registers, vectors and bias apart."""

ATTENTION_OTHER_REGISTERS = 24
"""A thread's registers for all but sums and tiles of scores: indices, addresses, numbers of rows."""


def attention_hopper(k: int, v: int, r: int, *, vectors: int, numbers: int, bias: bool) -> HopperAttentionTile | None:
    """The steps of attention with `k` and `v` channels, multiples of 64, and `r` query heads a group; `None`: too many.

    `vectors` are added to the scores or hide keys beside such, `numbers` of each query are known to the backward pass;
    with `bias` there is a whole matrix. Rows stay in shared memory, and two steps of columns are there at a time, with
    room for the numbers of documents. By ptxas 13.0, 64 and 128 channels spill nothing, and with slopes or forget gates
    120 bytes of a thread at most.
    """

    memory = functools.partial(attention_hopper_memory, k=k, v=v, r=r, vectors=vectors, numbers=numbers, bias=bias)

    def columns(kernel: str, sums: int, vectors: int) -> int | None:
        """With so many channels of sums over the columns in registers, and vectors in tiles."""
        tiles = ATTENTION_TILES[kernel] + vectors + 2 * bias
        for step in ATTENTION_STEPS:
            registers = sums // 2 + tiles * step // 4 + ATTENTION_OTHER_REGISTERS
            if memory(kernel, step) <= SHARED_MEMORY and registers <= REGISTERS:
                return step
        return None

    def least(kernel: str) -> int | None:
        """The fewest columns, whatever registers they spill."""
        return ATTENTION_STEPS[-1] if memory(kernel, ATTENTION_STEPS[-1]) <= SHARED_MEMORY else None

    forward = columns('forward', v, vectors) or least('forward')
    query_gradients = columns('query_gradients', k, vectors) or least('query_gradients')
    both = columns('key_gradients', k + v, vectors + numbers)
    together = both is not None
    # Else two turns compute the scores twice.
    alone = columns('key_gradients', max(k, v), vectors + numbers)
    key_gradients = both or alone or least('key_gradients')
    if max(k, v) > 256 or forward is None or query_gradients is None or key_gradients is None:
        return None
    return HopperAttentionTile(forward, query_gradients, key_gradients, together)


def attention_hopper_memory(
    kernel: str, step: int, *, k: int, v: int, r: int, vectors: int, numbers: int, bias: bool
) -> int:
    """Bytes of shared memory of a kernel of attention on Hopper, by its name in `HopperAttentionTile`.

    Two steps of the numbers of a vector take 1,024 at most, at whose multiples Mosaic has every array begin.
    """
    tiles, own = 2 * (k + v) * (128 + 2 * step), 2**12 + 2**10 * max(1, vectors)
    match kernel:
        case 'forward':
            return tiles + own
        case 'query_gradients':
            return tiles + 512 * step * bias + own
    return tiles + 2**10 * numbers + 512 * r * bool(vectors) + own


def attention_tpu(t: int, s: int) -> AttentionTile:
    """Blocks of 512 queries and 512 keys, so that the overhead of a grid step, about 0.3 us, does not show.

    Their scores take 1 MiB, of which there are half a dozen at a time. Beyond 2^34 pairs blocks are four times as
    large: with heads so wide that a step of the grid takes one block, lists would outgrow the memory of scalars.
    """
    largest = 512 if t * s <= 2**34 else 1024
    return AttentionTile(queries=_lanes(t, largest), keys=_lanes(s, largest))


def attention_steps_tpu(tiles: int, size: int) -> int:
    """How many of so many tiles in a row, each of `size` bytes, a step of the grid goes over.

    Eight, or as many as divide the tiles better, and two copies of them in a quarter of the memory of kernels.
    """
    most = min(8, max(1, VMEM // 8 // max(1, size)))
    return -(-tiles // -(-tiles // most)) if tiles else 1


def attention_tpu_memory(tile: AttentionTile, channels: int, itemsize: int, *, together: int, bias: int) -> int:
    """Bytes of VMEM that a kernel of attention on a TPU takes at most: that of the gradients of keys and values.

    Of `channels` of a key and a value together: two copies of what is read on either side, of `together` tiles on one,
    and of what is written; sums, and products to be added to them, in float32. Half a dozen tiles of scores, and two
    copies of the biases of a step, where `bias` bytes are one. The compiler for v5e says 70.0 MiB, as this does, of
    2,048 channels of each in float32.
    """
    numbers = max(tile.queries, tile.keys) * channels
    scores = tile.queries * tile.keys
    return numbers * (2 * itemsize * (together + 2) + 8) + scores * (24 + 2 * together * bias)


def _lanes(n: int, largest: int) -> int:
    """The length of blocks of `n` numbers along lanes: as few blocks as can be, and little behind the last of them."""
    if n <= 128:
        return -(-n // 16) * 16
    blocks = -(-n // largest)
    return -(-n // (128 * blocks)) * 128


def delta_rule(b: int, t: int, channels: int, platform: str) -> ChunkTile:
    """The chunks of `b` sequences of `t` steps with `channels` channels, over all heads.

    The work within chunks grows with their length; on a CPU that soon outweighs fewer iterations of the
    loop over them. There the arrays of a group fit in the caches, and, but for gradients of three arrays of keys, in
    the 32 MiB below which allocators reuse memory; half as many take a tenth longer, twice as many as long or longer.
    """
    steps = min(32 if platform == 'cpu' else 64, 1 << (t - 1).bit_length())
    numbers = 2**18 if platform == 'cpu' else 2**24
    return ChunkTile(steps=steps, group=max(1, numbers // max(1, b * channels * steps)) * steps)


def delta_rule_tpu(t: int, k: int, v: int) -> ChunkTile:
    """Chunks of 64 steps, and groups whose blocks, float32 and twice each, take 10 MiB at most up to 256 channels.

    In longer chunks the triangular inverse, twelve products of full precision, would cost more than everything else.
    """
    return _grouped(max(16, min(64, 1 << (t - 1).bit_length())), t, k, v)


VMEM = 48 * 2**20
"""The bytes of a TPU's VMEM that kernels over tiles of rows may have: less than in any recent TPU."""


SUBLANES = 8
"""The lines of a register of a TPU."""

LANES = 128
"""The numbers of a line; the last dimension of a block is a multiple of it, or the whole."""


@dataclasses.dataclass(frozen=True)
class LongConvTile:
    """How a long convolution is cut into products with blocks of a Toeplitz matrix.

    Attributes:
      blocks: blocks of `LANES` tokens that a row is padded to.
      lags: distances between blocks for which there are taps, a multiple of `pair`.
      lines: lines of one product, a line a block and sequence, of which `SUBLANES` stand next to each other.
      channels: channels in VMEM at a time.
      at_once: those of them whose products are interleaved, as each waits for the matrix unit.
      pair: lags of one turn of the loop, so that sums are read and written once for them.
    """

    blocks: int
    lags: int
    lines: int
    channels: int
    at_once: int
    pair: int = 2

    @property
    def turns(self) -> int:
        """Products that cover a row."""
        return self.blocks * SUBLANES // self.lines

    @property
    def ahead(self) -> int:
        """Lines of zeros before a row, which the first blocks meet at later lags."""
        return self.lines + SUBLANES * (self.pair - 1)

    @property
    def multiplied(self) -> int:
        """Lines that are multiplied by some matrix, for `SUBLANES` sequences of a channel."""
        skipped = (SUBLANES * self.pair * turn // self.lines for turn in range(self.lags // self.pair))
        return sum(self.pair * self.lines * (self.turns - min(self.turns, first)) for first in skipped)


def long_conv_tpu(t: int, w: int, d: int, *, packed: bool) -> LongConvTile | None:
    """The tile of rows of `t` tokens and `w` taps, of `d` channels; `None`: VMEM does not hold one channel.

    Products of 128 lines fill the matrix units while the next matrices are made; blocks are divided over as many of
    them as that takes, so that little is padded.
    """
    blocks, lags = _long_conv_blocks(t, w)
    turns = -(-blocks // 16)
    lines = -(-blocks // turns) * SUBLANES
    tile = LongConvTile(turns * lines // SUBLANES, lags + lags % 2, lines, 1, 1)
    # Gradients of taps have a line more than taps.
    row = 4 * LANES * (2 * tile.blocks * SUBLANES + tile.ahead + tile.lags + 1)
    marks = 4 * LANES * (4 * tile.blocks * SUBLANES + tile.ahead) if packed else 0
    # Every block is there twice, so that the next one comes while one is computed with.
    most = (VMEM * 3 // 4 - 2 * marks) // (2 * row)
    if most < 1:
        return None
    channels = min(8, 1 << (most.bit_length() - 1), 1 << (d - 1).bit_length())
    return dataclasses.replace(tile, channels=channels, at_once=min(4, channels))


def _long_conv_blocks(t: int, w: int) -> tuple[int, int]:
    """Blocks of a row, and distances between them for which there are taps."""
    blocks = -(-t // LANES)
    return blocks, min(blocks, -(-(min(w, t) - 1) // LANES) + 1)


def long_conv_by_products(t: int, w: int, *, narrow: bool) -> bool:
    """Whether products with `w` taps take less than Fourier transforms on a TPU: 32,768 tokens with as many taps.

    Three times as many where x is bfloat16, which takes two products for six. By the compiler's estimates for a v5e.
    """
    blocks, lags = _long_conv_blocks(t, w)
    # A token meets so many blocks, on average over a row.
    return lags * (2 * blocks - lags + 1) <= 2 * blocks * (384 if narrow else 128) + blocks


CONV_LINES = 128
"""The blocks of rows that a program of `long_conv` on Hopper multiplies by the same blocks of a matrix of taps."""

CONV_PARTS = 2
"""The bfloat16 numbers that are a tap together there."""

_CONV_BLOCK = 64


@dataclasses.dataclass(frozen=True)
class HopperConvLines:
    """How `long_conv` cuts its rows for Hopper, into blocks of 64 tokens.

    Attributes:
      b: rows.
      blocks: of each.
      lines: blocks of all rows, whole programs.
      lags: distances between blocks for which there are taps.
    """

    b: int
    blocks: int
    lines: int
    lags: int

    @property
    def programs(self) -> int:
        return self.lines // CONV_LINES

    def last(self, program: int) -> int:
        """The greatest distance at which a program's lines meet a block."""
        return min((program * CONV_LINES + CONV_LINES - 1) // self.b, self.lags - 1)


def long_conv_hopper(b: int, t: int, w: int) -> HopperConvLines:
    """The cut of `b` rows of `t` tokens, with `w` taps."""
    blocks = -(-t // _CONV_BLOCK)
    lines = -(-b * blocks // CONV_LINES) * CONV_LINES
    return HopperConvLines(b, blocks, lines, min(blocks, -(-(min(w, t) - 1) // _CONV_BLOCK) + 1))


def long_conv_hopper_by_products(t: int, w: int, *, packed: bool) -> bool:
    """Whether products with `w` taps take less than Fourier transforms on Hopper; no device has measured it.

    By what an H100 moves in the time of either (3.35 TB/s, 300 TFLOP/s), both passes of 8 x 2,048 tokens and 1,024
    channels: transforms 1.3 GiB, or 5.9 with documents, for which they are made for every halving of a row. The kernels
    have 1.3 or 2.0, and products with 64 tokens more that are met take as long as 0.2. Documents are taken to be half
    as long as rows of 8,192.
    """
    blocks, lags = -(-t // _CONV_BLOCK), long_conv_hopper(1, t, w).lags
    # A token meets so many blocks, on average over a row.
    return lags * (2 * blocks - lags + 1) <= 2 * blocks * (64 if packed else 3) + blocks


@dataclasses.dataclass(frozen=True)
class RowsTile:
    """Rows and columns that are processed at once."""

    rows: int
    columns: int


def softmax_tpu(n: int, o: int) -> RowsTile:
    """The tile of `n` rows of length `o` on a TPU; a tile of whole rows is read once.

    2^18 numbers or so hide the overhead of grid steps; 2^20, 4 MiB in float32, fit in VMEM for inputs, outputs
    and exponentials together. Tiles of 32 rows suit every type, those of bool arrays included.
    """
    if 32 * o > 2**20:
        return RowsTile(min(n, 32), 2**14)
    return RowsTile(min(n, max(32, 2**18 // max(o, 128) // 32 * 32)), o)


@dataclasses.dataclass(frozen=True)
class WarpsTile:
    """Rows and columns that a block of four warps processes at once, in registers.

    Attributes:
      rows: of the tile.
      columns: of the tile.
      warps: those that share a row.
      vector: neighbours in a row that a thread reads at once.
    """

    rows: int
    columns: int
    warps: int
    vector: int


def softmax_hopper(n: int, o: int, itemsize: int) -> WarpsTile:
    """The tile of `n` rows of length `o` on Hopper: 128 at least, 32 with four rows or more. Whole rows are read once.

    A thread holds up to 64 numbers, two arrays of which fit its registers in the backward pass. Short rows are a
    warp's, several for each; long ones are shared.
    """
    return warps_tile(n, o, itemsize, 1 if n >= 4 and o <= 2048 else 4, numbers=64)


def softmax_topk_hopper(n: int, o: int, itemsize: int) -> WarpsTile:
    """The tile of four rows or more of length `o`, 32 at least, on Hopper; each belongs to one warp."""
    return warps_tile(n, o, itemsize, 1, numbers=32)


def warps_tile(n: int, o: int, itemsize: int, warps: int, numbers: int) -> WarpsTile:
    """A thread has up to `numbers` numbers, and reads up to 16 bytes at once, as the alignment of rows allows."""
    vector = 16 // itemsize
    while o % vector or 32 * warps * vector > o:
        vector //= 2
    step = 32 * warps * vector
    columns = min(o, numbers * 32 * warps) // step * step
    rows = 1 if warps == 4 else 4 * max(1, min(128 * numbers // columns, n) // 4)
    return WarpsTile(rows, columns, warps, vector)


def softmax_topk_tpu(n: int, o: int) -> RowsTile:
    """The tile of `n` rows of length `o` on a TPU: 2^16 numbers or so, processed by all passes before the next."""
    columns = min(o, 2**13)
    return RowsTile(min(n, max(32, 2**16 // max(columns, 128) // 32 * 32)), columns)


@dataclasses.dataclass(frozen=True)
class SpanTile:
    """Steps of one block, and the number of spans of time that are processed at once."""

    rows: int
    spans: int


def linear_scan_gpu(b: int, t: int, blocks: int, row: int) -> SpanTile:
    """Blocks of 16 KiB read at a time, of which 48 in flight in 64 programs keep an H100's memory busy.

    `b blocks` programs, `row` bytes read a step, `t` a multiple of 8. Spans are of 256 steps at least; they read
    everything twice, and so begin to pay where less than three fifths of 64 programs would run.
    """
    rows = math.gcd(t, max(8, 1 << (2**14 // row).bit_length() - 1))
    spans = 1
    if b * blocks <= 38:
        while b * blocks * spans < 128 and t % (2 * spans * rows) == 0 and t >= 512 * spans:
            spans *= 2
    return SpanTile(rows=rows, spans=spans)


@dataclasses.dataclass(frozen=True)
class StreamTile:
    """Steps and channels of one block of arrays `b t d` that are read and written once."""

    rows: int
    channels: int


def linear_scan_tpu(t: int, d: int, numbers: int) -> StreamTile:
    """Blocks of 1 MiB of every array in float32, of whole groups of 16 steps; `numbers` is 2 for complex arrays.

    Moving one takes longer than the 0.3 us or so of a turn of the grid; with two of each, read and written, they take
    6 MiB, with complex arrays, half as large, as much.
    """
    channels = min(512 // numbers, -(-d // 128) * 128)
    return StreamTile(rows=min(2**14 // (numbers * channels) * 16, -(-t // 16) * 16), channels=channels)


HALVES = 6
"""The sizes of the halves of a chunk, 1, 2, 4, ... steps, in kernels with decays of key channels on Hopper."""

SUBBLOCK = 16
"""Steps of a chunk of `linear_attention` on TPUs in whose scores decays of key channels enter one by one."""

SELECTIVE_SCAN_SEGMENT = 8
"""The steps whose states a program of `selective_scan` holds in shared memory in its backward pass."""


def selective_scan_gpu(b: int, t: int, blocks: int, n: int, x_bytes: int, dt_bytes: int) -> SpanTile:
    """Two segments a tile where shared memory holds the backward pass, else one; spans that fill the device.

    `b blocks` programs of 64 channels, with `n` numbers each. The states at the start of tiles are kept, as many bytes
    as x in bfloat16 has where a tile has `2 n` steps; a second segment costs half a forward pass. Spans, of 128 steps
    at least, cost an exponential more for each number and pass, and so begin where fewer than two programs a
    multiprocessor, 256, would run; 512 are then aimed at, by 32 spans at most, which XLA goes through one by one.
    """
    rows = 2 * SELECTIVE_SCAN_SEGMENT
    if t < rows or selective_scan_gpu_memory(rows, n, x_bytes, dt_bytes) > SHARED_MEMORY:
        rows = SELECTIVE_SCAN_SEGMENT
    spans = 1
    if b * blocks < 256:
        while b * blocks * spans < 512 and t >= 2 * spans * 128 and spans < 32:
            spans *= 2
    return SpanTile(rows=rows, spans=spans)


def selective_scan_gpu_group(n: int) -> int:
    """The steps of a segment whose states and decays a program holds in registers, 64 a thread or so for both."""
    return max(1, 64 // n)


def selective_scan_gpu_memory(rows: int, n: int, x_bytes: int, dt_bytes: int) -> int:
    """Bytes of shared memory of a program of the backward pass, which takes more than the forward pass.

    What the threads leave of a segment, states at the start of the groups of all segments but the last; two tiles of
    every input and output.
    """
    segment, state = SELECTIVE_SCAN_SEGMENT, 4 * 64 * n
    read = 64 * (2 * x_bytes + dt_bytes) + 2 * 4 * n + 4
    written = 64 * (x_bytes + dt_bytes) + 2 * 4 * n
    edges = (rows - segment) // selective_scan_gpu_group(n)
    return segment * (state + 2 * 4 * 4 * 64) + edges * state + 2 * rows * (read + written)


def selective_scan_tpu(d: int, n: int) -> int:
    """Channels of a tile with `n` numbers of state each, `n` a multiple of 8 and `d` of 128, which it divides.

    A state then takes four of the 64 registers, eight at n = 64; the backward pass works on seven or so of them.
    """
    return math.gcd(d, max(128, 1 << (4096 // n).bit_length() - 1))


@dataclasses.dataclass(frozen=True)
class HeadTile:
    """Tokens and classes of one tile of logits."""

    tokens: int
    classes: int


def cross_entropy_tpu(n: int, d: int, o: int, itemsize: int) -> HeadTile | None:
    """The tile of the logits of `n` tokens of width `d` and `o` classes on a TPU; `None`: VMEM holds none.

    The backward pass decides: two tiles of each factor and of a result, its sum, and four of the logits. Of tiles of
    classes between half the largest size and the largest, the one with the least padding.
    """
    for size in (512, 256, 128):
        if size * d * (6 * itemsize + 4) + 16 * size * size <= VMEM * 3 // 4:
            break
    else:
        return None
    classes = min(range(size, size // 2, -128), key=lambda classes: -(-o // classes) * classes)
    return HeadTile(tokens=min(size, -(-n // 128) * 128), classes=min(classes, -(-o // 128) * 128))


def cross_entropy_hopper(n: int, o: int) -> int:
    """The classes, a multiple of 256, of which the gradients of all logits are held at a time: 2^27, 256 MiB."""
    most = max(1, 2**27 // (n * 256))
    tiles = -(-o // 256)
    groups = -(-tiles // most)
    return 256 * -(-tiles // groups)


def delta_rule_hopper(k: int, keys: int) -> int | None:
    """Chunks of the delta rule with `k` channels of keys in shared memory at once; `None`: too many channels.

    A chunk has `keys` arrays of keys, 2 or, from the last chunk to the first, 3, and one of values less, each a tile of
    64 x 64 for every 64 channels or one, and the numbers of steps; beside them are the state and the sums. A thread
    holds half a number of the state for every channel, in a register; 256 leave as much for all else.
    """
    if k > 256:
        return None
    parts, tile = -(-k // 64), 2 * 64 * 64
    chunk = (keys * parts + keys - 1) * tile + 2**11
    return min(4, (SHARED_MEMORY - (parts + 1) * tile - 2**12) // chunk)
