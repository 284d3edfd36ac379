"""`selective_scan` as a loop over chunks, in each a loop over steps.

The state is held as `b n d`, channels last, so that every operation of a step runs along the longest axis.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import precision, tiling
from pallas_kernels.selective_scan import vjp
from pallas_kernels.selective_scan.chunks import Inputs, by_time, chunked, decay, write
from pallas_kernels.selective_scan.vjp import Operands, Outputs

Carry = tuple[jax.Array, jax.Array, jax.Array]
"""The carry of the backward pass: the gradient of the state through later steps, that of the rates, and the state."""


class Sums(NamedTuple):
    """How a step sums.

    Attributes:
      states: from `b n d` to `b d`.
      channels: from `b n d` and `b d` to `b n`, the sum of the products over channels.
    """

    states: Callable[[jax.Array], jax.Array]
    channels: Callable[[jax.Array, jax.Array], jax.Array]


LONGEST_UNROLLED = 64
"""States of a channel up to which their sum is written out, so that programs stay small."""


def _term_by_term(array: jax.Array) -> jax.Array:
    if array.shape[1] > LONGEST_UNROLLED:
        return jnp.sum(array, axis=1)
    return functools.reduce(jnp.add, (array[:, index] for index in range(array.shape[1])))


REDUCED = Sums(
    states=functools.partial(jnp.sum, axis=1),
    channels=lambda array, weights: jnp.sum(array * weights[:, None, :], axis=2),
)

UNROLLED = Sums(
    states=_term_by_term,
    channels=functools.partial(jnp.einsum, 'bnd,bd->bn', precision=jax.lax.Precision.HIGHEST),
)
"""For CPUs, where XLA calls a library for a reduction, for which it stores the products and what they are made of."""


def form(sums: Sums) -> Callable[[Operands, jax.Array | None], Outputs]:
    """Returns the form whose steps sum so."""
    return vjp.differentiable(functools.partial(forward, sums), functools.partial(backward, sums))


def forward(sums: Sums, operands: Operands, starts: jax.Array | None, keep: bool) -> tuple[Outputs, jax.Array | None]:
    """Returns the outputs, and the states at the start of the chunks to be kept, `chunks b n d`."""
    rates, state, inputs = _by_chunks(operands, starts)

    def step(h: jax.Array, at: Inputs) -> tuple[jax.Array, jax.Array]:
        h = decay(rates, at) * h + write(at)
        return h, sums.states(h * at.C[:, :, None])

    def chunk(h: jax.Array, inputs: Inputs) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        last, y = jax.lax.scan(step, h, inputs)
        return last, (y, h)

    final, (y, states) = jax.lax.scan(chunk, state, inputs)
    return (by_time(y, operands.x.shape[1]), final.swapaxes(1, 2)), states if keep else None


def backward(
    sums: Sums, operands: Operands, starts: jax.Array | None, states: jax.Array, gradients: Outputs
) -> Operands:
    """Returns the gradients of the operands.

    With `r_t = dy_t C_t + decay_{t+1} r_{t+1}` the gradient of `h_t`, that of the write is `r_t` and that of the decay
    `r_t h_{t-1}`.
    """
    dy, dfinal = gradients
    rates, _, inputs = _by_chunks(operands, starts)
    dy = chunked(dy.astype(rates.dtype), inputs.x.shape[1])

    def again(h: jax.Array, at: Inputs) -> tuple[jax.Array, jax.Array]:
        return decay(rates, at) * h + write(at), h

    def step(carry: Carry, inputs: tuple[Inputs, jax.Array, jax.Array]) -> tuple[Carry, tuple[jax.Array, ...]]:
        dcarried, drates, h = carry
        at, dy, before = inputs
        r = dy[:, None, :] * at.C[:, :, None] + dcarried
        dcarried = decay(rates, at) * r
        dexponent = dcarried * before
        dwritten = sums.states(r * at.B[:, :, None])
        doperands = (
            dwritten * at.dt,
            dwritten * at.x + sums.states(dexponent * rates[None]),
            sums.channels(r, at.dt * at.x),
            sums.channels(h, dy),
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
    dx, ddt, dB, dC = (by_time(array, operands.x.shape[1]) for array in doperands)
    result = Operands(dx, ddt, drates.T, dB, dC, dstate.swapaxes(1, 2))
    return Operands(*(gradient.astype(array.dtype) for gradient, array in zip(result, operands, strict=True)))


def _by_chunks(operands: Operands, starts: jax.Array | None) -> tuple[jax.Array, jax.Array, Inputs]:
    """The rates `n d`, the state `b n d` and the inputs by chunks. Steps of padding, of size zero, change nothing."""
    dtype = precision.accumulator(*operands)
    steps = tiling.selective_scan(operands.x.shape[1]).steps
    x, dt, A, B, C, state = (array.astype(dtype) for array in operands)
    starts = None if starts is None else chunked(starts, steps)
    x, dt, B, C = (chunked(array, steps) for array in (x, dt, B, C))
    return A.T, state.swapaxes(1, 2), Inputs(x, dt, B, C, starts)
