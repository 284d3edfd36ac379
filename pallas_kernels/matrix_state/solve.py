"""Chunks whose steps read what earlier steps of the same chunk wrote, one chunk after the other, in the portable form.

With S the state before a chunk, its steps write `R = (I - E)^{-1} (V + A S)`, where E weighs what they read of earlier
ones. Queries read `O = Q S + W R`, and the state after the chunk is `f S + K^T R`. Where values V are written under
keys of their own, R is without them, V in R is what steps read of those of earlier ones, and both are read and written.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import target
from pallas_kernels.matrix_state.chunks import laid, over_chunks, transposed
from pallas_kernels.matrix_state.inverse import inverse


class Weights(NamedTuple):
    """What the steps of chunks do. Of j keys the weights are side by side, `j c`, and the keys one after the other.

    Attributes:
      among: what a step reads for its query of what a step writes under each of the keys, W: `l b h c (j c)`.
      earlier: what it reads of what an earlier step writes, for what it writes itself, E: `l b h c (j c)`.
      q: what it reads of the state before the chunk for its query, Q: `l b h c k`.
      needs: what it reads of it for what it writes, A: `l b h c k`.
      writes: the keys under which steps are in the state after the chunk, `l b h (j c) k`.
      factor: what the state before the chunk counts in it, `l b h 1 k` or `... 1 1`.
    """

    among: jax.Array
    earlier: jax.Array
    q: jax.Array
    needs: jax.Array
    writes: jax.Array
    factor: jax.Array


class _Found(NamedTuple):
    """What the backward pass needs besides weights: the inverse, `l b h c c`, what is written under each of the keys,
    `l b h (j c) v`, and the state before each chunk, `l b h k v`.
    """

    solved: jax.Array
    values: jax.Array
    before: jax.Array


@jax.custom_vjp
def read(does: Weights, v: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The outputs of steps, `l b h c v`, and the state after the last chunk, `b h k v`."""
    return _save(does, v, state)[0]


_Saved = tuple[Weights, jax.Array, _Found]


def _save(does: Weights, v: jax.Array, state: jax.Array) -> tuple[tuple[jax.Array, jax.Array], _Saved]:
    c = v.shape[3]
    solved = inverse(-does.earlier[..., :c], target.current().platform)
    two = does.writes.shape[3] > c
    given = does.earlier[..., c:] @ v if two else v
    # With one key both products take longer as one, by a tenth of both passes; with two the one is faster.
    reads = (stacked(does.q, does.needs),) if two else (does.q, does.needs)

    def chunk(state: jax.Array, inputs: tuple) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        solved, given, writes, factor, reads, own = inputs
        read = [x @ state for x in reads]
        by_q, needed = jnp.split(read[0], 2, axis=2) if two else read
        values = stacked(solved @ (given + needed), *own)
        return factor * state + writes @ values, (state, values, by_q)

    writes, own = laid(does.writes.swapaxes(3, 4)), (v,) if two else ()
    by_chunk = solved, given, writes, does.factor.swapaxes(3, 4), reads, own
    final, (before, values, o) = over_chunks(chunk, state, by_chunk)
    return (o + does.among @ values, final), (does, v, _Found(solved, values, before))


def _pull(saved: _Saved, gradients: tuple[jax.Array, jax.Array]) -> tuple[Weights, jax.Array, jax.Array]:
    """Gradients of values and states are transposed, `v c` and `v k`, so that no product sums over the rows of both
    factors, which is slow on a CPU.

    With U the gradient of `V + A S`, that of E is `U R^T`, for `(I - E) R = V + A S`.
    """
    does, v, (solved, values, before) = saved
    do, dfinal = gradients
    (do, dfinal), c = laid((do.swapaxes(3, 4), dfinal.swapaxes(2, 3))), v.shape[3]
    two = does.writes.shape[3] > c

    def chunk(dafter: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        dvalues, dbefore, writes, needed, factor = inputs
        dvalues += dafter @ writes
        return factor * dafter + dbefore + dvalues @ needed, (dafter, dvalues)

    writes = laid(does.writes[..., :c, :].swapaxes(3, 4))
    by_chunk = do @ does.among[..., :c], do @ does.q, writes, solved @ does.needs, does.factor
    dstate, (dafter, dvalues) = over_chunks(chunk, dfinal, by_chunk, reverse=True)
    both = beside(do, dvalues @ solved)
    among, earlier = jnp.split(transposed(values @ both), 2, axis=3)
    dv = dsolved = both[..., c:]
    if two:
        read = dsolved @ does.earlier[..., c:] + do @ does.among[..., c:]
        dv = read + dafter @ does.writes[..., c:, :].swapaxes(3, 4)
    q, needs = jnp.split(transposed(before @ both), 2, axis=3)
    shared = tuple(axis for axis, size in enumerate(does.factor.shape) if size == 1)
    pulled = Weights(
        among=among,
        earlier=earlier,
        q=q,
        needs=needs,
        writes=values @ dafter,
        factor=jnp.sum(transposed(before) * dafter, axis=shared, keepdims=True),
    )
    return pulled, transposed(dv), dstate.swapaxes(2, 3)


read.defvjp(_save, _pull)


def stacked(*arrays: jax.Array) -> jax.Array:
    """`... c k`, one after the other."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-2)


def beside(*arrays: jax.Array) -> jax.Array:
    """`... c k`, side by side."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-1)
