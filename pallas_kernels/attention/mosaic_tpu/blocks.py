"""The scores of one block of `attention` on TPUs, and the arrays that its kernels read and write."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.maps import Block, Scaled, Statistics
from pallas_kernels.attention.mosaic_tpu.sweep import Arrays, Call, Part, Parts, Step


def products(call: Call, values: Arrays) -> Scaled:
    return Scaled(dot(values['k'], values['q'], 1, 0), call.rule.scale)


def block_of(call: Call, step: Step, products: jax.Array, values: Arrays, made_of: Scaled) -> Block:
    """The scores of a block, `s t`, from its scaled products and what these are made of."""
    cap = call.rule.weights.soft_cap
    scores = products if cap is None else cap * jnp.tanh(products / cap)
    distance = step.rows - step.columns
    visible = _visible(call, step, distance, values) if step.masked else jnp.ones((1, 1), bool)
    if 'bias' in values:
        scores += jnp.where(visible, values['bias'], 0)
    if 'slopes' in values:
        scores -= values['slopes'] * jnp.abs(distance).astype(jnp.float32)
    if 'query_forget' in values:
        scores += values['query_forget'] - values['key_forget']
    plain = cap is None and made_of.scale > 0 and not {'bias', 'slopes', 'query_forget'} & set(values)
    return Block(scores, visible, step.columns, made_of if plain else None)


def _visible(call: Call, step: Step, distance: jax.Array, values: Arrays) -> jax.Array:
    """Which keys of a block its queries may see, `s t`."""
    rule, s = call.rule, call.sizes['s']
    conditions = [step.rows < s, step.columns < s] if call.padded() else []
    if rule.causal:
        conditions.append(distance >= 0)
    if rule.window is not None:
        conditions.append((jnp.abs(distance) < rule.window) | (step.columns < rule.sinks))
    if 'query_segments' in values:
        conditions.append(values['query_segments'] == values['key_segments'])
    if 'words' in values:
        conditions.append((values['words'] & values['bits']) != 0)
    if 'bias' in values:
        # Not `!=`, which in kernels for TPUs is false of a NaN.
        conditions.append(~(values['bias'] == -jnp.inf))
    return functools.reduce(jnp.logical_and, conditions, jnp.ones(distance.shape, bool))


def dot(left: jax.Array, right: jax.Array, over_left: int, over_right: int) -> jax.Array:
    """The product of two matrices over one dimension of each, summed in float32; weights take the type of vectors."""
    dtype = min((left.dtype, right.dtype), key=lambda dtype: dtype.itemsize)
    exact = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        left.astype(dtype),
        right.astype(dtype),
        (((over_left,), (over_right,)), ((), ())),
        precision=exact,
        preferred_element_type=jnp.float32,
    )


def named(statistics: tuple[Any, ...]) -> dict[str, Any]:
    return {f'statistic {place}': row for place, row in enumerate(statistics)}


def statistics_of(call: Call, values: Arrays) -> Statistics:
    return tuple(values[name] for name in named(call.rule.weights.statistics))


def rowwise(inputs: Parts, channels: int, dtype: Any) -> Part:
    """An output of so many channels for every query."""
    *heads, _, t = inputs['q'].array.shape
    return Part('bgr.t', jax.ShapeDtypeStruct((*heads, channels, t), dtype))


def like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
