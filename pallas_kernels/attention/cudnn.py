"""The cuDNN form of `attention`: plain softmax on NVIDIA's GPUs, through `jax.nn.dot_product_attention`.

It runs only if named. Its backward pass sums the gradients of the queries in no fixed order, so that two runs may
differ, which the call cannot change: XLA asks cuDNN for another algorithm if the whole program is compiled with
`jax.jit(..., compiler_options={'xla_gpu_exclude_nondeterministic_ops': True})`.

Kept for the backward pass are the output and the logarithm of the denominators; weights are computed again.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attention import around, vjp
from pallas_kernels.attention.maps import ScalableSoftmax, Softmax
from pallas_kernels.attention.problem import Extras, Operands, Rule, join_heads, split_heads
from pallas_kernels.target import Target

CHANNELS = 8
"""Channels are padded to a multiple of it."""


@functools.lru_cache
def form(here: Target) -> vjp.Form:
    """Returns the form of `attention` for a device; interpreted, XLA computes what cuDNN would."""
    return functools.partial(around.attention, functools.partial(_attention, here))


def refusal(here: Target, rule: Rule, operands: Operands, extras: Extras) -> str | None:
    """The reason why a call cannot be served, or `None`."""
    t, k = operands.q.shape[3:]
    s, v = operands.v.shape[2:]
    if type(rule.weights) not in (Softmax, ScalableSoftmax) or rule.weights.soft_cap is not None:
        return f'the weights are {rule.weights}; expected a softmax without a soft cap'
    unknown = {
        'bias': operands.bias,
        'slopes': operands.slopes,
        'log_forget': operands.query_forget,
        'segments': operands.query_segments,
        'sink_scores': extras.sink_scores,
        'chosen': operands.chosen,
    }
    given = [name for name, array in unknown.items() if array is not None] + (['sinks'] if rule.sinks else [])
    if given:
        return f'{", ".join(given)} were given; expected none of {", ".join(unknown)} and sinks'
    if rule.causal and t != s:
        return f't={t} and s={s}; expected as many queries as keys, or a call that is not causal'
    if rule.window is not None and not rule.causal:
        return f'window is {rule.window} and causal is False; expected a causal call, or no window'
    types = {str(array.dtype) for array in (operands.q, operands.k, operands.v)}
    if types not in ({'bfloat16'}, {'float16'}):
        return f'q, k and v have type {", ".join(sorted(types))}; expected bfloat16 or float16 alike'
    if 0 in (operands.q.size, operands.v.size):
        return f'q has shape {join_heads(operands.q).shape} and s={s}; expected arrays with entries'
    return _device_refusal(here, max(k, v))


def _device_refusal(here: Target, channels: int) -> str | None:
    major = here.capability.partition('.')[0]
    if not major.isdecimal() or int(major) < 8:
        return f'{here.kind} has compute capability {here.capability or "none"}; expected 8.0 (Ampere) or later'
    most = 128 if int(major) < 9 else 256
    if channels > most:
        return f'heads have {channels} channels; expected at most {most} on {here.kind}'
    return None


def _attention(here: Target, rule: Rule, operands: Operands, sink: jax.Array | None) -> jax.Array:
    assert sink is None, 'a call that was refused'
    _, g, s, v = operands.v.shape
    arrays = (join_heads(operands.q), jnp.moveaxis(operands.k, 2, 1), jnp.moveaxis(operands.v, 2, 1))
    # Queries, keys and values must have the same number of channels.
    channels = -(-max(array.shape[-1] for array in arrays) // CHANNELS) * CHANNELS
    q, k, v_padded = (jnp.pad(array, ((0, 0),) * 3 + ((0, channels - array.shape[-1]),)) for array in arrays)
    output = jax.nn.dot_product_attention(
        q,
        k,
        v_padded,
        scale=rule.scale,
        is_causal=rule.causal,
        # How many keys to either side, the query's own not counted.
        local_window_size=None if rule.window is None or rule.window >= s else (rule.window - 1, 0),
        implementation='xla' if here.interpret else 'cudnn',
    )
    return split_heads(output[..., :v], g)
