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


def clipped(log_decay: jax.Array | None, dtype: jnp.dtype) -> jax.Array | None:
    """Log decays, of which those to be summed in float32 are at least `LEAST_LOG_DECAY`; float64 needs no bound.

    Beside one of -1e9 the others of a chunk would be lost in its sums. One that is clipped has no gradient, as
    `exp(-120)`, which multiplies it, is zero in float32.
    """
    return log_decay if log_decay is None or dtype == jnp.float64 else jnp.maximum(log_decay, LEAST_LOG_DECAY)


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


def pull(numbers: jax.Array, reads: jax.Array, writes: jax.Array) -> jax.Array:
    """What the steps of its chunk give to the gradient of the log decay of each, `b h l c`.

    The decay of step t is in every score of a query at or after t and a key before t, in the reads of the state by
    queries from t on, and in the writes of keys before t. `reads` and `writes`, `b h 2 l c`, are `q dq` and `k dk` of
    scores and of the state.
    """
    run, c = numbers[..., RUN, :, None], numbers.shape[-1]
    later = jnp.triu(jnp.ones((1, 1, 1, c, c), bool))
    of_run = later & (run == run.swapaxes(-1, -2))
    within = jnp.where(of_run, (reads[:, :, 0] - writes[:, :, 0])[..., None, :], 0)
    across = jnp.where(later, reads[:, :, 1][..., None, :], writes[:, :, 1][..., None, :])
    return jnp.sum(within + across, axis=-1)


def gradients(numbers: jax.Array, sums: jax.Array, held: jax.Array) -> jax.Array:
    """The gradients of the log decays of `rows`, `b h t`.

    `sums`, `b h l c`, are what steps of their chunk give (see `pull`), and `held`, `b h l`, is the product of the state
    before a chunk and the gradient of that after it.
    """
    sums = sums + numbers[..., FACTOR, :] * held[..., None]
    return (sums * numbers[..., KEPT, :]).reshape(*sums.shape[:2], -1)


def _cut(array: jax.Array, t: int, length: int) -> jax.Array:
    """`b h t` as `b h l c`."""
    b, h, given = array.shape
    return jnp.pad(array, ((0, 0), (0, 0), (0, t - given))).reshape(b, h, t // length, length)
