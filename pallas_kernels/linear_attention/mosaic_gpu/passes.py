"""The Pallas form of `linear_attention` for Hopper GPUs.

`sweep` runs over the chunks of a sequence in order and writes the state at each, backward, from the last chunk to the
first, the gradients of these. The others then process all chunks at once. Forward, `read` computes what queries read of
the states. Backward, `read_gradients` computes the gradients of queries, and `key_value_gradients` those of keys and
values in one kernel. Where `gradients.serves` is false, `read_gradients` and `read` compute those of keys and of values
separately. Only the arguments are kept for the backward pass; the states, in the 16-bit type of products, `t / 64 * k *
v` numbers a head, are recomputed.

With decays per key channel, all that depends on these is computed first, for all chunks at once (see
`matrix_state.mosaic_gpu.channel_decays`): 16-bit numbers, `64 + 2 k` a step. The sweep and products remain.

Decays multiply numbers before these are rounded for a product: in float16 a number that decays below 6e-8 becomes zero,
and a state above 65504 overflows.

A warpgroup works on tiles of 64 x 64: steps of a chunk, and channels. Arguments and outputs are read and written as
callers have them, `b t h k`.
"""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.linear_attention import vjp
from pallas_kernels.linear_attention.mosaic_gpu.gradients import key_value_gradients, serves
from pallas_kernels.linear_attention.mosaic_gpu.sweep import sweep
from pallas_kernels.matrix_state import decays
from pallas_kernels.matrix_state.differentiation import Arrays, Outputs, Passes, scaled
from pallas_kernels.matrix_state.mosaic_gpu import channel_decays
from pallas_kernels.matrix_state.mosaic_gpu.channel_decays import Steps, Weights
from pallas_kernels.matrix_state.mosaic_gpu.inputs import inputs_of
from pallas_kernels.matrix_state.mosaic_gpu.read_gradients import read_gradients
from pallas_kernels.matrix_state.mosaic_gpu.reads import BACKWARD, FORWARD, read, read_weighed
from pallas_kernels.matrix_state.mosaic_gpu.tiles import TILE, TIME_FIRST, fill
from pallas_kernels.matrix_state.mosaic_gpu.weighed_gradients import score_gradients, state_gradients
from pallas_kernels.matrix_state.mosaic_gpu.weight_gradients import weight_gradients
from pallas_kernels.matrix_state.mosaic_gpu.weights import weights as weights_of
from pallas_kernels.target import Target


@functools.lru_cache
def form(here: Target) -> Callable[..., Outputs]:
    """The differentiable form for a device."""
    passes = Passes(functools.partial(_forward, here), functools.partial(_backward, here))
    return vjp.differentiable(passes, heads_axis=TIME_FIRST.heads)


def _forward(here: Target, arrays: Arrays, scale: float, keep: bool) -> tuple[Outputs, None]:
    if _is_vector(arrays):
        return _forward_by_channel(here, arrays, scale), None
    inputs = inputs_of(arrays)
    states, final = sweep(here, FORWARD, inputs.k, inputs.v, inputs.rows, inputs.state)
    o = read(here, FORWARD, inputs.q, inputs.k, inputs.v, states, inputs.rows, inputs.v.dtype, TIME_FIRST, scale)
    t, (k, v) = arrays.q.shape[1], arrays.state.shape[2:]
    return (TIME_FIRST.cut(o, t, v), final[:, :, :k, :v]), None


def _is_vector(arrays: Arrays) -> bool:
    return arrays.log_decay is not None and arrays.log_decay.shape[3] > 1


