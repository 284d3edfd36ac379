"""The linear recurrence, elementwise: `h_t = a_t h_{t-1} + x_t`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import arguments, cost, dispatch, packing, precision, target
from pallas_kernels.linear_scan import reference, xla

CORE = 'linear_scan'


@arguments.checked
def linear_scan(
    x: jax.Array,
    decay: jax.Array,
    *,
    state: jax.Array | None = None,
    segments: jax.Array | None = None,
    reverse: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the elementwise linear recurrence over time.

    `h_t = a_t h_{t-1} + x_t`, with `a_t` counted as zero where a new document begins.

    Args:
      x: inputs, `b t d`, real or complex.
      decay: the factors a, real or complex, `b t d` or broadcastable to it.
      state: h before the first step, `b d`; zero when `None`. It belongs to the segment of the first token (of the
        last one when reversed).
      segments: document of every token, integers `b t`; `None`: one document a row.
      reverse: run from the last token to the first, `h_t = a_t h_{t+1} + x_t`.
      implementation: `None` chooses; see `dispatch.select`.

    Returns:
      Every h, `b t d`, in the type of `x` (complex when any argument is), and the last h computed, `b d`, in float32
      at least.

    Raises:
      ValueError: for shapes that do not fit.
      TypeError: for integer or boolean `x`, `decay`, `state`, or non-integer `segments`.
      NotImplementedError: for a named implementation that cannot serve the call.
    """
    sizes = arguments.match(CORE, {}, x=(x, 'b t d'), state=(state, 'b d'), segments=(segments, 'b t'))
    arguments.check_inexact(CORE, x=x, decay=decay, state=state)
    arguments.check_integer(CORE, segments=segments)
    decay = _canonical_decay(decay, sizes)

    dtype = precision.accumulator(x, decay, state)
    output_dtype = dtype if jnp.issubdtype(dtype, jnp.complexfloating) else x.dtype
    if state is None:
        state = jnp.zeros((sizes['b'], sizes['d']), dtype)
    if segments is not None:
        decay = jnp.where(packing.starts(segments, reverse=reverse)[..., None], 0, decay)

    here = target.current()
    candidates = {
        'reference': dispatch.Candidate(reference.linear_scan),
        'xla': dispatch.Candidate(xla.linear_scan),
        'mosaic_gpu': dispatch.kernel(CORE, 'mosaic_gpu', here, x, decay, state),
        'mosaic_tpu': dispatch.kernel(CORE, 'mosaic_tpu', here, x, decay, state),
    }
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    itemsize = x.dtype.itemsize // (2 if jnp.iscomplexobj(x) else 1)
    size = functools.partial(
        cost.linear_scan, b=sizes['b'], t=sizes['t'], d=sizes['d'], is_complex=is_complex, itemsize=itemsize
    )
    run = dispatch.select(CORE, implementation, candidates, size)
    h, final = run(x, decay, state.astype(dtype), reverse)
    return h.astype(output_dtype), final


def _canonical_decay(decay: jax.Array, sizes: dict[str, int]) -> jax.Array:
    shape = (1,) * (3 - decay.ndim) + decay.shape
    full = (sizes['b'], sizes['t'], sizes['d'])
    if len(shape) != 3 or any(size not in (1, whole) for size, whole in zip(shape, full, strict=True)):
        raise ValueError(
            f'{CORE}: decay has shape {decay.shape}; expected b t d, or broadcastable to it, with '
            + ', '.join(f'{letter}={sizes[letter]}' for letter in 'btd')
        )
    return decay.reshape(shape)
