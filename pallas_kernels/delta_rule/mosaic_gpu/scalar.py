"""Both passes of `delta_rule` on Hopper GPUs with one decay a head and step, or none.

What is within chunks of 64 steps is computed for all chunks at once (`chunks.solve`). `sweep` then runs over the chunks
of a sequence in order and writes the state at each and the values that its steps write, which queries read as those of
`linear_attention`.

Only the arguments are kept for the backward pass. It solves and sweeps again for the states, `t / 64 * k * v` numbers a
head in the 16-bit type of products, and the values, and from the last chunk to the first for the gradients of both;
those of arguments then follow for all chunks at once. Arguments and outputs are `b t h k`, as callers have them.

Decays multiply numbers before these are rounded for a product: in float16 a number that decays below 6e-8 becomes zero,
and a state above 65504 overflows.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule.mosaic_gpu import chunks
from pallas_kernels.delta_rule.mosaic_gpu.gradients import Sums, delta_key_gradients
from pallas_kernels.matrix_state import decays
from pallas_kernels.matrix_state.decays import FACTOR
from pallas_kernels.matrix_state.differentiation import Arrays, Outputs
from pallas_kernels.matrix_state.mosaic_gpu.inputs import Inputs, inputs_of, of_steps, strengths
from pallas_kernels.matrix_state.mosaic_gpu.read_gradients import read_gradients
from pallas_kernels.matrix_state.mosaic_gpu.reads import FORWARD, read
from pallas_kernels.matrix_state.mosaic_gpu.sweep import Sweep, sweep
from pallas_kernels.matrix_state.mosaic_gpu.tiles import TIME_FIRST, fill
from pallas_kernels.target import Target


def forward(here: Target, arrays: Arrays, scale: float, keep: bool) -> tuple[Outputs, None]:
    """The outputs; nothing else is kept."""
    inputs = inputs_of(arrays)
    solved = chunks.solve(here, inputs.k, inputs.v, strengths(arrays, inputs), inputs.rows, keep=False)
    states, values, final = _states(here, inputs, solved)
    o = read(here, FORWARD, inputs.q, inputs.k, values, states, inputs.rows, values.dtype, TIME_FIRST, scale)
    t, (k, v) = arrays.q.shape[1], arrays.state.shape[2:]
    return (TIME_FIRST.cut(o, t, v), final[:, :, :k, :v]), None


def backward(here: Target, arrays: Arrays, scale: float, kept: None, gradients: Outputs) -> Arrays:
    """The gradients of all arguments, of every head."""
    inputs = inputs_of(arrays)
    (q, k, v, rows, _), beta, rounded = inputs, strengths(arrays, inputs), inputs.type_of_gradient
    do = TIME_FIRST.fill(gradients[0])
    solved = chunks.solve(here, k, v, beta, rows, keep=True)
    states, values, _ = _states(here, inputs, solved)
    asked = chunks.queries(here, q, k, do, rows, scale)
    given = Sweep(reads=solved.writes, adds=solved.reads, values=asked.within, more=(asked.reads, do))
    dstates, dvalues, dstate = sweep(
        here, given, _factor(inputs.rows), fill(gradients[1]), backward=True, layout=TIME_FIRST
    )
    missing = chunks.missing(here, solved.inverse, dvalues, v, beta, rounded(arrays.v))
    dq, (reads,) = read_gradients(here, FORWARD, q, k, do, values, states, rows, scale)
    dk, sums = delta_key_gradients(
        here, q, k, do, values, missing.dmissing, states, dstates, beta, rows, rounded(arrays.k), scale
    )
    t, (key_size, value_size) = arrays.q.shape[1], arrays.state.shape[2:]
    return Arrays(
        q=TIME_FIRST.cut(dq, t, key_size),
        k=TIME_FIRST.cut(dk, t, key_size),
        v=TIME_FIRST.cut(missing.dv, t, value_size),
        vectors=(),
        numbers=(of_steps(missing.by_value - _join(sums.within + sums.across), t),),
        log_decay=None
        if arrays.log_decay is None
        else of_steps(_decay_gradient(rows, beta, reads, sums), t)[..., None],
        state=dstate[:, :, :key_size, :value_size],
        starts=None,
    )


def _states(here: Target, inputs: Inputs, solved: chunks.Solved) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state before every chunk, the values that steps write, and the last state."""
    given = Sweep(reads=solved.reads, adds=solved.writes, values=solved.written, more=())
    return sweep(here, given, _factor(inputs.rows), inputs.state, backward=False, layout=TIME_FIRST)


def _decay_gradient(rows: jax.Array, beta: jax.Array, reads: jax.Array, sums: Sums) -> jax.Array:
    """Those of log decays, `b h t`; what keys read is taken off what is written."""
    by_keys = jnp.stack([sums.within, sums.across], axis=2) * beta[:, :, :, 0][:, :, None]
    writes = jnp.stack([sums.written, sums.kept], axis=2)
    return decays.gradients(rows, reads + decays.pull(rows, -by_keys, writes), sums.held)


def _factor(rows: jax.Array) -> jax.Array:
    """The decay of the state over each chunk, `b h l 1 1`."""
    return rows[:, :, :, FACTOR, :1, None]


def _join(array: jax.Array) -> jax.Array:
    """`b h l c` as `b h t`."""
    b, h, l, c = array.shape
    return array.reshape(b, h, l * c)
