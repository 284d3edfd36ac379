"""The portable form of `diagonal_low_rank`: groups of chunks in order, all that does not wait for the state at once."""

import jax
import jax.numpy as jnp

from pallas_kernels import target, tiling
from pallas_kernels.diagonal_low_rank.chunk import Chunk, factor, read_by_q_and_a
from pallas_kernels.matrix_state import vector
from pallas_kernels.matrix_state.chunks import (
    Arrays,
    cut,
    cut_one,
    in_groups,
    join,
    keep,
    remembered,
    remembers,
    stored,
)
from pallas_kernels.matrix_state.places import steps_after, steps_before
from pallas_kernels.matrix_state.products import EXACT
from pallas_kernels.matrix_state.solve import Weights, beside, read, stacked


def diagonal_low_rank(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array | None,
    log_decay: jax.Array | None,
    state: jax.Array,
    starts: jax.Array | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.diagonal_low_rank`."""
    rows, t = q.shape[:2]
    if t == 0:
        return jnp.zeros((rows, 0, state.shape[1], v.shape[3]), state.dtype), state
    if t == 1:
        return step(q, k, v, a, b, log_decay, state, starts, scale)
    _, h, *kv = state.shape
    if log_decay is not None:
        log_decay = jnp.broadcast_to(log_decay, (rows, t, *log_decay.shape[2:]))
        if starts is not None:
            log_decay = jnp.where(starts[:, :, None, None], 0, log_decay)
    keys = (k,) if b is None else (b, k)
    # Two keys have twice the weights of a step.
    tile = tiling.delta_rule(rows, t, len(keys) * h * max(kv), target.current().platform)

    def group(state: jax.Array, arrays: Arrays, starts: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        dtype = state.dtype
        q, a, v, keys, log_decay = arrays
        chunks = cut(scale * q.astype(dtype), a, v, log_decay, starts, tile.steps)
        keys = tuple(cut_one(key, tile.steps) for key in keys)
        # Chunks first, as the loop over them reads them.
        chunks, keys = stored(jax.tree.map(lambda array: array.swapaxes(0, 1), (chunks, keys)))
        q, a, v, *keys = (jnp.repeat(x.astype(dtype), h // x.shape[2], axis=2) for x in (*chunks[:3], *keys))
        does = _weights(Chunk(q, a, tuple(keys), chunks.log_decay, chunks.runs))
        o, final = read(does, v, state)
        return final, join(o.swapaxes(0, 1))

    return in_groups(group, tile, state, (q, a, v, keys, log_decay), starts)


def step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array | None,
    log_decay: jax.Array | None,
    state: jax.Array,
    starts: jax.Array | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """A step alone: what `a` and what the query reads, `S_{t-1}^T a` and `S_{t-1}^T diag(d) q`, are one product.

    The state is read by it, read once more, and written. The output is the latter, `+ (b q) S_{t-1}^T a + (k q) v`.
    A state that stays in the caches of a CPU is read once more, by the query: products of two rows take longer there.
    """
    heads = state.shape[1]
    q, k, v, a, *others = (
        jnp.repeat(array[:, 0].astype(state.dtype), heads // array.shape[2], axis=1)
        for array in (q, k, v, a, *(() if b is None else (b,)))
    )
    decay = jnp.ones((1, 1, 1), state.dtype) if log_decay is None else jnp.exp(log_decay[:, 0])
    if starts is not None:
        decay, a = (jnp.where(starts[:, :1, None], 0, array) for array in (decay, a))
    # The barriers keep what vectors are made from out of the loop over the state, which would make them for every row.
    q, k, v, a, others, decay = jax.lax.optimization_barrier((scale * q, k, v, a, others, decay))
    once_more = target.current().platform == 'cpu' and state.nbytes <= tiling.CPU_CACHES
    rows = (a,) if once_more else (a, decay * q)
    read, *before = jnp.unstack(jnp.einsum('bhik,bhkv->bhiv', jnp.stack(rows, axis=2), state), axis=2)
    pairs = [(k, v), (others[0], read)] if others else [(k, v + read)]
    pairs = jax.lax.optimization_barrier(pairs)
    final = decay[..., None] * state
    for key, value in pairs:
        final = final + key[..., None] * value[:, :, None]
    if once_more:
        return jnp.einsum('bhk,bhkv->bhv', q, final)[:, None], final
    o = before[0]
    for key, value in pairs:
        o = o + jnp.sum(key * q, axis=-1, keepdims=True) * value
    return o[:, None], final


def _weights(chunk: Chunk) -> Weights:
    """The weights of chunks; their length is a power of two."""
    number = len(chunk.keys)
    products, reads, writes = _unmasked(chunk)
    (by_q, by_a), (q, a) = (jnp.split(x, 2, axis=3) for x in (products, reads))
    seen, past = (beside(*[which] * number) for which in read_by_q_and_a(chunk))
    before, after = remembers(chunk.runs), remembered(chunk.runs)
    return Weights(
        among=jnp.where(seen, by_q, 0),
        earlier=jnp.where(past, by_a, 0),
        q=keep(before, q),
        needs=keep(before, a),
        writes=keep(None if after is None else stacked(*[after] * number), writes),
        factor=factor(chunk),
    )


def _unmasked(chunk: Chunk) -> vector.Stacked:
    q, a, keys, log_decay, runs = chunk
    if log_decay is not None and log_decay.shape[-1] > 1:
        return vector.stacked(vector.Steps((q,), (a,), keys, log_decay, runs))
    reads, writes = stacked(q, a), stacked(*keys)
    products = reads @ writes.swapaxes(3, 4)
    if log_decay is None:
        return vector.Stacked(products, reads, writes)
    now, before = (_between(which, log_decay) for which in (~steps_after(q), steps_before(q)))
    reach, reach_before, later = (
        jnp.exp(vector.summed(which, log_decay, runs)) for which in (~steps_after(q), steps_before(q), steps_after(q))
    )
    return vector.Stacked(
        products=products * stacked(*(beside(*[decay] * len(keys)) for decay in (now, before))),
        reads=stacked(q * reach, a * reach_before),
        writes=stacked(*(key * later for key in keys)),
    )


def _between(which: jax.Array, log_decay: jax.Array) -> jax.Array:
    """What decays of one number a step leave between steps, over `which` of those up to one and after another, `c c`.

    A sum for every pair of steps, so that small sums stay exact beside large ones.
    """
    after = jnp.where(steps_before(log_decay), log_decay, 0)
    return jnp.exp(jnp.matmul(jnp.broadcast_to(which.astype(after.dtype), after.shape), after, precision=EXACT))
