"""The softmax of rows."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import arguments, cost, dispatch, target
from pallas_kernels.softmax import reference, two_pass, xla

CORE = 'softmax'


@arguments.checked
def softmax(x: jax.Array, *, where: jax.Array | None = None, implementation: str | None = None) -> jax.Array:
    """Returns the softmax over the last axis.

    `y_i = exp(x_i) / sum_j exp(x_j)` over the entries j selected by `where`; the others get zero. A row without
    selected entries, or of minus infinity, is zeros and has zero gradients. Sums are in float32 at least (Milakov and
    Gimelshein, 2018, arXiv 1805.02867).

    Args:
      x: scores, `*b o`.
      where: which entries to include, bool, broadcastable to `*b o`; `None`: all.
      implementation: `None` chooses; see `dispatch.select`. 'two_pass' is there too, see `two_pass`.

    Returns:
      The weights, `*b o`, in the type of `x`.

    Raises:
      ValueError: for an `x` without axes, or a `where` that cannot be broadcast to it.
      TypeError: for an `x` that is not floating point, or a `where` that is not bool.
      NotImplementedError: for a named implementation that cannot serve the call.
    """
    if x.ndim == 0:
        raise ValueError(f'{CORE}: x has shape (); expected *b o')
    arguments.check_floating(CORE, x=x)
    if where is not None:
        where = _canonical_where(where, x)

    here = target.current()
    candidates = {
        'reference': dispatch.Candidate(reference.softmax),
        'xla': dispatch.Candidate(xla.softmax),
        'two_pass': dispatch.Candidate(two_pass.softmax),
        'mosaic_gpu': dispatch.kernel(CORE, 'mosaic_gpu', here, x),
        'mosaic_tpu': dispatch.kernel(CORE, 'mosaic_tpu', here, x),
    }
    size = functools.partial(cost.softmax, n=x.size // max(x.shape[-1], 1), o=x.shape[-1], itemsize=x.dtype.itemsize)
    return dispatch.select(CORE, implementation, candidates, size)(x, where)


def _canonical_where(where: jax.Array, x: jax.Array) -> jax.Array:
    arguments.check_bool(CORE, where=where)
    shape = (1,) * (x.ndim - where.ndim) + where.shape
    if len(shape) != x.ndim or any(size not in (1, whole) for size, whole in zip(shape, x.shape, strict=True)):
        raise ValueError(f'{CORE}: where has shape {where.shape}; expected one broadcastable to x, {x.shape}')
    return jnp.broadcast_to(where.reshape(shape), x.shape)
