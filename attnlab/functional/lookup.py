"""Entries of arrays, looked up: their gradients add up what went to one place.

GPUs add such numbers in the order in which threads come; forbidden to, XLA sorts all of them, one by one. On GPUs the
gradients here are other programs, whose sums have an order of their own.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Bool, Float, Int

from attnlab.functional import cores
from attnlab.functional.sequence import SEQUENCE
from pallas_kernels import target


def lookup(table: Float[Array, 'o d'], index: Int[Array, '*b']) -> Float[Array, '*b d']:
    """Returns `table[index]`, NaN where there is no such row."""
    if target.current().platform != 'gpu':
        return _take(table, index)
    mesh = cores.devices()
    if not mesh:
        return _summed_in_order(table, index)
    if index.ndim != 2 or any(devices > 1 and axis not in WHOLE for axis, devices in mesh.items()):
        return _take(table, index)
    division = cores.Division('lookup', dict(zip('bt', index.shape, strict=True)), mesh)
    rows = division.spec('b t')
    run = jax.shard_map(_summed_in_order, in_specs=(Spec(), rows), out_specs=division.spec('b t _'), check_vma=False)
    return run(table, index)


WHOLE = ('data', SEQUENCE)
"""Mesh axes over which tables are not divided, so that every device can sum what its own rows looked up."""


def _take(table: Float[Array, 'o d'], index: Int[Array, '*b']) -> Float[Array, '*b d']:
    # `jnp.take` would count negative ones from the end.
    with jax.named_scope('lookup'):
        return table.at[index].get(mode='fill', wrap_negative_indices=False)


_summed_in_order = jax.custom_vjp(_take)


def _looked_up(
    table: Float[Array, 'o d'], index: Int[Array, '*b']
) -> tuple[Float[Array, '*b d'], tuple[Float[Array, 'o d'], Int[Array, '*b']]]:
    return _take(table, index), (table, index)


def _summed(
    kept: tuple[Float[Array, 'o d'], Int[Array, '*b']], gradients: Float[Array, '*b d']
) -> tuple[Float[Array, 'o d'], None]:
    table, index = kept
    return sum_by_row(gradients.reshape(-1, table.shape[1]), index.reshape(-1), table.shape[0]), None


_summed_in_order.defvjp(_looked_up, _summed)


def sum_by_row(values: Float[Array, 'n d'], index: Int[Array, ' n'], rows: int) -> Float[Array, 'o d']:
    """The sums of the values of every index below `rows`, those with one index added in a fixed order.

    Values are sorted by index, and summed along each run of one index by a scan of logarithmic depth. What has no row
    is left out.
    """
    if index.size == 0:
        return jnp.zeros((rows, values.shape[1]), values.dtype)
    order = jnp.argsort(index)
    found = index[order]
    new = found[1:] != found[:-1]
    _, sums = jax.lax.associative_scan(_along_runs, (jnp.pad(new, (1, 0))[:, None], values[order]))
    ends = jnp.pad(new, (0, 1), constant_values=True) & (found >= 0) & (found < rows)
    # The others are given places behind the last row, no two alike.
    places = jnp.where(ends, found, rows + jnp.arange(len(found)))
    return jnp.zeros((rows, values.shape[1]), values.dtype).at[places].set(sums, mode='drop', unique_indices=True)


def _along_runs(
    left: tuple[Bool[Array, 'n 1'], Float[Array, 'n d']], right: tuple[Bool[Array, 'n 1'], Float[Array, 'n d']]
) -> tuple[Bool[Array, 'n 1'], Float[Array, 'n d']]:
    """The sums of the runs in which pieces end: of both, unless one starts in the right piece."""
    starts, sums = zip(left, right, strict=True)
    return starts[0] | starts[1], jnp.where(starts[1], sums[1], sums[0] + sums[1])


def taken(x: Array, index: Int[np.ndarray, '...'], axis: int) -> Array:
    """Returns the entries of `x` along an axis at places known beforehand, with their dimensions in its place.

    Gradients of what was taken several times are summed in float32 at least.
    """
    if target.current().platform == 'gpu':
        return _gathered_back(x, index, axis)
    return _summed_wide(x, index, axis) if x.dtype.itemsize == 2 else jnp.take(x, index, axis)


def _summed_wide(x: Array, index: Int[np.ndarray, '...'], axis: int) -> Array:
    """Its gradient is summed in float32 and rounded once; what is taken is never wide."""

    def take(x: Array) -> Array:
        return jnp.take(x, index, axis)

    run, dtype, wide = jax.custom_vjp(take), x.dtype, jax.ShapeDtypeStruct(x.shape, jnp.float32)

    def pull(_: None, gradient: Array) -> tuple[Array]:
        # Transposed here: what is traced with the forward pass is of another trace than a loop's gradient.
        back = jax.linear_transpose(take, wide)
        return (back(gradient.astype(jnp.float32))[0].astype(dtype),)

    run.defvjp(lambda x: (take(x), None), pull)
    return run(x)


def _gathered_back(x: Array, index: Int[np.ndarray, '...'], axis: int) -> Array:
    """Its gradient gathers, for every entry, those of all places that it was taken to: no two are added by threads."""
    axis %= x.ndim
    places = _places(index.reshape(-1), x.shape[axis])

    @jax.custom_vjp
    def run(x: Array) -> Array:
        return jnp.take(x, index, axis)

    def pull(_: None, gradient: Array) -> tuple[Array]:
        flat = gradient.reshape(*gradient.shape[:axis], index.size, *gradient.shape[axis + index.ndim :])
        found = jnp.take(flat, places, axis, mode='fill', fill_value=0)
        return (jnp.sum(found, axis + 1),)

    run.defvjp(lambda x: (run(x), None), pull)
    return run(x)


def _places(index: Int[np.ndarray, ' m'], size: int) -> Int[np.ndarray, 'n w']:
    """The places where every number below `size` stands, filled up with the place behind the last."""
    order = np.argsort(index, kind='stable')
    counts = np.bincount(index, minlength=size)
    rank = np.arange(index.size) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.full((size, max(1, int(counts.max(initial=0)))), index.size, np.int32)
    places[index[order], rank] = order
    return places
