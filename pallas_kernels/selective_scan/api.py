"""The selective state-space scan of Mamba."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import arguments, cost, dispatch, packing, precision, target
from pallas_kernels.selective_scan import reference, xla
from pallas_kernels.selective_scan.vjp import Operands

CORE = 'selective_scan'


@arguments.checked
def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    *,
    state: jax.Array | None = None,
    segments: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the selective state-space recurrence over time (Gu and Dao, 2023, arXiv 2312.00752).

    `h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t`, `y_t = h_t C_t + D x_t`, the past forgotten where a new document begins.

    Args:
      x: inputs, `b t d`.
      dt: step sizes, positive, `b t d`.
      A: rates, negative, `d n`.
      B: input directions, `b t n`.
      C: output directions, `b t n`.
      D: skip weights, `d`; `None`: no skip.
      state: h before the first step, `b d n`; zero when `None`. It belongs to the segment of the first token.
      segments: document of every token, integers `b t`; `None`: one document a row.
      implementation: `None` chooses; see `dispatch.select`.

    Returns:
      y, `b t d`, in the type of `x`, and the last h, `b d n`, in float32 at least.

    Raises:
      ValueError: for shapes that do not fit.
      TypeError: for arrays that are not floating point, or non-integer `segments`.
      NotImplementedError: for a named implementation that cannot serve the call.
    """
    sizes = arguments.match(
        CORE,
        {},
        x=(x, 'b t d'),
        dt=(dt, 'b t d'),
        A=(A, 'd n'),
        B=(B, 'b t n'),
        C=(C, 'b t n'),
        D=(D, 'd'),
        state=(state, 'b d n'),
        segments=(segments, 'b t'),
    )
    arguments.check_floating(CORE, x=x, dt=dt, A=A, B=B, C=C, D=D, state=state)
    arguments.check_integer(CORE, segments=segments)
    if sizes['n'] == 0:
        raise ValueError(f'{CORE}: A has 0 states a channel; expected at least 1')

    dtype = precision.accumulator(x, dt, A, B, C, D, state)
    if state is None:
        state = jnp.zeros((sizes['b'], sizes['d'], sizes['n']), dtype)
    starts = None if segments is None else packing.starts(segments)

    here, operands = target.current(), Operands(x, dt, A, B, C, state)
    candidates = {
        'reference': dispatch.Candidate(reference.selective_scan),
        'xla': dispatch.Candidate(xla.selective_scan),
        'mosaic_gpu': dispatch.kernel(CORE, 'mosaic_gpu', here, operands),
        'mosaic_tpu': dispatch.kernel(CORE, 'mosaic_tpu', here, operands),
    }
    size = functools.partial(
        cost.selective_scan,
        b=sizes['b'],
        t=sizes['t'],
        d=sizes['d'],
        n=sizes['n'],
        skip=D is not None,
        itemsize=x.dtype.itemsize,
    )
    run = dispatch.select(CORE, implementation, candidates, size)
    y, final = run(operands, starts)
    if D is not None:
        y = y + x.astype(dtype) * D.astype(dtype)[None, None]
    return y.astype(x.dtype), final
