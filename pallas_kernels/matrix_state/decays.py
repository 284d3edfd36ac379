"""The numbers per step of a chunk that follow from documents and from decays of one number per step.

Pallas forms get them precomputed, float32, as eight rows of length `c` for every chunk.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state import chunks

COARSE, FINE, REACH, WRITE, FACTOR, RUN, KEPT = range(7)
"""The rows.

COARSE and FINE add up to the log decays summed from the start of the chunk to each step; differences of the coarse
parts are exact. REACH is the decay from the state before the chunk to a step, WRITE from a step to the state after the
chunk, FACTOR between the two states. RUN is the number of document starts up to a step. KEPT is 0 where a step forgets
the past and 1 elsewhere.
"""

COUNT = 8
"""The number of rows; the last one is padding."""

LEAST_LOG_DECAY = -120.0
"""The least log decay, to which others are clipped. Its exponential is zero in float32, and its sums are exact."""


def rows(log_decay: jax.Array | None, starts: jax.Array | None, t: int, length: int) -> jax.Array:
    """The rows of the chunks of `t` steps, `b h l 8 c`, of size 1 for a batch or heads that share them.

    `log_decay` is `b h t 1`, `None` without decay or with decays per key channel; `starts` is `b t`. Where they end
    before `t`, steps neither decay nor forget.
    """
    decay = jnp.zeros((1, 1, t), jnp.float32) if log_decay is None else jnp.maximum(log_decay[..., 0], LEAST_LOG_DECAY)
    forgets = jnp.zeros((1, 1, t), bool) if starts is None else starts[:, None]
    decay, forgets = _cut(decay, t, length), _cut(forgets, t, length)
    runs = jnp.cumsum(forgets, axis=-1, dtype=jnp.int32)
    coarse = jnp.round(decay * 1024) / 1024
    since, until = chunks.since(decay[..., None])[..., 0], chunks.until(decay[..., None])[..., 0]
    total = jnp.sum(decay, axis=-1, keepdims=True)
    last = runs[..., -1:]
    found = (
        chunks.since(coarse[..., None])[..., 0],
        chunks.since((decay - coarse)[..., None])[..., 0],
        jnp.where(runs == 0, jnp.exp(since), 0),
        jnp.where(runs == last, jnp.exp(until), 0),
        jnp.where(last == 0, jnp.exp(total), 0),
        runs,
        ~forgets,
        0.0,
    )
    shape = jnp.broadcast_shapes(decay.shape, forgets.shape)
    return jnp.stack([jnp.broadcast_to(jnp.asarray(row, jnp.float32), shape) for row in found], axis=3)


def _cut(array: jax.Array, t: int, length: int) -> jax.Array:
    """`b h t` as `b h l c`."""
    b, h, given = array.shape
    return jnp.pad(array, ((0, 0), (0, 0), (0, t - given))).reshape(b, h, t // length, length)
