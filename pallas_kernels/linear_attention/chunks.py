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
      runs: how often the chunk has forgotten the past, up to each step, int32 `b l 1 c 1`; or `None`.
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
    return Chunks(
        q=_cut(q, length),
        k=_cut(k, length),
        v=_cut(v, length),
        log_decay=None if log_decay is None else _cut(log_decay, length),
        runs=None if starts is None else jnp.cumsum(_cut(starts[..., None, None], length), axis=3, dtype=jnp.int32),
    )


def _cut(array: jax.Array, length: int) -> jax.Array:
    """`b t h k` as `b l h c k`."""
    array = jnp.pad(array, ((0, 0), (0, -array.shape[1] % length), (0, 0), (0, 0)))
    b, t, h, k = array.shape
    return jnp.moveaxis(array.reshape(b, t // length, length, h, k), 3, 2)


def join(array: jax.Array) -> jax.Array:
    """`b l h c v` as `b t h v`."""
    b, l, h, c, v = array.shape
    return jnp.moveaxis(array, 2, 3).reshape(b, l * c, h, v)


def since(array: jax.Array) -> jax.Array:
    """Sums over the steps, the last axis but one, from the first up to each."""
    ones = jnp.tril(jnp.ones((array.shape[-2],) * 2, array.dtype))
    # A product with ones, several times faster than a cumulative sum; it must not round to a shorter type on the way.
    return jnp.matmul(_like(ones, array), array, precision='highest')


def until(array: jax.Array) -> jax.Array:
    """Sums over the steps, the last axis but one, from the one after each up to the last."""
    ones = jnp.triu(jnp.ones((array.shape[-2],) * 2, array.dtype), 1)
    return jnp.matmul(_like(ones, array), array, precision='highest')


def between(array: jax.Array) -> jax.Array:
    """Sums over the steps after s up to t, for t after s: `b l h t s k` from `b l h c k`.

    A difference of cumulative sums, which would lose the small difference of large sums to rounding; so a coarse part,
    whose sums are exact, goes separately.
    """
    coarse = jnp.round(array * 1024) / 1024

    def differences(array: jax.Array) -> jax.Array:
        total = since(array)
        return total[:, :, :, :, None] - total[:, :, :, None]

    return differences(coarse) + differences(array - coarse)


def _like(matrix: jax.Array, array: jax.Array) -> jax.Array:
    return matrix.reshape((1,) * (array.ndim - 2) + matrix.shape)


def visible(runs: jax.Array | None, like: jax.Array) -> jax.Array:
    """Which steps (last axis) of its chunk a step reads, itself and earlier ones of its run: bool `b l 1 c c`.

    Dimensions are those of `like`, `... c k`, of size 1 where it does not vary.
    """
    past = _like(jnp.tril(jnp.ones((like.shape[-2],) * 2, bool)), like)
    return past if runs is None else past & (runs == runs.swapaxes(-1, -2))


def remembers(runs: jax.Array | None) -> jax.Array | None:
    """Which steps still read the state before the chunk, bool `b l 1 c 1`; `None`: all."""
    return None if runs is None else runs == 0


def remembered(runs: jax.Array | None) -> jax.Array | None:
    """Which steps the state after the chunk still holds, bool `b l 1 c 1`; `None`: all."""
    return None if runs is None else runs == runs[..., -1:, :]


def keep(where: jax.Array | None, array: jax.Array) -> jax.Array:
    """The array, zero where it is not kept; `None` keeps everything."""
    return array if where is None else jnp.where(where, array, 0)
