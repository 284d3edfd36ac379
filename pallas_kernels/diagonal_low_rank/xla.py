"""The portable form of `diagonal_low_rank`: groups of chunks in order, all that does not wait for the state at once."""

import jax
import jax.numpy as jnp

from pallas_kernels import target, tiling
from pallas_kernels.diagonal_low_rank.chunk import Chunk, weights
from pallas_kernels.matrix_state.chunks import Arrays, cut, in_groups, join, transposed
from pallas_kernels.matrix_state.inverse import inverse


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
        return _step(q, k, v, a, b, log_decay, state, starts, scale)
    _, h, *kv = state.shape
    tile = tiling.delta_rule(rows, t, h * max(kv), target.current().platform)
    if log_decay is not None:
        log_decay = jnp.broadcast_to(log_decay, (rows, t, *log_decay.shape[2:]))
        if starts is not None:
            log_decay = jnp.where(starts[:, :, None, None], 0, log_decay)
    keys = (k,) if b is None else (b, k)

    def group(state: jax.Array, arrays: Arrays, starts: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        dtype = state.dtype
        q, a, v, keys, log_decay = arrays
        chunks = cut(q, a, v, log_decay, starts, tile.steps)
        keys = tuple(cut(key, key, key, None, None, tile.steps).k for key in keys)
        # Chunks first, as the loop over them reads them; the barrier keeps the compiler from laying the same array out
        # anew for every use.
        chunks, keys = jax.lax.optimization_barrier(jax.tree.map(lambda array: array.swapaxes(0, 1), (chunks, keys)))
        q, a, v, *keys = (jnp.repeat(x.astype(dtype), h // x.shape[2], axis=2) for x in (*chunks[:3], *keys))
        o, final = _read(Chunk(scale * q, a, tuple(keys), chunks.log_decay, chunks.runs), v, state)
        return final, join(o.swapaxes(0, 1))

    return in_groups(group, tile, state, (q, a, v, keys, log_decay), starts)


def _step(
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
    both = jnp.einsum('bhik,bhkv->bhiv', jnp.stack([a, decay * q], axis=2), state)
    read, o = both[:, :, 0], both[:, :, 1]
    pairs = [(k, v), (others[0], read)] if others else [(k, v + read)]
    pairs = jax.lax.optimization_barrier(pairs)
    final = decay[..., None] * state
    for key, value in pairs:
        o = o + jnp.sum(key * q, axis=-1, keepdims=True) * value
        final = final + key[..., None] * value[:, :, None]
    return o[:, None], final


def _read(chunk: Chunk, v: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What steps read, `l b h c v`, and the state after the last chunk; see `chunk`."""
    does = weights(chunk)
    solved = inverse(-does.earlier[0], target.current().platform)
    reads = solved @ does.a
    if len(chunk.keys) == 1:
        values, before, final = _sweep(reads, does.writes[0], does.factor, solved @ v, None, state)
        return does.q @ before + does.among[0] @ values, final
    values, before, final = _sweep(
        reads, does.writes[0], does.factor, solved @ (does.earlier[1] @ v), (does.writes[1], v), state
    )
    return does.q @ before + does.among[0] @ values + does.among[1] @ v, final


More = tuple[jax.Array, jax.Array] | None
Swept = tuple[jax.Array, jax.Array, jax.Array]


@jax.custom_vjp
def _sweep(
    reads: jax.Array, writes: jax.Array, factor: jax.Array, written: jax.Array, more: More, state: jax.Array
) -> Swept:
    """The values of each chunk, `l b h c v`, the states before it, `l b h k v`, and the last one, `b h k v`.

    `values = written + reads S`, `S' = factor S + writes^T values`, and `+ keys^T v` for `more` keys and values. Keys
    and `reads` are `l b h c k`, `written` is like the values, `factor` is `l b h 1 k` or `... 1 1`.
    """
    return _save(reads, writes, factor, written, more, state)[0]


def _save(
    reads: jax.Array, writes: jax.Array, factor: jax.Array, written: jax.Array, more: More, state: jax.Array
) -> tuple[Swept, tuple]:
    def chunk(state: jax.Array, inputs: tuple) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        reads, writes, factor, written, more = inputs
        values = written + reads @ state
        after = factor * state + writes @ values
        return after if more is None else after + more[0] @ more[1], (values, state)

    columns = None if more is None else (more[0].swapaxes(3, 4), more[1])
    by_chunk = reads, writes.swapaxes(3, 4), factor.swapaxes(3, 4), written, columns
    final, (values, before) = jax.lax.scan(chunk, state, by_chunk)
    return (values, before, final), (reads, writes, factor, more, values, before)


def _pull(saved: tuple, gradients: Swept) -> tuple:
    """Gradients of values and states are kept transposed, as in `delta_rule.xla`."""
    reads, writes, factor, more, values, before = saved
    dvalues, dbefore, dfinal = gradients

    def chunk(dafter: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        dvalues, dbefore, writes, reads, factor = inputs
        dvalues += dafter @ writes
        return factor * dafter + dbefore + dvalues @ reads, (dafter, dvalues)

    by_chunk = transposed(dvalues), transposed(dbefore), writes.swapaxes(3, 4), reads, factor
    dstate, (dafter, dvalues) = jax.lax.scan(chunk, dfinal.swapaxes(2, 3), by_chunk, reverse=True)
    dmore = None
    if more is not None:
        keys, v = more
        dmore = v @ dafter, keys @ transposed(dafter)
    shared = tuple(axis for axis, size in enumerate(factor.shape) if size == 1)
    return (
        transposed(before @ dvalues),
        values @ dafter,
        jnp.sum(transposed(before) * dafter, axis=shared, keepdims=True),
        transposed(dvalues),
        dmore,
        dstate.swapaxes(2, 3),
    )


_sweep.defvjp(_save, _pull)
