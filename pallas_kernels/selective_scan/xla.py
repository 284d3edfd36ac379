"""The portable form of `selective_scan`: a loop over chunks, in each a loop over steps.

The state is held as `b n d`, channels last, so that every operation of a step runs along the longest axis. On a CPU the
rows of a batch whose states leave its cache are computed one after another.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import precision, target, tiling
from pallas_kernels.selective_scan import reference, vjp
from pallas_kernels.selective_scan.vjp import Operands, Outputs


class Inputs(NamedTuple):
    """Time-varying inputs: of one step `b ...`, of one chunk `c b ...`, of the whole call `chunks c b ...`."""

    x: jax.Array
    dt: jax.Array
    B: jax.Array
    C: jax.Array
    starts: jax.Array | None


Carry = tuple[jax.Array, jax.Array, jax.Array]
"""The carry of the backward pass: the gradient of the state through later steps, that of the rates, and the state."""


def forward(operands: Operands, starts: jax.Array | None, keep: bool) -> tuple[Outputs, jax.Array | None]:
    """Returns the outputs, and the states at the start of the chunks to be kept, `chunks b n d`."""
    rates, state, inputs = _by_chunks(operands, starts)

    def step(h: jax.Array, at: Inputs) -> tuple[jax.Array, jax.Array]:
        h = _decay(rates, at) * h + _write(at)
        return h, jnp.sum(h * at.C[:, :, None], axis=1)

    def chunk(h: jax.Array, inputs: Inputs) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        last, y = jax.lax.scan(step, h, inputs)
        return last, (y, h)

    final, (y, states) = jax.lax.scan(chunk, state, inputs)
    return (_by_time(y, operands.x.shape[1]), final.swapaxes(1, 2)), states if keep else None


def backward(operands: Operands, starts: jax.Array | None, states: jax.Array, gradients: Outputs) -> Operands:
    """Returns the gradients of the operands.

    With `r_t = dy_t C_t + decay_{t+1} r_{t+1}` the gradient of `h_t`, that of the write is `r_t` and that of the decay
    `r_t h_{t-1}`.
    """
    dy, dfinal = gradients
    rates, _, inputs = _by_chunks(operands, starts)
    dy = _chunked(dy.astype(rates.dtype), inputs.x.shape[1])

    def again(h: jax.Array, at: Inputs) -> tuple[jax.Array, jax.Array]:
        return _decay(rates, at) * h + _write(at), h

    def step(carry: Carry, inputs: tuple[Inputs, jax.Array, jax.Array]) -> tuple[Carry, tuple[jax.Array, ...]]:
        dcarried, drates, h = carry
        at, dy, before = inputs
        r = dy[:, None, :] * at.C[:, :, None] + dcarried
        dcarried = _decay(rates, at) * r
        dexponent = dcarried * before
        dwritten = jnp.sum(r * at.B[:, :, None], axis=1)
        doperands = (
            dwritten * at.dt,
            dwritten * at.x + jnp.sum(dexponent * rates[None], axis=1),
            jnp.sum(r * (at.dt * at.x)[:, None, :], axis=2),
            jnp.sum(h * dy[:, None, :], axis=2),
        )
        return (dcarried, drates + jnp.sum(dexponent * at.dt[:, None, :], axis=0), before), doperands

    def chunk(
        carry: tuple[jax.Array, jax.Array], inputs: tuple[Inputs, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
        at, dy, state = inputs
        last, before = jax.lax.scan(again, state, at)
        (dcarried, drates, _), doperands = jax.lax.scan(step, (*carry, last), (at, dy, before), reverse=True)
        return (dcarried, drates), doperands

    start = (dfinal.swapaxes(1, 2).astype(rates.dtype), jnp.zeros_like(rates))
    (dstate, drates), doperands = jax.lax.scan(chunk, start, (inputs, dy, states), reverse=True)
    dx, ddt, dB, dC = (_by_time(array, operands.x.shape[1]) for array in doperands)
    result = Operands(dx, ddt, drates.T, dB, dC, dstate.swapaxes(1, 2))
    return Operands(*(gradient.astype(array.dtype) for gradient, array in zip(result, operands, strict=True)))


_together = vjp.differentiable(forward, backward)


def selective_scan(operands: Operands, starts: jax.Array | None) -> Outputs:
    """Returns the outputs and the last state."""
    x, dt, A, B, C, state = operands
    if x.shape[1] == 1:
        # What vectors are made from stays out of the loop over the state, which would make them for every number.
        x, dt, A, B, C = jax.lax.optimization_barrier((x, dt, A, B, C))
        return reference.selective_scan(Operands(x, dt, A, B, C, state), starts)
    if target.current().platform != 'cpu' or not tiling.selective_scan_by_row(x.shape[0], x.shape[1], state.nbytes):
        return _together(operands, starts)

    def row(at: tuple[jax.Array, ...]) -> Outputs:
        x, dt, B, C, state, *starts = (array[None] for array in at)
        y, last = _together(Operands(x, dt, A, B, C, state), starts[0] if starts else None)
        return y[0], last[0]

    return jax.lax.map(row, (x, dt, B, C, state, *(() if starts is None else (starts,))))


def _decay(rates: jax.Array, at: Inputs) -> jax.Array:
    decay = jnp.exp(at.dt[:, None, :] * rates[None])
    return decay if at.starts is None else jnp.where(at.starts[:, None, None], 0, decay)


def _write(at: Inputs) -> jax.Array:
    return (at.dt * at.x)[:, None, :] * at.B[:, :, None]


def _by_chunks(operands: Operands, starts: jax.Array | None) -> tuple[jax.Array, jax.Array, Inputs]:
    """The rates `n d`, the state `b n d` and the inputs by chunks. Steps of padding, of size zero, change nothing."""
    dtype = precision.accumulator(*operands)
    steps = tiling.selective_scan(operands.x.shape[1]).steps
    x, dt, A, B, C, state = (array.astype(dtype) for array in operands)
    starts = None if starts is None else _chunked(starts, steps)
    x, dt, B, C = (_chunked(array, steps) for array in (x, dt, B, C))
    return A.T, state.swapaxes(1, 2), Inputs(x, dt, B, C, starts)


def _chunked(array: jax.Array, steps: int) -> jax.Array:
    """`b t ...` as `chunks c b ...`, padded with zeros."""
    array = jnp.moveaxis(array, 1, 0)
    array = jnp.pad(array, ((0, -array.shape[0] % steps),) + ((0, 0),) * (array.ndim - 1))
    return array.reshape(-1, steps, *array.shape[1:])


def _by_time(array: jax.Array, t: int) -> jax.Array:
    """`chunks c b ...` as `b t ...`."""
    return jnp.moveaxis(array.reshape(-1, *array.shape[2:])[:t], 0, 1)
