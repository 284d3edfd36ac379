"""Block sizes: frozen records, chosen from shapes and the kind of device alone.

The same call always runs the same program. Figures in comments were measured on two CPU cores, float32.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class AttentionTile:
    """Queries and keys of one block of attention scores."""

    queries: int
    keys: int


def attention(t: int, s: int) -> AttentionTile | None:
    """The block of attention between `t` queries and `s` keys; `None`: one dense block.

    Up to 2^20 scores a head the dense block is fastest (6 ms against 8 at t = s = 256); beyond, memory decides.
    """
    if t * s <= 2**20:
        return None
    return AttentionTile(queries=min(512, t), keys=min(512, s))


def cross_entropy(n: int, o: int) -> int | None:
    """The tokens of one part, with 2^22 logits or so (16 MiB in float32).

    `None`: all `n` at once, up to four such parts.
    """
    if n * o <= 2**24:
        return None
    return min(n, max(128, 2**22 // o))


def keeps_weights(count: int) -> bool:
    """Whether the `count` weights of a dense block of attention are kept for the backward pass, or computed again.

    Computing them again costs a fifth of the core's time; up to 2^22, 16 MiB in float32, they are kept.
    """
    return 0 < count <= 2**22


@dataclasses.dataclass(frozen=True)
class ScanTile:
    """Steps of a recurrence that are written out one after the other in one turn of the loop."""

    steps: int


def linear_scan(t: int, platform: str) -> ScanTile | None:
    """The steps of one turn of a loop over time; `None`: a parallel scan.

    A CPU runs the loop at the speed of its memory (t = 8192: 4 ms forward and backward, a parallel scan 40); on other
    devices every turn of a loop costs a launch.
    """
    return ScanTile(steps=min(8, t)) if platform == 'cpu' and t > 0 else None


def selective_scan(t: int) -> ScanTile:
    """The steps between two states kept for the backward pass, which holds the states of so many steps at a time."""
    return ScanTile(steps=max(1, min(32, t)))


@dataclasses.dataclass(frozen=True)
class ChunkTile:
    """Steps of one chunk, a power of two, and steps of one group of chunks, which are worked on at once."""

    steps: int
    group: int


def linear_attention(b: int, t: int, channels: int, platform: str, *, vector: bool) -> ChunkTile:
    """The chunks of `b` sequences of `t` steps with so many channels, over all heads.

    With a decay for every channel chunks are shorter: one product serves a chunk as long as its decays stay moderate.
    On a CPU a group is what stays in the caches (t = 8192: half the time of one group); elsewhere it fills the device.
    """
    longest = 32 if vector else 64
    steps = min(longest, 1 << (t - 1).bit_length())
    numbers = (2**17 if vector else 2**18) if platform == 'cpu' else 2**24
    return ChunkTile(steps=steps, group=max(1, numbers // (b * channels * steps)) * steps)


def linear_attention_tpu(t: int, k: int, v: int, *, vector: bool) -> ChunkTile:
    """Chunks that fill a matrix unit, and groups large enough that a turn of the grid, 0.3 us or so, does not show.

    The blocks of a group, float32 and twice each, take 10 MiB at most up to 256 channels. With a decay for every key
    channel a longer chunk would spend more on decays than it saves in products.
    """
    steps = 64 if vector else 128
    most = max(1, 2**16 // (steps * max(k, v, 128)))
    return ChunkTile(steps=steps, group=steps * min(most, -(-t // steps)))
