"""Both passes of `delta_rule` on Hopper GPUs with decays of key channels.

What depends on decays is computed for all chunks at once, see `matrix_state.mosaic_gpu.channel_decays`, and then what
chunks do, of these weights (`weighed.solve`). `sweep` and what follows are those of `scalar`: the states, from the last
chunk to the first their gradients, and for all chunks at once those of weights, of which those of arguments are.

Only the arguments are kept for the backward pass. Arguments and outputs are `b t h k`, as callers have them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule.mosaic_gpu import weighed
from pallas_kernels.matrix_state.differentiation import Arrays, Outputs
from pallas_kernels.matrix_state.mosaic_gpu import channel_decays
from pallas_kernels.matrix_state.mosaic_gpu.channel_decays import Steps, Weights
from pallas_kernels.matrix_state.mosaic_gpu.inputs import Inputs, inputs_of, of_steps, strengths
from pallas_kernels.matrix_state.mosaic_gpu.reads import FORWARD, queries, read_weighed
from pallas_kernels.matrix_state.mosaic_gpu.sweep import Sweep, sweep
from pallas_kernels.matrix_state.mosaic_gpu.tiles import HEADS_FIRST, TIME_FIRST, fill
from pallas_kernels.matrix_state.mosaic_gpu.weighed_gradients import Erasing, state_gradients
from pallas_kernels.matrix_state.mosaic_gpu.weight_gradients import weight_gradients
from pallas_kernels.matrix_state.mosaic_gpu.weights import weights
from pallas_kernels.target import Target


class _Call(NamedTuple):
    """A call in whole chunks and tiles: its inputs, of which `steps` are what weights are of; and beta, `b h l 1 c`."""

    inputs: Inputs
    steps: Steps
    beta: jax.Array


class _Chunks(NamedTuple):
    """What chunks do: their weights, the decay of the state over each, `b h l k`, and after applying the inverse."""

    weights: Weights
    factor: jax.Array
    solved: weighed.Solved


def forward(here: Target, arrays: Arrays, scale: float, keep: bool) -> tuple[Outputs, None]:
    """The outputs; nothing else is kept."""
    call = _call(arrays)
    chunks = _chunks(here, call, keep=False)
    states, values, final = _states(here, call, chunks)
    among, q = chunks.weights.among, chunks.weights.q
    o = read_weighed(here, FORWARD, among, values, q, states, values.dtype, (HEADS_FIRST, TIME_FIRST), scale)
    t, (k, v) = arrays.q.shape[1], arrays.state.shape[2:]
    return (TIME_FIRST.cut(o, t, v), final[:, :, :k, :v]), None


def backward(here: Target, arrays: Arrays, scale: float, kept: None, gradients: Outputs) -> Arrays:
    """The gradients of all arguments, of every head."""
    call = _call(arrays)
    inputs, steps, beta = call
    chunks = _chunks(here, call, keep=True)
    does, factor, solved = chunks
    states, values, _ = _states(here, call, chunks)
    within, do = queries(here, does.among, TIME_FIRST.fill(gradients[0]), scale)
    given = Sweep(reads=does.writes, adds=solved.reads, values=within, more=(does.q, do))
    dstates, dvalues, dstate = sweep(here, given, factor[:, :, :, None], fill(gradients[1]), backward=True)
    dv_type = inputs.type_of_gradient(arrays.v)
    of_chunks = weighed.within_chunks(here, solved.inverse, does.erased, do, values, dvalues, inputs.v, beta, dv_type)
    erasing = Erasing(does.k, of_chunks.dmissing, beta)
    of_states = state_gradients(here, do, values, states, dstates, erasing=erasing)
    assert of_states.by_beta is not None
    dweights = Weights(of_chunks.among, of_states.q, of_states.writes, of_chunks.erased, of_states.k)
    dq, dk, dlog_decay = weight_gradients(here, steps, dweights, TIME_FIRST, factor * of_states.held)
    t, (key_size, value_size) = arrays.q.shape[1], arrays.state.shape[2:]
    return Arrays(
        q=TIME_FIRST.cut(dq, t, key_size),
        k=TIME_FIRST.cut(dk, t, key_size),
        v=TIME_FIRST.cut(of_chunks.dv, t, value_size),
        vectors=(),
        numbers=(of_steps(of_chunks.by_beta - of_states.by_beta, t),),
        log_decay=TIME_FIRST.cut(dlog_decay, t, key_size),
        state=dstate[:, :, :key_size, :value_size],
        starts=None,
    )


def _call(arrays: Arrays) -> _Call:
    assert arrays.log_decay is not None
    inputs = inputs_of(arrays)
    t, h, k = arrays.q.shape[1], arrays.state.shape[1], arrays.log_decay.shape[3]
    log_decay = TIME_FIRST.fill(jnp.broadcast_to(arrays.log_decay, (len(arrays.state), t, h, k)))
    return _Call(inputs, Steps(inputs.q, inputs.k, log_decay, inputs.rows), strengths(arrays, inputs))


def _chunks(here: Target, call: _Call, *, keep: bool) -> _Chunks:
    does = weights(here, True, call.steps, None, TIME_FIRST)
    factor = channel_decays.factor(call.steps, TIME_FIRST)
    return _Chunks(does, factor, weighed.solve(here, does, call.inputs.v, call.beta, keep=keep))


def _states(here: Target, call: _Call, chunks: _Chunks) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state before every chunk, the values that steps write, `b h t v`, and the last state."""
    solved = chunks.solved
    given = Sweep(reads=solved.reads, adds=chunks.weights.writes, values=solved.written, more=())
    return sweep(here, given, chunks.factor[:, :, :, None], call.inputs.state, backward=False)
