"""The portable form of `delta_rule`: groups of chunks in order, with all that does not depend on the state at once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import target, tiling
from pallas_kernels.delta_rule import erasing
from pallas_kernels.delta_rule.chunk import Chunk, Weights, weights
from pallas_kernels.diagonal_low_rank.xla import step
from pallas_kernels.matrix_state import vector
from pallas_kernels.matrix_state.chunks import Arrays, cut, cut_one, in_groups, join, over_chunks, stored, transposed
from pallas_kernels.matrix_state.inverse import inverse
from pallas_kernels.matrix_state.products import Form


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
        chunks = cut(q, k, v, log_decay, starts, tile.steps)
        others = tuple(cut_one(array, tile.steps) for array in others)
        # Chunks first, as the loop over them reads them.
        chunks, others = stored(jax.tree.map(lambda array: array.swapaxes(0, 1), (chunks, others)))
        q, k, v, beta, *erase = (
            jnp.repeat(array.astype(dtype), h // array.shape[2], axis=2) for array in (*chunks[:3], *others)
        )
        chunk = Chunk(scale * q, k, beta, chunks.log_decay, chunks.runs, *erase)
        does = weights(chunk, Form(dtype, dtype), vector.found)
        o, final = _read(does, beta, v, state)
        return final, join(o.swapaxes(0, 1))

    others = (beta[..., None],) if erase is None else (beta[..., None], erase)
    return in_groups(group, tile, state, (q, k, v, others, log_decay), starts)


class _Found(NamedTuple):
    """What the backward pass needs besides weights: the inverse, `l b h c c`, the reads of the state by keys after the
    inverse, `l b h c k`, the values written, `l b h c v`, and the state before each chunk, `l b h k v`.
    """

    solved: jax.Array
    read: jax.Array
    values: jax.Array
    before: jax.Array


@jax.custom_vjp
def _read(does: Weights, beta: jax.Array, v: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The outputs of steps, `l b h c v`, and the state after the last chunk, `b h k v`.

    The values written are `R = X beta (V - K S)`, see `chunk`; the outputs are `O = Q S + A R`.
    """
    return _save(does, beta, v, state)[0]


def _save(
    does: Weights, beta: jax.Array, v: jax.Array, state: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[Weights, jax.Array, jax.Array, _Found]]:
    solved = inverse(does.erased, target.current().platform)
    written, read = solved @ (beta * v), solved @ (beta * does.k)

    def chunk(state: jax.Array, does: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        written, read, writes, factor = does
        values = written - read @ state
        return factor * state + writes @ values, (state, values)

    by_chunk = written, read, does.writes.swapaxes(3, 4), does.factor.swapaxes(3, 4)
    final, (before, values) = over_chunks(chunk, state, by_chunk)
    o = does.q @ before + does.among @ values
    return (o, final), (does, beta, v, _Found(solved, read, values, before))


def _pull(
    saved: tuple[Weights, jax.Array, jax.Array, _Found], gradients: tuple[jax.Array, jax.Array]
) -> tuple[Weights, jax.Array, jax.Array, jax.Array]:
    """Gradients of values and states are transposed, `v c` and `v k`, so that no product sums over the rows of both
    factors, which is slow on a CPU.

    With U the gradient of `beta (V - K S)`, that of `erased` is `-U R^T`, for `X^{-1} R = beta (V - K S)`.
    """
    does, beta, v, (solved, read, values, before) = saved
    do, dfinal = gradients
    do = transposed(do)

    def chunk(dafter: jax.Array, does: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        dvalues, dstate, writes, read, factor = does
        dvalues += dafter @ writes.swapaxes(2, 3)
        return factor * dafter + dstate - dvalues @ read, (dafter, dvalues)

    by_chunk = do @ does.among, do @ does.q, does.writes, read, does.factor
    dstate, (dafter, dvalues) = over_chunks(chunk, dfinal.swapaxes(2, 3), by_chunk, reverse=True)
    dmissing = dvalues @ solved
    dread, dmissing_rows = -transposed(before @ dmissing), transposed(dmissing)
    shared = tuple(axis for axis, size in enumerate(does.factor.shape) if size == 1)
    pulled = Weights(
        among=transposed(values @ do),
        erased=-transposed(values @ dmissing),
        q=transposed(before @ do),
        k=beta * dread,
        writes=values @ dafter,
        factor=jnp.sum(transposed(before) * dafter, axis=shared, keepdims=True),
    )
    dbeta = jnp.sum(dmissing_rows * v, axis=4, keepdims=True) + jnp.sum(dread * does.k, axis=4, keepdims=True)
    return pulled, dbeta, beta * dmissing_rows, dstate.swapaxes(2, 3)


_read.defvjp(_save, _pull)
