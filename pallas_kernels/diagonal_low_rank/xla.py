"""The portable form of `diagonal_low_rank`: groups of chunks in order, all that does not wait for the state at once."""

from typing import NamedTuple

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
    laid,
    over_chunks,
    remembered,
    remembers,
    stored,
    transposed,
)
from pallas_kernels.matrix_state.inverse import inverse
from pallas_kernels.matrix_state.places import steps_after, steps_before
from pallas_kernels.matrix_state.products import EXACT


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
        # Chunks first, as the loop over them reads them.
        chunks, keys = stored(jax.tree.map(lambda array: array.swapaxes(0, 1), (chunks, keys)))
        q, a, v, *keys = (jnp.repeat(x.astype(dtype), h // x.shape[2], axis=2) for x in (*chunks[:3], *keys))
        does = _weights(Chunk(scale * q, a, tuple(keys), chunks.log_decay, chunks.runs))
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


class _Weights(NamedTuple):
    """What the steps of chunks do. Of j keys the weights are side by side, `j c`, and the keys one after the other.

    Attributes:
      among: what a step reads for its query of what a step writes under each of the keys, `l b h c (j c)`.
      earlier: what it reads for its `a` of what an earlier step writes, `l b h c (j c)`.
      reads: what the queries, and after them each `a`, read of the state before the chunk, `l b h (2 c) k`.
      writes: the keys under which steps are in the state after the chunk, `l b h (j c) k`.
      factor: what the state before the chunk counts in it, `l b h 1 k` or `... 1 1`.
    """

    among: jax.Array
    earlier: jax.Array
    reads: jax.Array
    writes: jax.Array
    factor: jax.Array


def _weights(chunk: Chunk) -> _Weights:
    """The weights of chunks, as `chunk.weights` has them; their length is a power of two."""
    number = len(chunk.keys)
    products, reads, writes = _unmasked(chunk)
    by_q, by_a = jnp.split(products, 2, axis=3)
    seen, past = (_beside(*[which] * number) for which in read_by_q_and_a(chunk))
    read, held = remembers(chunk.runs), remembered(chunk.runs)
    return _Weights(
        among=jnp.where(seen, by_q, 0),
        earlier=jnp.where(past, by_a, 0),
        reads=reads if read is None else jnp.where(_stacked(read, read), reads, 0),
        writes=writes if held is None else jnp.where(_stacked(*[held] * number), writes, 0),
        factor=factor(chunk),
    )


def _unmasked(chunk: Chunk) -> vector.Stacked:
    q, a, keys, log_decay, runs = chunk
    if log_decay is not None and log_decay.shape[-1] > 1:
        return vector.stacked(vector.Steps((q,), (a,), keys, log_decay, runs))
    reads, writes = _stacked(q, a), _stacked(*keys)
    products = reads @ writes.swapaxes(3, 4)
    if log_decay is None:
        return vector.Stacked(products, reads, writes)
    now, before = (_between(which, chunk) for which in (~steps_after(q), steps_before(q)))
    reach, reach_before, later = (
        jnp.exp(vector.summed(which, log_decay, runs)) for which in (~steps_after(q), steps_before(q), steps_after(q))
    )
    return vector.Stacked(
        products=products * _stacked(*(_beside(*[decay] * len(keys)) for decay in (now, before))),
        reads=_stacked(q * reach, a * reach_before),
        writes=_stacked(*(key * later for key in keys)),
    )


def _between(which: jax.Array, chunk: Chunk) -> jax.Array:
    """What decays of one number a step leave between steps, over `which` of those up to one and after another, `c c`.

    A sum for every pair of steps, so that small sums stay exact beside large ones.
    """
    after = jnp.where(steps_before(chunk.q), chunk.log_decay, 0)
    return jnp.exp(jnp.matmul(jnp.broadcast_to(which.astype(after.dtype), after.shape), after, precision=EXACT))


class _Found(NamedTuple):
    """What the backward pass needs besides weights: the inverse, `l b h c c`, the values written under the first keys
    and, where there are two, those of steps, `l b h (j c) v`, and the state before each chunk, `l b h k v`.
    """

    solved: jax.Array
    values: jax.Array
    before: jax.Array


@jax.custom_vjp
def _read(does: _Weights, v: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The outputs of steps, `l b h c v`, and the state after the last chunk, `b h k v`; see `chunk`."""
    return _save(does, v, state)[0]


Saved = tuple[_Weights, jax.Array, _Found]


def _save(does: _Weights, v: jax.Array, state: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Saved]:
    c = v.shape[3]
    solved = inverse(-does.earlier[..., :c], target.current().platform)
    own = () if does.writes.shape[3] == c else (v,)
    given = does.earlier[..., c:] @ v if own else v

    def chunk(state: jax.Array, inputs: tuple) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        solved, given, reads, writes, factor, *own = inputs
        by_q, by_a = jnp.split(reads @ state, 2, axis=2)
        values = _stacked(solved @ (given + by_a), *own)
        return factor * state + writes @ values, (state, values, by_q)

    by_chunk = solved, given, does.reads, laid(does.writes.swapaxes(3, 4)), does.factor.swapaxes(3, 4), *own
    final, (before, values, o) = over_chunks(chunk, state, by_chunk)
    return (o + does.among @ values, final), (does, v, _Found(solved, values, before))


def _pull(saved: Saved, gradients: tuple[jax.Array, jax.Array]) -> tuple[_Weights, jax.Array, jax.Array]:
    """Gradients of values and states are transposed, `v c` and `v k`, as in `delta_rule.xla`.

    With U the gradient of what `solved` multiplies, that of the weights that are inverted is `U values^T`.
    """
    does, v, (solved, values, before) = saved
    do, dfinal = gradients
    do, c = transposed(do), v.shape[3]
    two = does.writes.shape[3] > c

    def chunk(dafter: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        do, dvalues, solved, writes, reads, factor = inputs
        both = _beside(do, (dvalues + dafter @ writes) @ solved)
        return factor * dafter + both @ reads, (dafter, both)

    by_chunk = (
        do,
        do @ does.among[..., :c],
        solved,
        laid(does.writes[..., :c, :].swapaxes(3, 4)),
        does.reads,
        does.factor,
    )
    dstate, (dafter, both) = over_chunks(chunk, dfinal.swapaxes(2, 3), by_chunk, reverse=True)
    pairs = transposed(values @ both)
    among, earlier = jnp.split(pairs, 2, axis=3)
    dv = dsolved = both[..., c:]
    if two:
        dv = (
            dsolved @ does.earlier[..., c:] + do @ does.among[..., c:] + dafter @ does.writes[..., c:, :].swapaxes(3, 4)
        )
    shared = tuple(axis for axis, size in enumerate(does.factor.shape) if size == 1)
    pulled = _Weights(
        among=among,
        earlier=earlier,
        reads=transposed(before @ both),
        writes=values @ dafter,
        factor=jnp.sum(transposed(before) * dafter, axis=shared, keepdims=True),
    )
    return pulled, transposed(dv), dstate.swapaxes(2, 3)


_read.defvjp(_save, _pull)


def _stacked(*arrays: jax.Array) -> jax.Array:
    """`... c k`, one after the other."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-2)


def _beside(*arrays: jax.Array) -> jax.Array:
    """`... c k`, side by side."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-1)
