"""The form of `attention` for TPUs: one blockwise template, forward and backward, in Pallas Mosaic TPU.

Blocks lie as `tpu_sweep` says, so that of the seven products of both passes only two, with keys or values transposed,
have a factor to turn round, and that the small one.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.attention import tpu_sweep, vjp
from pallas_kernels.attention.maps import Block, Statistics
from pallas_kernels.attention.problem import Operands, Rule
from pallas_kernels.attention.tpu_sweep import Arrays, Call, Part, Parts, Step, Sweep
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
    q, v = inputs['q'].array, inputs['v'].array
    weighted = ('output', 'companion') if rule.weights.has_companion else ('output',)
    outputs = {name: _rowwise(q, v.shape[3], v.dtype) for name in weighted}
    scratch = dict.fromkeys(weighted, (v.shape[3], call.tile.queries))
    if rule.weights.surveys:
        body = functools.partial(_weigh, call)
    else:
        body = functools.partial(_follow, call)
        outputs |= {name: _rowwise(q, 1, jnp.float32) for name in _named(rule.weights.statistics)}
        scratch |= dict.fromkeys(('pivot', 'denominator'), (1, call.tile.queries))
    found = Sweep(call, 'bgrp', 't', call.by_queries()).run(body, inputs, outputs, scratch)
    rows = {name: array[..., : call.sizes['t']].swapaxes(3, 4) for name, array in found.items()}
    weighed = [rows[name][..., : operands.v.shape[3]].astype(operands.v.dtype) for name in weighted]
    statistics = given if rule.weights.surveys else tuple(rows[name] for name in _named(rule.weights.statistics))
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


def _pull_queries(call: Call, inputs: Parts) -> Arrays:
    """The gradients of queries, of their forget gates, and of the slope as every query has it."""
    q = inputs['q'].array
    outputs = {'q': _rowwise(q, q.shape[3], q.dtype)}
    scratch = {'q': (q.shape[3], call.tile.queries)}
    for name in ('query_forget', 'slopes'):
        if name in inputs:
            outputs[name] = _rowwise(q, 1, jnp.float32)
            scratch[name] = (1, call.tile.queries)
    sweep = Sweep(call, 'bgrp', 't', call.by_queries())
    return sweep.run(functools.partial(_push_queries, call), inputs, outputs, scratch)


def _pull_keys(call: Call, inputs: Parts) -> Arrays:
    """The gradients of keys and values, summed over the heads of a group, and of the forget gates of keys."""
    outputs = {name: Part('bgs.', _like(inputs[name].array)) for name in ('k', 'v')}
    scratch = {name: (call.tile.keys, inputs[name].array.shape[3]) for name in ('k', 'v')}
    if 'key_forget' in inputs:
        outputs['key_forget'] = Part('bg..s', _like(inputs['key_forget'].array))
    sweep = Sweep(call, 'bgpr', 's', call.by_keys())
    return sweep.run(functools.partial(_push_keys, call), inputs, outputs, scratch)


def _pull_bias(call: Call, inputs: Parts) -> jax.Array:
    """The gradient of the bias, summed where it does not vary."""
    letters, array = inputs['bias']
    own = ''.join(axis for axis, n in zip('bgr', array.shape, strict=False) if n == call.sizes[axis])
    others = ''.join(axis for axis in 'bgr' if axis not in own)
    still = ''.join(letter for letter in 'ts' if letter in letters)
    pairs = call.by_keys() if still == 's' else call.by_queries()
    total = Sweep(call, f'{own}p{others}', still, pairs).run(
        functools.partial(_push_bias, call, letters),
        inputs,
        {'bias': Part(letters, _like(array))},
        {'bias': (call.tile.keys if 's' in still else 1, call.tile.queries if 't' in still else 1)},
    )['bias']
    return jnp.where(_visited(call, pairs), total, 0) if still == 'ts' else total


def _follow(call: Call, step: Step, values: Arrays, results: Arrays, memory: Arrays) -> None:
    """Takes in one tile of keys, for a map that keeps up with the keys."""
    weights = call.rule.weights

    @pl.when(step.first)
    def start() -> None:
        memory['pivot'][...] = jnp.full_like(memory['pivot'], weights.start)
        memory['denominator'][...] = jnp.zeros_like(memory['denominator'])
        memory['output'][...] = jnp.zeros_like(memory['output'])

    block = _block(call, step, _products(call, values), values)
    before = memory['pivot'][...]
    pivot = jnp.maximum(before, jnp.max(weights.pivot(block), axis=0, keepdims=True))
    numerators, denominators = weights.block(block, pivot)
    rescale = weights.rescale(before, pivot)
    memory['pivot'][...] = pivot
    memory['denominator'][...] = rescale * memory['denominator'][...] + jnp.sum(denominators, axis=0, keepdims=True)
    memory['output'][...] = rescale * memory['output'][...] + _dot(values['v'], numerators, 0, 0)

    @pl.when(step.last)
    def finish() -> None:
        normalizer, statistics = weights.finish(memory['pivot'][...], memory['denominator'][...])
        results['output'][...] = (memory['output'][...] / normalizer).astype(results['output'].dtype)
        for name, row in _named(statistics).items():
            results[name][...] = row


def _weigh(call: Call, step: Step, values: Arrays, results: Arrays, memory: Arrays) -> None:
    """Takes in one tile of keys, for a map whose statistics are known."""
    weights, statistics = call.rule.weights, _statistics(call, values)
    _clear(step, memory)
    block = _block(call, step, _products(call, values), values)
    memory['output'][...] += _dot(values['v'], weights.recompute(block, statistics), 0, 0)
    if weights.has_companion:
        memory['companion'][...] += _dot(values['v'], weights.companion(block, statistics), 0, 0)
    _write(step, memory, results)


def _push_queries(call: Call, step: Step, values: Arrays, results: Arrays, memory: Arrays) -> None:
    """Adds what one tile of keys gives to the gradients of queries."""
    _clear(step, memory)
    added = tuple(name for name in ('query_forget', 'slopes') if name in values)
    _, dproducts, dadded = _gradients(call, step, values, added)
    memory['q'][...] += call.rule.scale * _dot(values['k'], dproducts, 0, 0)
    for name in added:
        memory[name][...] += dadded[name]
    _write(step, memory, results)


def _push_keys(call: Call, step: Step, values: Arrays, results: Arrays, memory: Arrays) -> None:
    """Adds what one tile of queries, of one head, gives to the gradients of keys and values."""
    _clear(step, memory)
    added = tuple(name for name in ('key_forget',) if name in values)
    weights, dproducts, dadded = _gradients(call, step, values, added)
    memory['k'][...] += call.rule.scale * _dot(dproducts, values['q'], 1, 1)
    memory['v'][...] += _dot(weights, values['doutput'], 1, 1)
    _write(step, memory, results)
    if added:
        total = results['key_forget']

        @pl.when(step.enters)
        def start() -> None:
            total[step.head] = jnp.zeros_like(total[step.head])

        total[step.head] += tpu_sweep.upright('s', dadded['key_forget'])


def _push_bias(call: Call, letters: str, step: Step, values: Arrays, results: Arrays, memory: Arrays) -> None:
    """Adds what one pair of tiles gives to the gradient of the bias."""
    _clear(step, memory)
    memory['bias'][...] += _gradients(call, step, values, ('bias',))[2]['bias']

    @pl.when(step.last)
    def write() -> None:
        results['bias'][...] = tpu_sweep.upright(letters, memory['bias'][...]).astype(results['bias'].dtype)


def _clear(step: Step, memory: Arrays) -> None:
    @pl.when(step.first)
    def clear() -> None:
        for sums in memory.values():
            sums[...] = jnp.zeros_like(sums)


def _write(step: Step, memory: Arrays, results: Arrays) -> None:
    @pl.when(step.last)
    def write() -> None:
        for name, sums in memory.items():
            results[name][...] = sums[...].astype(results[name].dtype)


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
    found = weights.recompute(block, statistics)
    dscores = weights.score_gradient(
        block,
        found,
        statistics,
        _dot(values['v'], values['doutput'], 1, 0),
        values['delta'],
        values.get('companion_delta'),
    )
    return found, *pull(dscores)


def _products(call: Call, values: Arrays) -> jax.Array:
    return call.rule.scale * _dot(values['k'], values['q'], 1, 0)


def _block(call: Call, step: Step, products: jax.Array, values: Arrays) -> Block:
    """The scores of a block, `s t`."""
    rule, cap = call.rule, call.rule.weights.soft_cap
    scores = products if cap is None else cap * jnp.tanh(products / cap)
    distance = step.rows - step.columns
    visible = list(step.real)
    if rule.causal:
        visible.append(distance >= 0)
    if rule.window is not None:
        visible.append((jnp.abs(distance) < rule.window) | (step.columns < rule.sinks))
    if 'query_segments' in values:
        visible.append(values['query_segments'] == values['key_segments'])
    if 'bias' in values:
        visible.append(values['bias'] > -jnp.inf)
    seen = functools.reduce(jnp.logical_and, visible, step.columns >= 0)
    if 'bias' in values:
        scores += jnp.where(seen, values['bias'], 0)
    if 'slopes' in values:
        scores -= values['slopes'] * jnp.abs(distance).astype(jnp.float32)
    if 'query_forget' in values:
        scores += values['query_forget'] - values['key_forget']
    return Block(scores, seen, step.columns)


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


def _rowwise(q: jax.Array, channels: int, dtype: Any) -> Part:
    """An output of so many channels for every query."""
    return Part('bgr.t', jax.ShapeDtypeStruct((*q.shape[:3], channels, q.shape[4]), dtype))


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
