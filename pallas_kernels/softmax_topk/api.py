"""The largest softmax weights of rows, and their indices."""

import functools

import jax

from pallas_kernels import arguments, cost, dispatch, target
from pallas_kernels.softmax_topk import reference, xla

CORE = 'softmax_topk'


@arguments.checked
def softmax_topk(x: jax.Array, k: int, *, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest weights of the softmax over the last axis, and their indices.

    `y_i = exp(x_i) / sum_j exp(x_j)`, the sum over all entries, not over the k; in descending order, the
    lower index first among equals. The order is that of the scores x, which differ even where weights underflow. Rows
    of minus infinity have weights of zero. The gradient of the weights reaches all of x (Milakov and Gimelshein, 2018,
    arXiv 1805.02867).

    Args:
      x: scores, `*b o`, without NaN.
      k: how many, from 1 to o.
      implementation: `None` chooses; see `dispatch.select`.

    Returns:
      The weights, `*b k`, in the type of `x`, and their indices, int32 `*b k`.

    Raises:
      ValueError: for an `x` without axes, or a `k` that is not from 1 to o.
      TypeError: for an `x` that is not floating point.
      NotImplementedError: for a named implementation that cannot serve the call.
    """
    if x.ndim == 0:
        raise ValueError(f'{CORE}: x has shape (); expected *b o')
    arguments.check_floating(CORE, x=x)
    if not 1 <= k <= x.shape[-1]:
        raise ValueError(f'{CORE}: k is {k}; expected 1 to {x.shape[-1]}, the last axis of x')

    here = target.current()
    candidates = {
        'reference': dispatch.Candidate(reference.softmax_topk),
        'xla': dispatch.Candidate(xla.softmax_topk),
        'mosaic_gpu': dispatch.kernel(CORE, 'mosaic_gpu', here, x, k),
        'mosaic_tpu': dispatch.kernel(CORE, 'mosaic_tpu', here, x, k),
    }
    n, itemsize = x.size // x.shape[-1], x.dtype.itemsize
    size = functools.partial(cost.softmax_topk, n=n, o=x.shape[-1], k=k, itemsize=itemsize)
    return dispatch.select(CORE, implementation, candidates, size)(x, k)
