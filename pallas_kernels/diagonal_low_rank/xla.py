"""The portable form of `diagonal_low_rank`: groups of chunks in order, all that does not wait for the state at once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import target, tiling
from pallas_kernels.diagonal_low_rank.chunk import Chunk, Weights, weights
from pallas_kernels.matrix_state.chunks import Arrays, cut, cut_one, in_groups, join, transposed
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
        chunks = cut(q, a, v, log_decay, starts, tile.steps)
        keys = tuple(cut_one(key, tile.steps) for key in keys)
        # Chunks first, as the loop over them reads them; the barrier keeps the compiler from laying the same array out
        # anew for every use.
        chunks, keys = jax.lax.optimization_barrier(jax.tree.map(lambda array: array.swapaxes(0, 1), (chunks, keys)))
        q, a, v, *keys = (jnp.repeat(x.astype(dtype), h // x.shape[2], axis=2) for x in (*chunks[:3], *keys))
        does = weights(Chunk(scale * q, a, tuple(keys), chunks.log_decay, chunks.runs))
        o, final = _read(does, v, state)
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


class _Found(NamedTuple):
    """What the backward pass needs besides weights: the inverse, `l b h c c`, what each `a` reads of the state after
    it, `l b h c k`, the values written under the first keys, `l b h c v`, and the state before each chunk, `l b h k v`.
    """

    solved: jax.Array
    reads: jax.Array
    values: jax.Array
    before: jax.Array


@jax.custom_vjp
def _read(does: Weights, v: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The outputs of steps, `l b h c v`, and the state after the last chunk, `b h k v`; see `chunk`."""
    return _save(does, v, state)[0]


Saved = tuple[Weights, jax.Array, _Found]


def _save(does: Weights, v: jax.Array, state: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Saved]:
    solved = inverse(-does.earlier[0], target.current().platform)
    reads = solved @ does.a
    written = solved @ (v if len(does.writes) == 1 else does.earlier[1] @ v)

    def chunk(state: jax.Array, inputs: tuple) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        reads, written, writes, factor, *v = inputs
        values = written + reads @ state
        return factor * state + writes @ _stacked(values, *v), (state, values)

    own = [] if len(does.writes) == 1 else [v]
    by_chunk = reads, written, _stacked(*does.writes).swapaxes(3, 4), does.factor.swapaxes(3, 4), *own
    final, (before, values) = jax.lax.scan(chunk, state, by_chunk)
    o = does.q @ before + jnp.concatenate(does.among, axis=4) @ _stacked(values, *own)
    return (o, final), (does, v, _Found(solved, reads, values, before))


def _pull(saved: Saved, gradients: tuple[jax.Array, jax.Array]) -> tuple[Weights, jax.Array, jax.Array]:
    """Gradients of values and states are transposed, `v c` and `v k`, as in `delta_rule.xla`.

    With U the gradient of what `solved` multiplies, that of the weights that are inverted is `U values^T`.
    """
    does, v, (solved, reads, values, before) = saved
    do, dfinal = gradients
    do = transposed(do)
    own = [] if len(does.writes) == 1 else [v]

    def chunk(dafter: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        dvalues, dbefore, writes, reads, factor = inputs
        dvalues += dafter @ writes
        return factor * dafter + dbefore + dvalues @ reads, (dafter, dvalues)

    by_chunk = do @ does.among[0], do @ does.q, does.writes[0].swapaxes(3, 4), reads, does.factor
    dstate, (dafter, dvalues) = jax.lax.scan(chunk, dfinal.swapaxes(2, 3), by_chunk, reverse=True)
    dsolved = dvalues @ solved
    both, written = jnp.concatenate([do, dsolved], axis=4), _stacked(values, *own)
    pairs, writes = transposed(written @ both), written @ dafter
    of_states = transposed(before @ both)
    dv = dsolved
    if own:
        dv = dsolved @ does.earlier[1] + do @ does.among[1] + dafter @ does.writes[1].swapaxes(3, 4)
    shared = tuple(axis for axis, size in enumerate(does.factor.shape) if size == 1)
    number = len(does.writes)
    among, earlier = (jnp.split(rows, number, axis=4) for rows in jnp.split(pairs, 2, axis=3))
    q, a = jnp.split(of_states, 2, axis=3)
    pulled = Weights(
        among=among,
        earlier=earlier,
        q=q,
        a=a,
        writes=jnp.split(writes, number, axis=3),
        factor=jnp.sum(transposed(before) * dafter, axis=shared, keepdims=True),
    )
    return pulled, transposed(dv), dstate.swapaxes(2, 3)


_read.defvjp(_save, _pull)


def _stacked(*arrays: jax.Array) -> jax.Array:
    """`... c k`, one after the other."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-2)
