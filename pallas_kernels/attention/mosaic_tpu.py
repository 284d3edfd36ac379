"""The form of `attention` for TPUs: one blockwise template, forward and backward, in Pallas Mosaic TPU.

Blocks lie as `tpu_sweep` says, so that of the seven products of both passes only two, with keys or values transposed,
have a factor to turn round, and that the small one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import tpu_sweep, vjp
from pallas_kernels.attention.maps import Block, Statistics
from pallas_kernels.attention.problem import Operands, Rule
from pallas_kernels.attention.tpu_sweep import Arrays, Call, Part, Parts, Step, Sums, Sweep
from pallas_kernels.target import Target

CHANNELS = 16
"""Head sizes are padded to a multiple of it, the rows of a register of 16-bit numbers."""

LONGEST = 2**16
"""The most pairs of tiles: two lists of so many integers are half of the memory that there is for scalars."""

ADDED = ('bias', 'slopes', 'query_forget', 'key_forget')
"""The operands added to the products of queries and keys."""


@functools.lru_cache
def form(here: Target) -> vjp.Form:
    """Returns `attention` for a TPU, with its gradient."""
    return vjp.differentiable(functools.partial(forward, here), functools.partial(backward, here))


def refusal(here: Target, rule: Rule, operands: Operands) -> str | None:
    """Why the kernels cannot serve a call; `None`: they can."""
    if operands.dtype() != jnp.float32:
        return f'it is computed in {operands.dtype()}; expected operands of at most 32 bits'
    call = tpu_sweep.call(here, rule, operands)
    if 0 in call.sizes.values():
        return 'there is nothing to compute; expected at least one row, head, query and key'
    pairs = sum(map(len, call.visible()))
    if pairs > LONGEST:
        return f'its queries see {pairs} pairs of tiles; expected at most {LONGEST}, of shorter rows or with a window'
    return None


def forward(here: Target, rule: Rule, operands: Operands, given: Statistics) -> vjp.Kept:
    """Returns the output and what is kept; `given` are the statistics of a map that surveys."""
    call = tpu_sweep.call(here, rule, operands)
    inputs = _inputs(call, operands) | _rows(call, _named(given))
    v = operands.v.shape[3]
    if rule.weights.surveys:
        found, statistics = _read(call, inputs), given
    else:
        found = _follow(call, inputs)
        statistics = tuple(_time_last_but_one(call, found[name]) for name in _named(rule.weights.statistics))
    weighed = [
        _time_last_but_one(call, found[name])[..., :v].astype(operands.v.dtype)
        for name in ('output', 'companion')
        if name in found
    ]
    return vjp.Kept(weighed[0], statistics, *weighed[1:])


def backward(here: Target, rule: Rule, operands: Operands, kept: vjp.Kept, doutput: jax.Array) -> Operands:
    """Returns the gradients of the operands, `None` for segments: one kernel for those of queries, one for keys.

    The gradient of a bias has a third, which sums it over the dimensions that the bias does not have, and which the
    compiler leaves out where nobody asks for that gradient.
    """
    call = tpu_sweep.call(here, rule, operands)
    delta, companion_delta = vjp.deltas(kept, doutput)
    inputs = _inputs(call, operands) | _rows(call, _named(kept.statistics)) | _rows(call, {'delta': delta})
    if companion_delta is not None:
        inputs |= _rows(call, {'companion_delta': companion_delta})
    inputs['doutput'] = call.pad('bgr.t', _channels(doutput.astype(inputs['v'].array.dtype)).swapaxes(3, 4))
    gradients = _pull_queries(call, inputs) | _pull_keys(call, inputs)
    if 'bias' in inputs:
        gradients['bias'] = _pull_bias(call, inputs)
    for name in gradients:
        if name not in ('k', 'v') and inputs[name].letters == 'bgr.t':
            gradients[name] = gradients[name].swapaxes(3, 4)
    if 'slopes' in gradients:
        gradients['slopes'] = jnp.sum(gradients['slopes'], axis=(0, 4), keepdims=True)
    return jax.tree.map(
        lambda gradient, operand: jax.lax.slice(gradient, (0,) * operand.ndim, operand.shape).astype(operand.dtype),
        Operands(**gradients),
        operands.floating(),
    )


def _follow(call: Call, inputs: Parts) -> Arrays:
    """The forward pass of a map that keeps up with the keys."""
    weights, v = call.rule.weights, inputs['v'].array.shape[3]

    def add(step: Step, values: Arrays, memory: Arrays) -> None:
        block = _block(call, step, _products(call, values), values)
        before = memory['pivot'][...]
        pivot = jnp.maximum(before, jnp.max(weights.pivot(block), axis=0, keepdims=True))
        numerators, denominators = weights.block(block, pivot)
        rescale = weights.rescale(before, pivot)
        memory['pivot'][...] = pivot
        memory['denominator'][...] = rescale * memory['denominator'][...] + jnp.sum(denominators, axis=0, keepdims=True)
        memory['output'][...] = rescale * memory['output'][...] + _dot(values['v'], numerators, 0, 0)

    def finish(memory: Arrays, results: Arrays) -> None:
        normalizer, statistics = weights.finish(memory['pivot'][...], memory['denominator'][...])
        results['output'][...] = (memory['output'][...] / normalizer).astype(results['output'].dtype)
        for name, row in _named(statistics).items():
            results[name][...] = row

    outputs = {'output': _rowwise(inputs, v, inputs['v'].array.dtype)}
    outputs |= {name: _rowwise(inputs, 1, jnp.float32) for name in _named(weights.statistics)}
    scratch = {
        'pivot': Sums((1, call.tile.queries), weights.start),
        'denominator': Sums((1, call.tile.queries)),
        'output': Sums((v, call.tile.queries)),
    }
    return Sweep(call, 'bgrp', 't', call.by_queries()).run(add, inputs, outputs, scratch, finish)


def _read(call: Call, inputs: Parts) -> Arrays:
    """The forward pass of a map whose statistics are known."""
    weights, v = call.rule.weights, inputs['v'].array.shape[3]

    def add(step: Step, values: Arrays, memory: Arrays) -> None:
        block, statistics = _block(call, step, _products(call, values), values), _statistics(call, values)
        memory['output'][...] += _dot(values['v'], weights.recompute(block, statistics), 0, 0)
        if weights.has_companion:
            memory['companion'][...] += _dot(values['v'], weights.companion(block, statistics), 0, 0)

    names = ('output', 'companion') if weights.has_companion else ('output',)
    outputs = {name: _rowwise(inputs, v, inputs['v'].array.dtype) for name in names}
    scratch = {name: Sums((v, call.tile.queries)) for name in names}
    return Sweep(call, 'bgrp', 't', call.by_queries()).run(add, inputs, outputs, scratch)


def _pull_queries(call: Call, inputs: Parts) -> Arrays:
    """The gradients of queries, of their forget gates, and of the slope as every query has it."""
    k, dtype = inputs['q'].array.shape[3], inputs['q'].array.dtype
    added = tuple(name for name in ('query_forget', 'slopes') if name in inputs)

    def add(step: Step, values: Arrays, memory: Arrays) -> None:
        _, dproducts, dadded = _gradients(call, step, values, added)
        memory['q'][...] += call.rule.scale * _dot(values['k'], dproducts, 0, 0)
        for name in added:
            memory[name][...] += dadded[name]

    outputs = {'q': _rowwise(inputs, k, dtype)} | {name: _rowwise(inputs, 1, jnp.float32) for name in added}
    scratch = {'q': Sums((k, call.tile.queries))} | {name: Sums((1, call.tile.queries)) for name in added}
    return Sweep(call, 'bgrp', 't', call.by_queries()).run(add, inputs, outputs, scratch)


def _pull_keys(call: Call, inputs: Parts) -> Arrays:
    """The gradients of keys and values, summed over the heads of a group, and of the forget gates of keys."""
    added = tuple(name for name in ('key_forget',) if name in inputs)

    def add(step: Step, values: Arrays, memory: Arrays) -> None:
        weights, dproducts, dadded = _gradients(call, step, values, added)
        memory['k'][...] += call.rule.scale * _dot(dproducts, values['q'], 1, 1)
        memory['v'][...] += _dot(weights, values['doutput'], 1, 1)
        for name in added:
            memory[name][step.head] += dadded[name].T

    outputs = {name: Part('bgs.', _like(inputs[name].array)) for name in ('k', 'v')}
    outputs |= {name: Part('bg..s', _like(inputs[name].array)) for name in added}
    scratch = {name: Sums((call.tile.keys, inputs[name].array.shape[3])) for name in ('k', 'v')}
    scratch |= {name: Sums((call.sizes['r'], 1, call.tile.keys)) for name in added}
    return Sweep(call, 'bgpr', 's', call.by_keys()).run(add, inputs, outputs, scratch)


def _pull_bias(call: Call, inputs: Parts) -> jax.Array:
    """The gradient of the bias, summed where it does not vary."""
    letters, array = inputs['bias']

    def add(step: Step, values: Arrays, memory: Arrays) -> None:
        memory['bias'][...] += _gradients(call, step, values, ('bias',))[2]['bias']

    def finish(memory: Arrays, results: Arrays) -> None:
        results['bias'][...] = tpu_sweep.upright(letters, memory['bias'][...]).astype(array.dtype)

    own = ''.join(axis for axis, n in zip('bgr', array.shape, strict=False) if n == call.sizes[axis])
    others = ''.join(axis for axis in 'bgr' if axis not in own)
    still = ''.join(letter for letter in 'ts' if letter in letters)
    pairs = call.by_keys() if still == 's' else call.by_queries()
    scratch = {'bias': Sums((call.tile.keys if 's' in still else 1, call.tile.queries if 't' in still else 1))}
    sweep = Sweep(call, f'{own}p{others}', still, pairs)
    total = sweep.run(add, inputs, {'bias': Part(letters, _like(array))}, scratch, finish)['bias']
    return jnp.where(_visited(call, pairs), total, 0) if still == 'ts' else total


def _gradients(call: Call, step: Step, values: Arrays, names: tuple[str, ...]) -> tuple[jax.Array, jax.Array, Arrays]:
    """The weights of a block, and the gradients of its products and of the operands named that are added to them."""
    weights, statistics = call.rule.weights, _statistics(call, values)

    def of(products: jax.Array, added: Arrays) -> tuple[jax.Array, Block]:
        block = _block(call, step, products, values | added)
        return block.scores, block

    added = {name: values[name] for name in names}
    if 'slopes' in added:
        added['slopes'] = jnp.broadcast_to(added['slopes'], step.rows.shape)
    _, pull, block = jax.vjp(of, _products(call, values), added, has_aux=True)
    found, dweights = weights.recompute(block, statistics), _dot(values['v'], values['doutput'], 1, 0)
    dscores = weights.score_gradient(block, found, statistics, dweights, values['delta'], values.get('companion_delta'))
    return found, *pull(dscores)


def _products(call: Call, values: Arrays) -> jax.Array:
    return call.rule.scale * _dot(values['k'], values['q'], 1, 0)


def _block(call: Call, step: Step, products: jax.Array, values: Arrays) -> Block:
    """The scores of a block, `s t`."""
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
    return Block(scores, visible, step.columns)


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
    if 'bias' in values:
        conditions.append(values['bias'] > -jnp.inf)
    return functools.reduce(jnp.logical_and, conditions, jnp.ones(distance.shape, bool))


def _dot(left: jax.Array, right: jax.Array, over_left: int, over_right: int) -> jax.Array:
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


def _inputs(call: Call, operands: Operands) -> Parts:
    """The operands as the kernels take them."""
    key_type, value_type = _factor_type(operands.q, operands.k), _factor_type(operands.v)
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
    return parts


def _bias(call: Call, bias: jax.Array) -> Part:
    """A bias with its one dimension across, or with both; only then it keeps its type, for the memory."""
    t, s = bias.shape[3:]
    if t > 1 and s > 1:
        return call.pad('bgrts', bias.astype(_factor_type(bias)))
    bias = bias.astype(jnp.float32)
    if t > 1:
        return call.pad('bgr.t', bias.swapaxes(3, 4))
    return call.pad('bgr.s' if s > 1 else 'bgr..', bias)


def _rows(call: Call, rows: dict[str, jax.Array]) -> Parts:
    """Numbers of every query, `b g r t 1`."""
    return {name: call.pad('bgr.t', row.astype(jnp.float32).swapaxes(3, 4)) for name, row in rows.items()}


def _rowwise(inputs: Parts, channels: int, dtype: Any) -> Part:
    """An output of so many channels for every query."""
    *heads, _, t = inputs['q'].array.shape
    return Part('bgr.t', jax.ShapeDtypeStruct((*heads, channels, t), dtype))


def _time_last_but_one(call: Call, array: jax.Array) -> jax.Array:
    """`b g r v t` as `b g r t v`, the padding cut off."""
    return array[..., : call.sizes['t']].swapaxes(3, 4)


def _channels(array: jax.Array) -> jax.Array:
    """An array with channels of zeros behind its last dimension."""
    return jnp.pad(array, ((0, 0),) * (array.ndim - 1) + ((0, -array.shape[-1] % CHANNELS),))


def _factor_type(*arrays: jax.Array) -> jnp.dtype:
    """The type of the factors of a product: there is no matrix unit for other 16-bit numbers than bfloat16."""
    dtype = jnp.result_type(*arrays)
    return dtype if dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)


def _named(statistics: tuple[Any, ...]) -> dict[str, Any]:
    return {f'statistic {place}': row for place, row in enumerate(statistics)}


def _statistics(call: Call, values: Arrays) -> Statistics:
    return tuple(values[name] for name in _named(call.rule.weights.statistics))


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _visited(call: Call, pairs: tpu_sweep.Pairs) -> jax.Array:
    """Which queries and keys are in the tiles of a list, `t s`."""
    t, s = (-(-call.sizes[letter] // size) for letter, size in call.cut().items())
    queries, keys = (jnp.array(tiles) for tiles in zip(*pairs, strict=True))
    tiles = jnp.zeros((t, s), bool).at[queries, keys].set(True)
    return jnp.repeat(jnp.repeat(tiles, call.tile.queries, axis=0), call.tile.keys, axis=1)
