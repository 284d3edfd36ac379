"""The kernels of `attention` for TPUs that go over the keys of every query, for its output."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attention.maps import Block, Scaled
from pallas_kernels.attention.mosaic_tpu.blocks import block_of, dot, named, products, rowwise, statistics_of
from pallas_kernels.attention.mosaic_tpu.sweep import Arrays, Call, Parts, Step, Sums, Sweep


def follow(call: Call, inputs: Parts) -> Arrays:
    """The forward pass of a map that is computed online."""
    weights, v = call.rule.weights, inputs['v'].array.shape[3]

    def highest(block: Block) -> jax.Array:
        return weights.highest(block, functools.partial(jnp.max, axis=0, keepdims=True))

    def prepare(step: Step, values: Arrays) -> Arrays:
        found = products(call, values)
        block = block_of(call, step, found.scores, values, found)
        return {'products': found.products, 'highest': highest(block)}

    def add(step: Step, values: Arrays, memory: Arrays) -> None:
        found = Scaled(memory['products'][...], call.rule.scale) if step.prepared else products(call, values)
        block = block_of(call, step, found.scores, values, found)
        before = memory['pivot'][...]
        pivot = jnp.maximum(before, memory['highest'][...] if step.prepared else highest(block))
        numerators, denominators = weights.block(block, pivot)
        rescale = weights.rescale(before, pivot)
        memory['pivot'][...] = pivot
        memory['denominator'][...] = rescale * memory['denominator'][...] + jnp.sum(denominators, axis=0, keepdims=True)
        memory['output'][...] = rescale * memory['output'][...] + dot(values['v'], numerators, 0, 0)

    def finish(memory: Arrays, results: Arrays) -> None:
        normalizer, statistics = weights.finish(memory['pivot'][...], memory['denominator'][...])
        results['output'][...] = (memory['output'][...] / normalizer).astype(results['output'].dtype)
        for name, row in named(statistics).items():
            results[name][...] = row

    outputs = {'output': rowwise(inputs, v, inputs['v'].array.dtype)}
    outputs |= {name: rowwise(inputs, 1, jnp.float32) for name in named(weights.statistics)}
    scratch = {
        'pivot': Sums((1, call.tile.queries), weights.start),
        'denominator': Sums((1, call.tile.queries)),
        'output': Sums((v, call.tile.queries)),
        'products': Sums((call.tile.keys, call.tile.queries), None),
        'highest': Sums((1, call.tile.queries), None),
    }
    visits = Sweep('attention_forward', (1, 1), call, 'bgrp', 't', call.by_queries())
    return visits.run(add, inputs, outputs, scratch, finish, prepare)


def read(call: Call, inputs: Parts) -> Arrays:
    """The forward pass of a map whose statistics are known."""
    weights, v = call.rule.weights, inputs['v'].array.shape[3]

    def add(step: Step, values: Arrays, memory: Arrays) -> None:
        block, statistics = _block(call, step, values), statistics_of(call, values)
        memory['output'][...] += dot(values['v'], weights.recompute(block, statistics), 0, 0)
        if weights.has_companion:
            memory['companion'][...] += dot(values['v'], weights.companion(block, statistics), 0, 0)

    names = ('output', 'companion') if weights.has_companion else ('output',)
    outputs = {name: rowwise(inputs, v, inputs['v'].array.dtype) for name in names}
    scratch = {name: Sums((v, call.tile.queries)) for name in names}
    visits = Sweep('attention_forward', (1, len(names)), call, 'bgrp', 't', call.by_queries())
    return visits.run(add, inputs, outputs, scratch)


def _block(call: Call, step: Step, values: Arrays) -> Block:
    found = products(call, values)
    return block_of(call, step, found.scores, values, found)
