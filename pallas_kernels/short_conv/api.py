"""The causal convolution of every channel with a few taps, its bias and its activation."""

import functools

import jax

from pallas_kernels import arguments, cost, dispatch, packing, target
from pallas_kernels.short_conv import reference, vjp, xla

CORE = 'short_conv'


@arguments.checked
def short_conv(
    x: jax.Array,
    taps: jax.Array,
    bias: jax.Array | None = None,
    *,
    segments: jax.Array | None = None,
    activation: str = vjp.IDENTITY,
    implementation: str | None = None,
) -> jax.Array:
    """Convolves every channel with a few taps of its own, causally.

    `y_t = f(c + sum_i a_i x_{t-w+1+i})`, `0 <= i < w`: the last tap is that of the token itself, and inputs of other
    documents or before the first token count as zero.

    Args:
      x: inputs, `b t d`.
      taps: a, those of every channel, the oldest first, `w d`.
      bias: c, `d`; `None`: zero.
      segments: document of every token, integers `b t`; `None`: one document a row.
      activation: f, 'identity' or 'silu'.
      implementation: `None` chooses; see `dispatch.select`.

    Returns:
      y, `b t d`, in the type of `x`; sums and activations are in float32 at least, and rounded once.

    Raises:
      ValueError: for shapes that do not fit, no taps, or an unknown activation.
      TypeError: for arrays that are not floating point, or non-integer `segments`.
      NotImplementedError: for a named implementation that cannot serve the call.
    """
    sizes = arguments.match(CORE, {}, x=(x, 'b t d'), taps=(taps, 'w d'), bias=(bias, 'd'), segments=(segments, 'b t'))
    arguments.check_floating(CORE, x=x, taps=taps, bias=bias)
    arguments.check_integer(CORE, segments=segments)
    if sizes['w'] == 0:
        raise ValueError(f'{CORE}: taps has no taps; expected at least 1')
    if activation not in vjp.ACTIVATIONS:
        raise ValueError(f'{CORE}: activation is {activation!r}; expected one of {vjp.ACTIVATIONS}')
    candidates = {
        'reference': dispatch.Candidate(functools.partial(reference.short_conv, activation=activation)),
        'xla': dispatch.Candidate(xla.form(activation, packed=segments is not None)),
        'mosaic_gpu': dispatch.kernel(CORE, 'mosaic_gpu', target.current(), x, taps, bias, fixed=(activation,)),
    }
    b, t, d, w = (sizes[letter] for letter in 'btdw')
    size = functools.partial(
        cost.short_conv,
        b=b,
        t=t,
        d=d,
        w=w,
        bias=bias is not None,
        activation=activation,
        itemsize=x.dtype.itemsize,
    )
    run = dispatch.select(CORE, implementation, candidates, size)
    reach = vjp.reach_of(None if segments is None else packing.runs(segments), t, w)
    return run(x, taps, bias, reach)
