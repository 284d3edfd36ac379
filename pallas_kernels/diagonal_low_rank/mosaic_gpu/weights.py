"""What the steps of chunks of `diagonal_low_rank` read and write, on Hopper GPUs, differentiable; see `chunk.Weights`.

Arrays of steps are `b t h k`, as callers have them, and what is found `b h t k`, in 16 bits but for weights that are
inverted and for the decay of the state. Decays of key channels are the kernels' of `matrix_state.mosaic_gpu.weights`;
others are left to JAX, in float32, of whose products a GPU keeps the 10 bits of tf32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.diagonal_low_rank import chunk
from pallas_kernels.diagonal_low_rank.chunk import Chunk, Weights
from pallas_kernels.diagonal_low_rank.step import found
from pallas_kernels.matrix_state.decays import KEPT, RUN
from pallas_kernels.matrix_state.mosaic_gpu import channel_decays
from pallas_kernels.matrix_state.mosaic_gpu.tiles import TILE, TIME_FIRST
from pallas_kernels.matrix_state.mosaic_gpu.weights import weights as channel_weights
from pallas_kernels.matrix_state.products import Form
from pallas_kernels.target import Target


class Steps(NamedTuple):
    """A call in whole chunks and tiles, but for its values.

    Attributes:
      q: `b t hq k`.
      a: `b t ha k`.
      keys: those under which steps write what they read for `a`, and those of values where they are others, `b t hk k`.
      log_decay: float32, zero in padding, `b t h k`, or `b t h 1` where key channels decay alike; or `None`.
    """

    q: jax.Array
    a: jax.Array
    keys: tuple[jax.Array, ...]
    log_decay: jax.Array | None


def weights(here: Target, rows: jax.Array, steps: Steps) -> Weights:
    """The weights of all chunks; `rows`, `b h l 8 c`, are those of `matrix_state.decays`, for documents."""
    decay = steps.log_decay
    of_channels = decay is not None and decay.shape[3] > 1
    does = _by_channels(here, rows, steps) if of_channels else _by_steps(rows, steps)
    dtype, (inverted, *earlier) = steps.q.dtype, does.earlier

    def rounded(arrays: list[jax.Array]) -> list[jax.Array]:
        return [array.astype(dtype) for array in arrays]

    return Weights(
        among=rounded(does.among),
        earlier=[inverted.astype(jnp.float32), *rounded(earlier)],
        q=does.q.astype(dtype),
        a=does.a.astype(dtype),
        writes=rounded(does.writes),
        factor=does.factor,
    )


def _by_steps(rows: jax.Array, steps: Steps) -> Weights:
    """Without decays, or with one for all key channels."""
    h = rows.shape[1]

    def of_heads(array: jax.Array) -> jax.Array:
        spread = jnp.repeat(TIME_FIRST.heads_first(array.astype(jnp.float32)), h // array.shape[2], axis=1)
        return spread.reshape(*spread.shape[:2], -1, TILE, spread.shape[3])

    runs, decay = rows[:, :1, :, RUN, :, None], steps.log_decay
    decay = None if decay is None else of_heads(decay)
    taken = Chunk(of_heads(steps.q), of_heads(steps.a), tuple(map(of_heads, steps.keys)), decay, runs)
    does = chunk.weights(taken, functools.partial(found, Form(jnp.float32, jnp.float32)))
    factor = jnp.broadcast_to(does.factor, (*rows.shape[:3], 1, 1))
    joined = jax.tree.map(_joined, does._replace(factor=factor))
    return joined._replace(factor=factor)


def _by_channels(here: Target, rows: jax.Array, steps: Steps) -> Weights:
    """The weights of queries and keys, and those of each `a` in the place of the query of the step before.

    There its reads have decayed up to that step, its own write included: what `a` reads of the state before its step.
    """
    a, decay = steps.a, steps.log_decay
    assert decay is not None
    ahead = jnp.concatenate([a[:, 1:], jnp.zeros_like(a[:, :1])], axis=1)
    kept = rows[..., KEPT, :, None]

    def read(reads: jax.Array, key: jax.Array, among: DTypeLike | None = None) -> channel_decays.Weights:
        return channel_weights(here, False, channel_decays.Steps(reads, key, decay, rows), among, TIME_FIRST)

    def back(first: jax.Array, found: jax.Array) -> jax.Array:
        """A step later again, in chunks, after that of the first step; where a document starts nothing is read."""
        later = found.reshape(*rows.shape[:3], TILE, found.shape[3])[..., :-1, :]
        return _joined(kept.astype(found.dtype) * jnp.concatenate([first.astype(found.dtype), later], axis=3))

    by_q = [read(steps.q, key) for key in steps.keys]
    by_a = [read(ahead, key, jnp.float32) for key in steps.keys]
    b, h, l = rows.shape[:3]
    first = TIME_FIRST.heads_first(a[:, ::TILE])[:, :, :, None]
    nothing = jnp.zeros((b, h, l, 1, TILE), jnp.float32)
    return Weights(
        among=[found.among for found in by_q],
        earlier=[back(nothing, found.among) for found in by_a],
        q=by_q[0].q,
        a=back(jnp.repeat(first, h // first.shape[1], axis=1), by_a[0].q),
        writes=[found.writes for found in by_q],
        factor=channel_decays.factor(channel_decays.Steps(steps.q, a, decay, rows), TIME_FIRST)[:, :, :, None],
    )


def _joined(array: Any) -> jax.Array:
    """`b h l c k` as `b h t k`."""
    b, h, l, c, k = array.shape
    return array.reshape(b, h, l * c, k)
