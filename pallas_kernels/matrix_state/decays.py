"""What the steps of a chunk make of decays that are one number a step, and of documents: a few numbers a step.

Pallas forms are given them ready, float32, eight rows `c` long for every chunk.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state import chunks

COARSE, FINE, REACH, WRITE, FACTOR, RUN, KEPT = range(7)
"""The rows.

COARSE and FINE add up to the log decays summed from the start of the chunk to each step; differences of the coarse
parts are exact. REACH is what the state before the chunk counts at a step, WRITE what a step counts in the state after
the chunk, FACTOR what the state before counts there. RUN is how often the past was forgotten up to a step. KEPT is 0
where a step forgets the past and 1 elsewhere.
"""

COUNT = 8
"""Rows there are; the last is filled up."""

DARKEST = -120.0
"""Log decays below count as this one, whose exponential is zero in float32 as well; sums of them stay exact."""


def rows(log_decay: jax.Array | None, starts: jax.Array | None, t: int, length: int) -> jax.Array:
    """The rows of the chunks of `t` steps, `b h l 8 c`, of size 1 for a batch or heads that share them.

    `log_decay` is `b h t 1`, `None` where it is none or one for every key channel; `starts` is `b t`. Where they end
    before `t`, steps neither decay nor forget.
    """
    decay = jnp.zeros((1, 1, t), jnp.float32) if log_decay is None else jnp.maximum(log_decay[..., 0], DARKEST)
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