def _backward(here: Target, arrays: Arrays, scale: float, kept: None, gradients: Outputs) -> Arrays:
    if _is_vector(arrays):
        return _backward_by_channel(here, arrays, (scaled(scale, gradients[0]), gradients[1]))
    inputs = inputs_of(arrays)
    do, dfinal = TIME_FIRST.fill(gradients[0]), fill(gradients[1])
    q, k, v, rows, state = inputs
    states, _ = sweep(here, FORWARD, k, v, rows, state)
    dstates, dstate = sweep(here, BACKWARD, q, do, rows, dfinal, scale)
    dv_type, decaying = inputs.type_of_gradient(arrays.v), arrays.log_decay is not None
    dq, reads = read_gradients(here, FORWARD, q, k, do, v, states, rows, scale, dstates if decaying else None)
    if serves(q, k):
        dk, dv, writes = key_value_gradients(here, q, k, v, do, dstates, rows, dv_type, scale)
    else:
        dv = read(here, BACKWARD, k, q, do, dstates, rows, dv_type, TIME_FIRST, scale)
        dk, (writes,) = read_gradients(here, BACKWARD, k, q, v, do, dstates, rows, scale)
    dlog_decay = decays.gradients(rows, reads[0] + writes, jnp.sum(reads[1], axis=-1)) if decaying else None
    t, (key_size, value_size) = arrays.q.shape[1], arrays.state.shape[2:]
    return Arrays(
        q=TIME_FIRST.cut(dq, t, key_size),
        k=TIME_FIRST.cut(dk, t, key_size),
        v=TIME_FIRST.cut(dv, t, value_size),
        vectors=(),
        numbers=(),
        log_decay=None if dlog_decay is None else TIME_FIRST.from_heads_first(dlog_decay[:, :, :t, None]),
        state=dstate[:, :, :key_size, :value_size],
        starts=None,
    )


def _weigh(here: Target, arrays: Arrays) -> tuple[Steps, Weights, jax.Array]:
    """What weights are of, the weights, and the decay of the state over each chunk, `b h l k`."""
    assert arrays.log_decay is not None
    b, h, t, _ = TIME_FIRST.sizes(arrays.log_decay)
    numbers = decays.rows(None, arrays.starts, pl.cdiv(t, TILE) * TILE, TILE)
    q, k, log_decay = (TIME_FIRST.fill(array) for array in (arrays.q, arrays.k, arrays.log_decay))
    steps = Steps(q, k, log_decay, jnp.broadcast_to(numbers, (b, h, *numbers.shape[2:])))
    return steps, weights_of(here, False, steps, None, TIME_FIRST), channel_decays.factor(steps, TIME_FIRST)


def _forward_by_channel(here: Target, arrays: Arrays, scale: float) -> Outputs:
    _, weights, factor = _weigh(here, arrays)
    v = TIME_FIRST.fill(arrays.v)
    states, final = sweep(here, FORWARD, weights.writes, v, factor, fill(arrays.state))
    o = read_weighed(here, FORWARD, weights.among, v, weights.q, states, v.dtype, (TIME_FIRST, TIME_FIRST), scale)
    t, (key_size, value_size) = arrays.q.shape[1], arrays.state.shape[2:]
    return TIME_FIRST.cut(o, t, value_size), final[:, :, :key_size, :value_size]


def _backward_by_channel(here: Target, arrays: Arrays, gradients: Outputs) -> Arrays:
    do, v = TIME_FIRST.fill(gradients[0]), TIME_FIRST.fill(arrays.v)
    steps, weights, factor = _weigh(here, arrays)
    states, _ = sweep(here, FORWARD, weights.writes, v, factor, fill(arrays.state))
    dstates, dstate = sweep(here, BACKWARD, weights.q, do, factor, fill(gradients[1]))
    rounded = v.dtype if v.shape[2] == arrays.state.shape[1] else jnp.float32
    layouts = TIME_FIRST, TIME_FIRST
    dv = read_weighed(here, BACKWARD, weights.among, do, weights.writes, dstates, rounded, layouts)
    found = state_gradients(here, do, v, states, dstates, TIME_FIRST)
    dweights = Weights(score_gradients(here, do, v, TIME_FIRST), found.q, found.writes)
    dq, dk, dlog_decay = weight_gradients(here, steps, dweights, TIME_FIRST, factor * found.held)
    t, (key_size, value_size) = arrays.q.shape[1], arrays.state.shape[2:]
    return Arrays(
        q=TIME_FIRST.cut(dq, t, key_size),
        k=TIME_FIRST.cut(dk, t, key_size),
        v=TIME_FIRST.cut(dv, t, value_size),
        vectors=(),
        numbers=(),
        log_decay=TIME_FIRST.cut(dlog_decay, t, key_size),
        state=dstate[:, :, :key_size, :value_size],
        starts=None,
    )
