"""The form of `attention` for TPUs: one blockwise template, forward and backward, in Pallas Mosaic TPU.

With the layout of blocks in `sweep`, only two of the seven products of both passes, with keys or values transposed,
need to transpose a factor, the small one.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import tiling
from pallas_kernels.attention import chosen, vjp
from pallas_kernels.attention.maps import Statistics
from pallas_kernels.attention.mosaic_tpu.blocks import named
from pallas_kernels.attention.mosaic_tpu.gradients import pull_bias, pull_keys, pull_queries
from pallas_kernels.attention.mosaic_tpu.output import follow, read
from pallas_kernels.attention.mosaic_tpu.sweep import MEMORY, Call, Part, Parts, call_of
from pallas_kernels.attention.problem import Operands, Rule, segments_refusal
from pallas_kernels.mosaic_tpu.launch import factor_type, generation_refusal
from pallas_kernels.target import Target

CHANNELS = 16
"""Head sizes are padded to a multiple of it, the rows of a register of 16-bit numbers."""


LONGEST = 2**16
"""The maximum number of steps over pairs of tiles: two lists of this length take half of the memory for scalars."""


@functools.lru_cache
def form(here: Target) -> vjp.Form:
    """Returns `attention` for a TPU, with its gradient."""
    return vjp.differentiable(*in_passes(here))


def in_passes(here: Target) -> vjp.Passes:
    """Returns the two passes for a device."""
    return vjp.Passes(functools.partial(forward, here), functools.partial(backward, here), exact=True)


def refusal(here: Target, rule: Rule, operands: Operands) -> str | None:
    """The reason why the kernels cannot serve a call, or `None`."""
    if operands.dtype() != jnp.float32:
        return f'it is computed in {operands.dtype()}; expected operands of at most 32 bits'
    reason = segments_refusal(operands)
    if reason is not None:
        return reason
    call = call_of(here, rule, operands)
    reason = chosen.refusal(rule, call.tile.keys)
    if reason is not None:
        return reason
    if 0 in (*call.sizes.values(), operands.v.shape[3]):
        return 'there is nothing to compute; expected at least one row, head, query, key and channel of values'
    needed = _memory(call, operands)
    if needed > MEMORY:
        return (
            f'its tiles take {needed / 2**20:.0f} MiB of VMEM at k={operands.k.shape[3]} and v={operands.v.shape[3]}; '
            f'expected at most {MEMORY >> 20}, from narrower heads'
        )
    steps = max(len(visits.pairs) for visits in (call.by_queries(together=operands.bias is None), call.by_keys()))
    if steps > LONGEST:
        return f'its queries see keys in {steps} grid steps; expected at most {LONGEST}, from shorter rows or a window'
    return generation_refusal(here)


def _memory(call: Call, operands: Operands) -> int:
    """The bytes of VMEM that its kernels take at most."""
    bias = 0 if operands.bias is None or 1 in operands.bias.shape[3:] else factor_type(operands.bias).itemsize
    size = factor_type(operands.q, operands.k, operands.v).itemsize
    channels, together = operands.k.shape[3] + operands.v.shape[3], max(call.together.values())
    # Two copies of the words of a step, a register of eight rows each.
    words = 0 if operands.chosen is None else 2 * together * 8 * 4 * call.tile.queries
    return words + tiling.attention_tpu_memory(call.tile, channels, size, together=together, bias=bias)


def forward(here: Target, rule: Rule, operands: Operands, given: Statistics) -> vjp.Residuals:
    """Returns the output and what is kept; `given` are the statistics of a map that surveys."""
    call = call_of(here, rule, operands)
    inputs = _inputs(call, operands) | _rows(call, named(given))
    v = operands.v.shape[3]
    if rule.weights.surveys:
        found, statistics = read(call, inputs), given
    else:
        found = follow(call, inputs)
        statistics = tuple(_time_last_but_one(call, found[name]) for name in named(rule.weights.statistics))
    weighed = {
        name: _time_last_but_one(call, found[name])[..., :v] for name in ('output', 'companion') if name in found
    }
    output = weighed['output'].astype(vjp.output_type(rule, operands))
    companion = weighed['companion'].astype(operands.v.dtype) if 'companion' in weighed else None
    return vjp.Residuals(output, statistics, companion)


def backward(here: Target, rule: Rule, operands: Operands, kept: vjp.Residuals, doutput: jax.Array) -> Operands:
    """Returns the gradients of the operands, `None` for segments: one kernel for those of queries, one for keys.

    The gradient of a bias has a third, which sums it over the dimensions that the bias does not have, and which the
    compiler removes where that gradient is not used.
    """
    call = call_of(here, rule, operands)
    delta, companion_delta = vjp.deltas(kept, doutput)
    inputs = _inputs(call, operands) | _rows(call, named(kept.statistics)) | _rows(call, {'delta': delta})
    if companion_delta is not None:
        inputs |= _rows(call, {'companion_delta': companion_delta})
    inputs['doutput'] = call.pad('bgr.t', _channels(doutput.astype(inputs['v'].array.dtype)).swapaxes(3, 4))
    gradients = pull_queries(call, inputs) | pull_keys(call, inputs)
    if 'bias' in inputs:
        gradients['bias'] = pull_bias(call, inputs)
    for name in gradients:
        if name not in ('k', 'v') and inputs[name].letters == 'bgr.t':
            gradients[name] = gradients[name].swapaxes(3, 4)
    if 'slopes' in gradients:
        # Behind the tiles of queries that a call has there may be others, which no step goes over and nobody writes.
        of_queries = gradients['slopes'][..., : call.sizes['t']]
        gradients['slopes'] = jnp.sum(of_queries, axis=(0, 4), keepdims=True)
    return jax.tree.map(
        lambda gradient, operand: jax.lax.slice(gradient, (0,) * operand.ndim, operand.shape).astype(operand.dtype),
        Operands(**gradients),
        operands.floating(),
    )


def _inputs(call: Call, operands: Operands) -> Parts:
    """The operands as the kernels take them."""
    key_type, value_type = factor_type(operands.q, operands.k), factor_type(operands.v)
    parts = {
        'q': call.pad('bgr.t', _channels(operands.q.astype(key_type)).swapaxes(3, 4)),
        'k': call.pad('bgs.', _channels(operands.k.astype(key_type))),
        'v': call.pad('bgs.', _channels(operands.v.astype(value_type))),
    }
    if operands.bias is not None:
        parts['bias'] = _bias(call, operands.bias)
    if operands.slopes is not None:
        parts['slopes'] = Part('bgr..', operands.slopes.astype(jnp.float32))
    if operands.query_forget is not None and operands.key_forget is not None:
        parts |= _rows(call, {'query_forget': operands.query_forget})
        parts['key_forget'] = call.pad('bgr.s', operands.key_forget.astype(jnp.float32))
    if operands.query_segments is not None and operands.key_segments is not None:
        parts['query_segments'] = call.pad('bgr.t', operands.query_segments.astype(jnp.int32).swapaxes(3, 4))
        parts['key_segments'] = call.pad('bgr.s', operands.key_segments.astype(jnp.int32))
    if operands.chosen is not None:
        words, bits, _ = chosen.words_of(operands, call.tile.keys)
        parts['words'] = call.pad('bgrn.t', words[:, :, None, :, None])
        parts['bits'] = call.pad('bgr.s', bits[:, None, None, None])
    return parts


def _bias(call: Call, bias: jax.Array) -> Part:
    """A bias with its one dimension across, or with both; only then it keeps its type, for the memory."""
    t, s = bias.shape[3:]
    if t > 1 and s > 1:
        return call.pad('bgrts', bias.astype(factor_type(bias)))
    bias = bias.astype(jnp.float32)
    if t > 1:
        return call.pad('bgr.t', bias.swapaxes(3, 4))
    return call.pad('bgr.s' if s > 1 else 'bgr..', bias)


def _rows(call: Call, rows: dict[str, jax.Array]) -> Parts:
    """Numbers of every query, `b g r t 1`."""
    return {name: call.pad('bgr.t', row.astype(jnp.float32).swapaxes(3, 4)) for name, row in rows.items()}


def _time_last_but_one(call: Call, array: jax.Array) -> jax.Array:
    """`b g r v t` as `b g r t v`, the padding cut off."""
    return array[..., : call.sizes['t']].swapaxes(3, 4)


def _channels(array: jax.Array) -> jax.Array:
    """An array with channels of zeros behind its last dimension."""
    return jnp.pad(array, ((0, 0),) * (array.ndim - 1) + ((0, -array.shape[-1] % CHANNELS),))
