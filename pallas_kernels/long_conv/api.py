"""The causal convolution of every channel with a kernel that may be as long as the row."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import arguments, cost, dispatch, packing, target
from pallas_kernels.long_conv import reference, xla

CORE = 'long_conv'


@arguments.checked
def long_conv(
    x: jax.Array,
    kernel: jax.Array,
    *,
    segments: jax.Array | None = None,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Convolves every channel with a kernel of its own, causally.

    `y_t = sum_j kernel_j x_{t-j}`, over the tokens of the document of `t` up to `t`.

    Args:
      x: inputs, `b t d`.
      kernel: the taps of every channel, the most recent first, `w d`; taps beyond the row are ignored.
      segments: document of every token, integers `b t`; `None`: one document a row.
      dtype: the type of y; `None`: that of x. Kernels round its gradient to the type of x.
      implementation: `None` chooses; see `dispatch.select`.

    Returns:
      y, `b t d`; sums are in float32 at least.

    Raises:
      ValueError: for shapes that do not fit, or a kernel without taps.
      TypeError: for arrays that are not floating point, or non-integer `segments`.
      NotImplementedError: for a named implementation that cannot serve the call.
    """
    sizes = arguments.match(CORE, {}, x=(x, 'b t d'), kernel=(kernel, 'w d'), segments=(segments, 'b t'))
    arguments.check_floating(CORE, x=x, kernel=kernel)
    arguments.check_integer(CORE, segments=segments)
    if sizes['w'] == 0:
        raise ValueError(f'{CORE}: kernel has no taps; expected at least 1')
    candidates = {
        'reference': dispatch.Candidate(reference.long_conv),
        'xla': dispatch.Candidate(xla.long_conv),
        'mosaic_gpu': dispatch.kernel(CORE, 'mosaic_gpu', target.current(), x, kernel, segments),
        'mosaic_tpu': dispatch.kernel(CORE, 'mosaic_tpu', target.current(), x, kernel, segments),
    }
    packed, dtype = segments is not None, jnp.dtype(dtype or x.dtype)
    b, t, d, w = (sizes[letter] for letter in 'btdw')
    size = functools.partial(
        cost.long_conv,
        b=b,
        t=t,
        d=d,
        w=w,
        packed=packed,
        itemsize=x.dtype.itemsize,
        result=dtype.itemsize,
        in_parts=x.dtype == jnp.bfloat16,
    )
    run = dispatch.select(CORE, implementation, candidates, size)
    return run(x, kernel, None if segments is None else packing.runs(segments)).astype(dtype)
