"""A call divided into groups of chunks of time."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels import target
from pallas_kernels.target import Target
from pallas_kernels.tiling import ChunkTile

MODERATE = 40.0
"""The largest decay from the middle of a chunk to its ends for which one product suffices.

The largest number is then `exp(2 * 40)`, far from overflow.
"""


WRITTEN_OUT = 8
"""Chunks of a loop that are written out on a CPU: mostly all of a group."""

Arrays = tuple[Any, ...]
"""Arrays `b t ...`, or `None`."""


def by_decay(
    moderate: Callable[..., jax.Array],
    at_once: Callable[..., Any],
    exact: Callable[..., Any],
    arguments: Arrays,
    *,
    rows: int,
) -> Any:
    """Returns `at_once(*arguments)` for the rows of a batch whose decays are moderate, `exact(*arguments)` for others.

    Every row is asked for itself, so that none depends on another, to the last bit; where all are moderate, as they
    nearly always are, they are computed together.

    Args:
      moderate: from the arguments to whether one product suffices for all of them, a scalar.
      at_once: what that product computes.
      exact: the same for any decays.
      arguments: trees of arrays, whose axis `rows` is the batch, or 1.
      rows: the axis of the batch, in the results too.
    """
    arguments = laid(arguments)
    batch = max(leaf.shape[rows] for leaf in jax.tree.leaves(arguments))

    def apart(*arguments: Any) -> Any:
        def row(i: jax.Array, found: Any) -> Any:
            own = jax.tree.map(lambda leaf: _row(leaf, jnp.minimum(i, leaf.shape[rows] - 1), rows), arguments)
            part = jax.lax.cond(moderate(*own), at_once, exact, *own)
            return jax.tree.map(lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, i, rows), found, part)

        # In place: rows that are stacked would be first in the layout of both branches, and copied for every use.
        like = jax.eval_shape(at_once, *arguments)
        return jax.lax.fori_loop(0, batch, row, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like))

    return jax.lax.cond(moderate(*arguments), at_once, exact if batch < 2 else apart, *arguments)


def laid[T](arrays: T) -> T:
    """Arrays in memory in the order of their axes, on a CPU, where every other order is copied for each use."""
    if target.current().platform != 'cpu':
        return arrays
    return jax.tree.map(lambda array: with_layout_constraint(array, Layout(tuple(range(array.ndim)))), arrays)


def stored[T](arrays: T) -> T:
    """The same, computed once for all uses: the barrier keeps the compiler from laying them out anew for each."""
    return jax.lax.optimization_barrier(laid(arrays))


def _row(array: jax.Array, i: jax.Array, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, i, 1, axis)


class Chunks(NamedTuple):
    """The arrays of a call; `l` counts chunks and `c` steps in a chunk. Dimensions of size 1 are constant.

    Attributes:
      q: scaled, `b l hq c k`.
      k: `b l hk c k`.
      v: `b l hv c v`.
      log_decay: `b l h c k`, 0 for padding; or `None`.
      runs: the number of document starts in the chunk up to each step, int32 `b l 1 c 1`; or `None`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array | None
    runs: jax.Array | None


Group = Callable[[jax.Array, Arrays, jax.Array | None], tuple[jax.Array, jax.Array]]
"""From the state before a group, its arrays and its starts: the state after it and its outputs, `b t h v`."""


