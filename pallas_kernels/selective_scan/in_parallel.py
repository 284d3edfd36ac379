"""`selective_scan` as a loop over chunks, all steps of a chunk at once: where every step of a loop is a launch.

The states of a chunk, `c b n d`, are a parallel `linear_scan`, whose adjoint is one in the other direction. They exist
for one chunk at a time, in both passes.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import precision, tiling
from pallas_kernels.linear_scan import vjp, xla
from pallas_kernels.selective_scan.chunks import Inputs, by_time, chunked, decay, write
from pallas_kernels.selective_scan.vjp import Operands, Outputs

_scan = vjp.differentiable(xla.in_parallel)


def forward(operands: Operands, starts: jax.Array | None, keep: bool) -> tuple[Outputs, jax.Array | None]:
    """Returns the outputs, and the states at the start of the chunks to be kept, `chunks b n d`."""
    rates, state = _constant(operands)

    def turn(state: jax.Array, at: Inputs) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        y, last = _chunk(state, rates, at)
        return last, (y, state)

    final, (y, states) = jax.lax.scan(turn, state, _inputs(operands, starts))
    return (by_time(y, operands.x.shape[1]), final.swapaxes(1, 2)), states if keep else None


def backward(operands: Operands, starts: jax.Array | None, states: jax.Array, gradients: Outputs) -> Operands:
    """Returns the gradients of the operands, those of a chunk by differentiating it."""
    if states.shape[0] == 1:
        # A loop of one iteration is unrolled, and the compiler could keep what it computed in the forward pass, or
        # compute it again before its turn.
        operands, states, gradients = jax.lax.optimization_barrier((operands, states, gradients))
    rates, _ = _constant(operands)
    inputs = _inputs(operands, starts)
    dy, dfinal = (gradient.astype(rates.dtype) for gradient in gradients)

    def turn(
        carry: tuple[jax.Array, jax.Array], along: tuple[jax.Array, Inputs, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
        (dlast, drates), (state, at, dy) = carry, along

        def chunk(
            state: jax.Array, rates: jax.Array, x: jax.Array, dt: jax.Array, B: jax.Array, C: jax.Array
        ) -> Outputs:
            return _chunk(state, rates, Inputs(x, dt, B, C, at.starts))

        _, pull = jax.vjp(chunk, state, rates, at.x, at.dt, at.B, at.C)
        dstate, more, *darrays = pull((dy, dlast))
        return (dstate, drates + more), darrays

    start = (dfinal.swapaxes(1, 2), jnp.zeros_like(rates))
    along = (states, inputs, chunked(dy, inputs.x.shape[1]))
    (dstate, drates), darrays = jax.lax.scan(turn, start, along, reverse=True)
    dx, ddt, dB, dC = (by_time(array, operands.x.shape[1]) for array in darrays)
    result = Operands(dx, ddt, drates.T, dB, dC, dstate.swapaxes(1, 2))
    return Operands(*(gradient.astype(array.dtype) for gradient, array in zip(result, operands, strict=True)))


def _chunk(state: jax.Array, rates: jax.Array, at: Inputs) -> Outputs:
    """The outputs of a chunk, `c b d`, and the state after it, `b n d`."""
    x, dt, B, C = (array.astype(state.dtype) for array in at[:4])
    at = Inputs(x, dt, B, C, at.starts)
    decays, written = jax.vmap(decay, in_axes=(None, 0))(rates, at), jax.vmap(write)(at)
    # As one sequence of `b n d` numbers a step.
    h, last = _scan(written[None], decays[None], state[None], False)
    return jnp.sum(h[0] * C[..., None], axis=2), last[0]


def _constant(operands: Operands) -> tuple[jax.Array, jax.Array]:
    """The rates, `n d`, and the state before the first step, `b n d`, in the type that is computed in."""
    dtype = precision.accumulator(*operands)
    return operands.A.T.astype(dtype), operands.state.swapaxes(1, 2).astype(dtype)


def _inputs(operands: Operands, starts: jax.Array | None) -> Inputs:
    """The inputs by chunks, in their own types."""
    (b, t, d), n = operands.x.shape, operands.A.shape[1]
    steps = tiling.selective_scan_at_once(t, b * d * n).steps
    x, dt, B, C = (chunked(array, steps) for array in (operands.x, operands.dt, operands.B, operands.C))
    return Inputs(x, dt, B, C, None if starts is None else chunked(starts, steps))
