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


def linear_attention(t: int) -> ScanTile:
    """The steps of one chunk, a power of two."""
    return ScanTile(steps=64 if t > 32 else 1 << max(0, t - 1).bit_length())