def in_groups(
    group: Group, tile: ChunkTile, state: jax.Array, arrays: Arrays, starts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs `b t h v` and the last state of groups of chunks, one after the other.

    Arrays, `b t ...`, are read and written in place: copying them to another layout for the loop over groups would take
    longer than the products. The arrays and the state before each group are kept for the backward pass; all else is
    recomputed, a group at a time.
    """
    t = jax.tree.leaves(arrays)[0].shape[1]
    # Equal groups, so that there is little padding.
    size = -(-t // (-(-t // tile.group) * tile.steps)) * tile.steps

    def fill(array: jax.Array) -> jax.Array:
        return jnp.pad(array, ((0, 0), (0, -t % size)) + ((0, 0),) * (array.ndim - 2)) if t % size else array

    here = target.current()  # The differentiated function is traced later, perhaps in another context.
    o, final = _in_order(group, size, here, state, *jax.tree.map(fill, (arrays, starts)))
    return o[:, :t], final


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _in_order(
    group: Group, size: int, here: Target, state: jax.Array, arrays: Arrays, starts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    return _save_order(group, size, here, state, arrays, starts)[0]


def _save_order(
    group: Group, size: int, here: Target, state: jax.Array, arrays: Arrays, starts: jax.Array | None
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    steps = jax.tree.leaves(arrays)[0].shape[1]

    def turn(carry: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        before, outputs = carry
        after, o = group(before, *_part((arrays, starts), i, size))
        return (after, _put(outputs, o, i)), before

    with target.compiling_for(here):
        _, like = jax.eval_shape(group, state, *_part((arrays, starts), 0, size))
        outputs = jnp.zeros((like.shape[0], steps, *like.shape[2:]), like.dtype)
        (final, outputs), before = jax.lax.scan(turn, (state, outputs), jnp.arange(steps // size))
    return (outputs, final), (before, arrays, starts)


def _pull_order(group: Group, size: int, here: Target, saved: tuple, gradients: tuple[jax.Array, jax.Array]) -> tuple:
    if saved[0].shape[0] == 1:
        # A loop of one iteration is unrolled, and the compiler would keep what it computed in the forward pass.
        saved = jax.lax.optimization_barrier(saved)
    before, arrays, starts = saved
    doutputs, dfinal = gradients

    def turn(carry: tuple, inputs: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
        (dafter, arrays), (i, before) = carry, inputs
        part, begins, do = _part((arrays, starts, doutputs), i, size)
        with target.compiling_for(here):
            dbefore, dpart = jax.vjp(lambda before, part: group(before, part, begins), before, part)[1]((dafter, do))
        return (dbefore, jax.tree.map(lambda array, part: _put(array, part, i), arrays, dpart)), None

    # Gradients take the places of the arrays of their group, which are not read again.
    turns = jnp.arange(before.shape[0])
    (dstate, darrays), _ = jax.lax.scan(turn, (dfinal, arrays), (turns, before), reverse=True)
    return dstate, darrays, None


_in_order.defvjp(_save_order, _pull_order)


def over_chunks[Carry, Out](
    step: Callable[[Carry, Any], tuple[Carry, Out]], start: Carry, chunks: Any, *, reverse: bool = False
) -> tuple[Carry, Out]:
    """`jax.lax.scan` over the chunks of a group, chunks first.

    On a CPU several are written out at once: a loop copies what it reads of a chunk and what it carries.
    """
    unroll = WRITTEN_OUT if target.current().platform == 'cpu' else 1
    return jax.lax.scan(step, start, chunks, reverse=reverse, unroll=unroll)


def _part[T](arrays: T, i: jax.Array | int, size: int) -> T:
    """The steps, the second axis, of group i."""
    return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, i * size, size, axis=1), arrays)


def _put(array: jax.Array, part: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, part, i * part.shape[1], axis=1)


def cut(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array | None, starts: jax.Array | None, length: int
) -> Chunks:
    """Cuts time into chunks of `length`, the last one padded with steps that neither write nor decay."""
    return Chunks(
        q=cut_one(q, length),
        k=cut_one(k, length),
        v=cut_one(v, length),
        log_decay=None if log_decay is None else cut_one(log_decay, length),
        runs=None if starts is None else jnp.cumsum(cut_one(starts[..., None, None], length), axis=3, dtype=jnp.int32),
    )


def cut_one(array: jax.Array, length: int) -> jax.Array:
    """`b t h k` as `b l h c k`."""
    array = jnp.pad(array, ((0, 0), (0, -array.shape[1] % length), (0, 0), (0, 0)))
    b, t, h, k = array.shape
    return jnp.moveaxis(array.reshape(b, t // length, length, h, k), 3, 2)


def join(array: jax.Array) -> jax.Array:
    """`b l h c v` as `b t h v`."""
    b, l, h, c, v = array.shape
    return jnp.moveaxis(array, 2, 3).reshape(b, l * c, h, v)


def transposed(array: jax.Array) -> jax.Array:
    """The array with its last axes exchanged, which the compiler must not make part of a product."""
    return jax.lax.optimization_barrier(array).swapaxes(3, 4)


def since(array: jax.Array) -> jax.Array:
    """Sums over the steps, the last axis but one, from the first up to each."""
    ones = jnp.tril(jnp.ones((array.shape[-2],) * 2, array.dtype))
    # A product with ones, several times faster than a cumulative sum; it must not be rounded to a narrower type.
    return jnp.matmul(_like(ones, array), array, precision='highest')


def since_first(array: jax.Array) -> jax.Array:
    """Sums over the steps, the last axis but one, after the first up to each.

    Differences are those of `since`, where one large number in the first step would round all others off.
    """
    ones = jnp.tril(jnp.ones((array.shape[-2],) * 2, array.dtype)).at[:, 0].set(0)
    return jnp.matmul(_like(ones, array), array, precision='highest')


def until(array: jax.Array) -> jax.Array:
    """Sums over the steps, the last axis but one, from the one after each up to the last."""
    ones = jnp.triu(jnp.ones((array.shape[-2],) * 2, array.dtype), 1)
    return jnp.matmul(_like(ones, array), array, precision='highest')


def between(array: jax.Array) -> jax.Array:
    """Sums over the steps after s up to t, for t after s: `b l h t s k` from `b l h c k`.

    A difference of cumulative sums; since rounding would lose small differences of large sums, a coarse part, whose
    sums are exact, is kept separate.
    """
    coarse = jnp.round(array * 1024) / 1024

    def differences(array: jax.Array) -> jax.Array:
        total = since(array)
        return total[:, :, :, :, None] - total[:, :, :, None]

    return differences(coarse) + differences(array - coarse)


def _like(matrix: jax.Array, array: jax.Array) -> jax.Array:
    return matrix.reshape((1,) * (array.ndim - 2) + matrix.shape)


def visible(runs: jax.Array | None, like: jax.Array) -> jax.Array:
    """Which steps (last axis) of its chunk a step reads, itself and earlier ones of its run: bool `b l 1 c c`.

    Dimensions are those of `like`, `... c k`, of size 1 where it does not vary.
    """
    past = _like(jnp.tril(jnp.ones((like.shape[-2],) * 2, bool)), like)
    return past if runs is None else past & (runs == runs.swapaxes(-1, -2))


def remembers(runs: jax.Array | None) -> jax.Array | None:
    """Which steps still read the state before the chunk, bool `b l 1 c 1`; `None`: all."""
    return None if runs is None else runs == 0


def remembered(runs: jax.Array | None) -> jax.Array | None:
    """Which steps the state after the chunk still holds, bool `b l 1 c 1`; `None`: all."""
    return None if runs is None else runs == runs[..., -1:, :]


def keep(where: jax.Array | None, array: jax.Array) -> jax.Array:
    """The array, zero where it is not kept; `None` keeps everything."""
    return array if where is None else jnp.where(where, array, 0)
