"""Both passes of `diagonal_low_rank` on Hopper GPUs.

What steps read and write is found for all chunks at once (`weights`), and then what chunks do after applying their
inverse (`chunks.solve`). `sweep` runs over the chunks of a sequence in order and writes the state at each and what its
steps read for their `a`; of both queries read.

Only the arguments are kept for the backward pass. It sweeps again, and from the last chunk to the first for the
gradients of states and of what is read, `t / 64 * k * v` numbers a head in the 16-bit type of products. The gradients
of weights are products of these, and those of arguments are JAX's of `weights`.

Decays multiply numbers before these are rounded for a product: in float16 a number that decays below 6e-8 becomes zero,
and a state above 65504 overflows.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.diagonal_low_rank import vjp
from pallas_kernels.diagonal_low_rank.chunk import Weights
from pallas_kernels.diagonal_low_rank.mosaic_gpu import chunks
from pallas_kernels.diagonal_low_rank.mosaic_gpu.weights import Steps, weights
from pallas_kernels.matrix_state.differentiation import Arrays, Outputs, Passes
from pallas_kernels.matrix_state.mosaic_gpu.inputs import Inputs, inputs_of
from pallas_kernels.matrix_state.mosaic_gpu.reads import BACKWARD, FORWARD, Read, queries, read_weighed
from pallas_kernels.matrix_state.mosaic_gpu.sweep import Sweep, sweep
from pallas_kernels.matrix_state.mosaic_gpu.tiles import HEADS_FIRST, TIME_FIRST, fill
from pallas_kernels.matrix_state.mosaic_gpu.weighed_gradients import state_gradients
from pallas_kernels.target import Target


@functools.lru_cache
def form(here: Target) -> Callable[..., Outputs]:
    """The differentiable form for a device."""
    passes = Passes(functools.partial(_forward, here), functools.partial(_backward, here))
    return vjp.differentiable(passes, TIME_FIRST.heads)


class _Call(NamedTuple):
    """A call in whole chunks and tiles: its inputs, and of these the steps that weights are of."""

    inputs: Inputs
    steps: Steps


def _forward(here: Target, arrays: Arrays, scale: float, keep: bool) -> tuple[Outputs, None]:
    call = _call(arrays)
    does = weights(here, call.inputs.rows, call.steps)
    solved = chunks.solve(here, does, call.inputs.v, keep=False)
    states, values, final = _states(here, call, does, solved)
    more = [Read(among, call.inputs.v, TIME_FIRST) for among in does.among[1:]]
    layouts = HEADS_FIRST, TIME_FIRST
    o = read_weighed(here, FORWARD, does.among[0], values, does.q, states, values.dtype, layouts, scale, more)
    t, (k, v) = arrays.q.shape[1], arrays.state.shape[2:]
    return (TIME_FIRST.cut(o, t, v), final[:, :, :k, :v]), None


def _backward(here: Target, arrays: Arrays, scale: float, kept: None, gradients: Outputs) -> Arrays:
    call = _call(arrays)
    inputs = call.inputs
    does, pull = jax.vjp(functools.partial(weights, here, inputs.rows), call.steps)
    solved = chunks.solve(here, does, inputs.v, keep=True)
    states, values, _ = _states(here, call, does, solved)
    within, do = queries(here, does.among[0], TIME_FIRST.fill(gradients[0]), scale)
    given = Sweep(reads=does.writes[0], adds=solved.reads, values=within, more=(does.q, do))
    dstates, dvalues, dstate = sweep(here, given, does.factor, fill(gradients[1]), backward=True)
    dv_type, tied = inputs.type_of_gradient(arrays.v), len(does.writes) == 1
    of_chunks = chunks.within_chunks(here, solved.inverse, do, values, dvalues, None if tied else inputs.v, dv_type)
    dfound = of_chunks.dfound
    of_states = state_gradients(
        here, do, values, states, dstates, read=dfound, written=None if tied else (inputs.v, TIME_FIRST)
    )
    assert of_states.k is not None
    held = of_states.held[:, :, :, None]
    (dsteps,) = pull(
        Weights(
            among=of_chunks.among,
            earlier=[of_chunks.earlier[0].astype(jnp.float32), *of_chunks.earlier[1:]],
            q=of_states.q,
            a=of_states.k,
            writes=[of_states.writes, *of_states.others],
            factor=held if does.factor.shape == held.shape else jnp.sum(held, axis=-1, keepdims=True),
        )
    )
    dv = of_chunks.dv
    if dv is None:
        among, writes, earlier = does.among[1], does.writes[1], Read(does.earlier[1], dfound, HEADS_FIRST)
        dv = read_weighed(
            here, BACKWARD, among, do, writes, dstates, dv_type, (HEADS_FIRST, TIME_FIRST), more=[earlier]
        )
    t, (key_size, value_size) = arrays.q.shape[1], arrays.state.shape[2:]
    *db, dk = (TIME_FIRST.cut(key, t, key_size) for key in dsteps.keys)
    return Arrays(
        q=TIME_FIRST.cut(dsteps.q, t, key_size),
        k=dk,
        v=TIME_FIRST.cut(dv, t, value_size),
        vectors=(TIME_FIRST.cut(dsteps.a, t, key_size), *db),
        numbers=(),
        log_decay=None if dsteps.log_decay is None else TIME_FIRST.cut(dsteps.log_decay, t, key_size),
        state=dstate[:, :, :key_size, :value_size],
        starts=None,
    )


def _call(arrays: Arrays) -> _Call:
    inputs, decay = inputs_of(arrays), arrays.log_decay
    a, *b = (TIME_FIRST.fill(vector) for vector in arrays.vectors)
    if decay is not None:
        shape = (len(arrays.state), arrays.q.shape[1], arrays.state.shape[1], decay.shape[3])
        spread = jnp.broadcast_to(decay, shape)
        # One for all key channels stays one.
        filled = TIME_FIRST.fill(spread)
        decay = filled if decay.shape[3] > 1 else filled[..., :1]
    return _Call(inputs, Steps(inputs.q, a, (*b, inputs.k), decay))


def _states(here: Target, call: _Call, does: Weights, solved: chunks.Solved) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state before every chunk, what its steps write besides values of their own, `b h t v`, and the last state."""
    more = tuple((writes, call.inputs.v) for writes in does.writes[1:])
    given = Sweep(reads=solved.reads, adds=does.writes[0], values=solved.written, more=more[0] if more else ())
    return sweep(here, given, does.factor, call.inputs.state, backward=False, of_more=TIME_FIRST)
