"""A call of `linear_attention` cut into chunks of time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Chunks(NamedTuple):
    """The arrays of a call; `l` counts chunks and `c` steps in a chunk. Dimensions of size 1 are constant.

    Attributes:
      q: scaled, `b l hq c k`.
      k: `b l hk c k`.
      v: `b l hv c v`.
      log_decay: `b l h c k`, 0 for padding; or `None`.
      runs: how often the chunk has forgotten the past, up to each step, int32 `b l 1 c`; or `None`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array | None
    runs: jax.Array | None


def cut(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array | None, starts: jax.Array | None, length: int
) -> Chunks:
    """Cuts time into chunks of `length`, the last one filled up with steps that neither write nor decay."""
    t = q.shape[1]
    if log_decay is not None and log_decay.shape[1] == 1:
        whole = length if t % length == 0 else t
        log_decay = jnp.broadcast_to(log_decay, (1, whole, *log_decay.shape[2:]))
    return Chunks(
        q=_cut(q, length),
        k=_cut(k, length),
        v=_cut(v, length),
        log_decay=None if log_decay is None else _cut(log_decay, length),
        runs=None
        if starts is None
        else jnp.cumsum(_cut(starts[..., None, None], length)[..., 0], axis=3, dtype=jnp.int32),
    )


def _cut(array: jax.Array, length: int) -> jax.Array:
    """`b t h k` as `b l h c k`."""
    array = jnp.pad(array, ((0, 0), (0, -array.shape[1] % length), (0, 0), (0, 0)))
    b, t, h, k = array.shape
    return jnp.moveaxis(array.reshape(b, t // length, length, h, k), 3, 2)


def join(array: jax.Array, t: int) -> jax.Array:
    """`b l h c v` as `b t h v`, without the padding."""
    b, l, h, c, v = array.shape
    return jnp.moveaxis(array, 2, 3).reshape(b, l * c, h, v)[:, :t]


def visible(chunks: Chunks) -> jax.Array:
    """Which earlier steps (last axis) of its chunk a step reads, bool `b l 1 c c`, dimensions constant of size 1."""
    c = chunks.q.shape[3]
    past = jnp.tril(jnp.ones((c, c), bool))[None, None, None]
    return past if chunks.runs is None else past & (chunks.runs[..., :, None] == chunks.runs[..., None, :])


def remembers(chunks: Chunks) -> jax.Array | None:
    """Which steps still read the state before the chunk, bool `b l 1 c 1`; `None`: all."""
    return None if chunks.runs is None else chunks.runs[..., None] == 0


def remembered(chunks: Chunks) -> jax.Array | None:
    """Which steps the state after the chunk still holds, bool `b l 1 c 1`; `None`: all."""
    return None if chunks.runs is None else chunks.runs[..., None] == chunks.runs[..., -1:, None]


def keep(where: jax.Array | None, array: jax.Array) -> jax.Array:
    """The array, zero where it is not kept; `None` keeps everything."""
    return array if where is None else jnp.where(where, array, 0)
