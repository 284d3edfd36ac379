"""The weights of the steps of a chunk with decays per key channel, on Hopper GPUs.

With G the log decays summed, a step i reads a step j through `sum_k q_ik k_jk exp(G_ik - G_jk)`. A chunk is split into
halves, these into halves, and so on down to blocks: the second half of a block reads the first through a product of `q
exp(G - M)` and `k exp(M - G)`, with M the decays up to the middle (the secondary chunking of Yang et al., 2024, arXiv
2312.06635, all the way down). So a score is in one of seven products of a whole chunk, no exponent is above 0, and a
number has one exponential for each of the six sizes of halves, being in the first or in the second.

Where decays are weak, fewer products do: the smallest blocks have 64, 16 or 1 steps, as no half of one may decay by
more than `bound`, for every chunk and 64 channels apart, and one product of `q exp(G - M)` and `k exp(M - G)` has all
scores within such blocks. Exponents are up to `bound` there; sums are those of the halves, and rounding is relative to
a number, as everywhere.

Log decays are summed over exactly the steps between, as products of zeros and ones with two bfloat16 parts. Their error
in a sum G, `2^-17 G`, is less than the error of a product from rounding its factors, `2^-12`, where `exp(G)` matters.

Only the arguments are kept for the gradients; the exponentials are recomputed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tiling
from pallas_kernels.matrix_state.decays import LEAST_LOG_DECAY, REACH, RUN, WRITE
from pallas_kernels.matrix_state.mosaic_gpu.inverse import put
from pallas_kernels.matrix_state.mosaic_gpu.tiles import HEADS_FIRST, TILE, Layout, iota, load
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate
from pallas_kernels.target import Target

HALVES = tiling.HALVES
"""The sizes of the halves of a chunk: 1, 2, 4, ... steps."""

LEVELS = (6, 4, 0)
"""Of the smallest blocks, the logarithms of their steps: HALVES, or fewer where decays are strong."""


def bound(dtype: Any) -> float:
    """By how much a half of the smallest blocks may decay, so that its inverse is far from the largest number."""
    return 20.0 if jnp.finfo(dtype).maxexp > 16 else 4.0


class Steps(NamedTuple):
    """The inputs of a call, in whole chunks and tiles.

    Attributes:
      q: `b hq t k`, 16-bit; or, as k and log_decay, with heads after time.
      k: `b hk t k`, 16-bit.
      log_decay: `b h t k`, float32.
      rows: `b h l 8 c`, only for documents, see `rows`.
    """

    q: jax.Array
    k: jax.Array
    log_decay: jax.Array
    rows: jax.Array


class Weights(NamedTuple):
    """The weights of steps in chunks, in the type of q except for `erased`.

    Attributes:
      among: weight of a write in the same chunk in a step's read for its query, `b h t c`.
      q: queries that read the state before the chunk, `b h t k`.
      writes: the keys under which values are in the state after the chunk, `b h t k`.
      erased: weight of an earlier write in the same chunk in a step's read for its key, `b h t c`, float32; or `None`.
      k: keys that read the state before the chunk, `b h t k`; or `None`.
    """

    among: Any
    q: Any
    writes: Any
    erased: Any = None
    k: Any = None


def factor(steps: Steps, layout: Layout = HEADS_FIRST) -> jax.Array:
    """The decay of the state over each chunk, `b h l k`."""
    total = jnp.sum(_eighths(steps.log_decay, layout), axis=3)
    return jnp.where(steps.rows[..., RUN, -1:] == 0, jnp.exp(total), 0)


def put_decays(tiles: Any, log_decay: Any) -> None:
    """Writes a tile of log decays as two of bfloat16, which sum to them except for the last 8 bits."""
    put(tiles, jnp.maximum(load(log_decay), LEAST_LOG_DECAY))


def levels(log_decay: jax.Array, dtype: Any, layout: Layout = HEADS_FIRST) -> jax.Array:
    """Of `LEVELS`, those of every chunk and 64 channels, `b h l 1 64`, the channels in the first places, float32."""
    b, h, t, k = layout.sizes(log_decay)
    l, parts, least = t // TILE, k // TILE, -bound(dtype)
    eighths = _eighths(log_decay, layout).reshape(b, h, l, 8, parts, TILE)
    halves = jnp.sum(eighths.reshape(b, h, l, 2, 4, parts, TILE), axis=4)
    whole, some = (jnp.min(sums, axis=(3, 5)) >= least for sums in (halves, eighths))
    found = jnp.where(whole, LEVELS[0], jnp.where(some, LEVELS[1], LEVELS[2])).astype(jnp.float32)
    return jnp.pad(found, ((0, 0),) * 3 + ((0, TILE - parts),))[:, :, :, None]


def _eighths(log_decay: jax.Array, layout: Layout) -> jax.Array:
    """Log decays summed over eighths of chunks, `b h l 8 k`: all that is asked of them is made of one reading."""
    b, h, t, k = layout.sizes(log_decay)
    steps = (b, h, t // 8, 8, k) if layout.heads == 1 else (b, t // 8, 8, h, k)
    # The sum first, so that only that is transposed.
    found = layout.heads_first(jnp.sum(log_decay.reshape(steps), axis=4 - layout.heads))
    return found.reshape(b, h, t // TILE, 8, k)


def level_of(numbers: Any, part: Any) -> Any:
    """Of a chunk, the level of 64 channels, a scalar."""
    return numbers[0, part].astype(jnp.int32)


def halves_of(size: Any, origin: Any) -> tuple[jax.Array, jax.Array]:
    """The steps that decay between a step and the middle of its block, of halves of a size, and who reads whom.

    A step of a second half has decayed since the middle, its own decay included; one of a first half decays until then.
    """
    step, other = iota(0, origin), iota(1)
    apart, second = step ^ other, (step & size) != 0
    between = (apart < size) & ((second & (other <= step)) | (~second & (other > step)))
    return between, (step > other) & (apart >= size) & (apart < 2 * size)


def within_blocks(here: Target, coarse: Any, fine: Any, level: Any, origin: Any) -> tuple[jax.Array, jax.Array]:
    """The decay from the middle of its smallest block to a step, above one in the first half, and its inverse."""
    size = jax.lax.shift_right_logical(jax.lax.shift_left(jnp.int32(1), level), 1)
    total = sum_over(here, coarse, fine, halves_of(size, origin)[0])
    exponent = jnp.where((iota(0, origin) & size) != 0, total, -total)
    return jnp.exp(exponent), jnp.exp(-exponent)


def same_block(level: Any, origin: Any) -> jax.Array:
    """Marks the steps in the same smallest block."""
    return (iota(0, origin) ^ iota(1)) < jax.lax.shift_left(jnp.int32(1), level)


def to_ends(origin: Any) -> tuple[tuple[jax.Array, int], tuple[jax.Array, int]]:
    """The steps that decay from the start of the chunk up to a step, and after it; and the rows that say who counts."""
    step, other = iota(0, origin), iota(1)
    return (step >= other, REACH), (step < other, WRITE)


def ones_where(steps: jax.Array) -> jax.Array:
    return jnp.where(steps, 1.0, 0.0).astype(jnp.bfloat16)


def decay_over(here: Target, coarse: Any, fine: Any, steps: jax.Array) -> jax.Array:
    """The decay over the marked steps, for every step of a tile."""
    return jnp.exp(sum_over(here, coarse, fine, steps))


def sum_over(here: Target, coarse: Any, fine: Any, steps: jax.Array) -> jax.Array:
    """The log decays of the marked steps, summed, for every step of a tile."""
    ones = ones_where(steps)
    (total,) = accumulate(here, (None, [(ones, coarse), (ones, fine)]))
    return total
