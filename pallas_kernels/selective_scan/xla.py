"""The portable form of `selective_scan`: chunks in order, and the steps of a chunk in order too, but on GPUs at once.

On a CPU the rows of a batch are computed one after another, so that what a step goes over stays in its caches.
"""

import jax

from pallas_kernels import precision, target
from pallas_kernels.selective_scan import in_order, in_parallel, reference, vjp
from pallas_kernels.selective_scan.vjp import Operands, Outputs

_in_order = in_order.form(in_order.REDUCED)
_row_in_order = in_order.form(in_order.UNROLLED)
_in_parallel = vjp.differentiable(in_parallel.forward, in_parallel.backward)


def selective_scan(operands: Operands, starts: jax.Array | None) -> Outputs:
    """Returns the outputs and the last state."""
    x, dt, A, B, C, state = operands
    if x.shape[1] == 1:
        # What vectors are made from stays out of the loop over the state, which would make them for every number.
        x, dt, A, B, C = jax.lax.optimization_barrier((x, dt, A, B, C))
        return reference.selective_scan(Operands(x, dt, A, B, C, state), starts)
    platform = target.current().platform
    if platform == 'gpu':
        return _in_parallel(operands, starts)
    if platform != 'cpu':
        return _in_order(operands, starts)
    if x.shape[0] == 1:
        return _row_in_order(operands, starts)
    # All rows share the rates, whose gradient is the sum of theirs: rounded once, after it.
    A = A.astype(precision.accumulator(*operands))

    def row(at: tuple[jax.Array, ...]) -> Outputs:
        x, dt, B, C, state, *starts = (array[None] for array in at)
        y, last = _row_in_order(Operands(x, dt, A, B, C, state), starts[0] if starts else None)
        return y[0], last[0]

    return jax.lax.map(row, (x, dt, B, C, state, *(() if starts is None else (starts,))))
