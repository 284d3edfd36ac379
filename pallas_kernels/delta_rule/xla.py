"""The portable form of `delta_rule`: groups of chunks in order, with all that does not depend on the state at once."""

import jax
import jax.numpy as jnp

from pallas_kernels import target, tiling
from pallas_kernels.delta_rule import erasing
from pallas_kernels.delta_rule.chunk import Chunk, weights
from pallas_kernels.diagonal_low_rank.xla import step
from pallas_kernels.matrix_state import vector
from pallas_kernels.matrix_state.chunks import Arrays, cut, cut_one, in_groups, join, stored
from pallas_kernels.matrix_state.products import Form
from pallas_kernels.matrix_state.solve import Weights, read


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    log_decay: jax.Array | None,
    state: jax.Array,
    starts: jax.Array | None,
    scale: float,
    erase: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.delta_rule`."""
    b, t = q.shape[:2]
    if t == 0:
        return jnp.zeros((b, 0, state.shape[1], v.shape[3]), state.dtype), state
    if t == 1:
        keys = k if erase is None else erase
        return erasing.delta_rule(q, k, v, beta, log_decay, state, starts, scale, keys, run=step)
    _, h, *kv = state.shape
    tile = tiling.delta_rule(b, t, h * max(kv), target.current().platform)
    if log_decay is not None:
        log_decay = jnp.broadcast_to(log_decay, (b, t, *log_decay.shape[2:]))
        if starts is not None:
            log_decay = jnp.where(starts[:, :, None, None], 0, log_decay)

    def group(state: jax.Array, arrays: Arrays, starts: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        dtype = state.dtype
        q, k, v, others, log_decay = arrays
        chunks = cut(scale * q.astype(dtype), k, v, log_decay, starts, tile.steps)
        others = tuple(cut_one(array, tile.steps) for array in others)
        # Chunks first, as the loop over them reads them.
        chunks, others = stored(jax.tree.map(lambda array: array.swapaxes(0, 1), (chunks, others)))
        q, k, v, beta, *erase = (
            jnp.repeat(array.astype(dtype), h // array.shape[2], axis=2) for array in (*chunks[:3], *others)
        )
        chunk = Chunk(q, k, beta, chunks.log_decay, chunks.runs, *erase)
        among, erased, q, k, writes, factor = weights(chunk, Form(dtype, dtype), vector.found)
        # What is written is `beta (v - S^T k)`.
        o, final = read(Weights(among, -erased, q, -beta * k, writes, factor), beta * v, state)
        return final, join(o.swapaxes(0, 1))

    others = (beta[..., None],) if erase is None else (beta[..., None], erase)
    return in_groups(group, tile, state, (q, k, v, others, log_decay), starts)
