"""The kernels of `attention` for TPUs that form gradients: of queries, of keys and values, and of a bias."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.maps import Block
from pallas_kernels.attention.mosaic_tpu.blocks import block_of, dot, like, products, rowwise, statistics_of
from pallas_kernels.attention.mosaic_tpu.sweep import Arrays, Call, Pairs, Part, Parts, Step, Sums, Sweep, upright


def pull_queries(call: Call, inputs: Parts) -> Arrays:
    """The gradients of queries, of their forget gates, and of the slopes per query."""
    k, dtype = inputs['q'].array.shape[3], inputs['q'].array.dtype
    added = tuple(name for name in ('query_forget', 'slopes') if name in inputs)

    def add(step: Step, values: Arrays, memory: Arrays) -> None:
        _, dproducts, dadded = _gradients(call, step, values, added)
        memory['q'][...] += call.rule.scale * dot(values['k'], dproducts, 0, 0)
        for name in added:
            memory[name][...] += dadded[name]

    outputs = {'q': rowwise(inputs, k, dtype)} | {name: rowwise(inputs, 1, jnp.float32) for name in added}
    scratch = {'q': Sums((k, call.tile.queries))} | {name: Sums((1, call.tile.queries)) for name in added}
    visits = Sweep('attention_query_gradients', (2, 1), call, 'bgrp', 't', call.by_queries())
    return visits.run(add, inputs, outputs, scratch)


def pull_keys(call: Call, inputs: Parts) -> Arrays:
    """The gradients of keys and values, summed over the heads of a group, and of the forget gates of keys."""
    added = tuple(name for name in ('key_forget',) if name in inputs)

    def add(step: Step, values: Arrays, memory: Arrays) -> None:
        weights, dproducts, dadded = _gradients(call, step, values, added)
        memory['k'][...] += call.rule.scale * dot(dproducts, values['q'], 1, 1)
        memory['v'][...] += dot(weights, values['doutput'], 1, 1)
        for name in added:
            memory[name][step.head] += dadded[name].T

    outputs = {name: Part('bgs.', like(inputs[name].array)) for name in ('k', 'v')}
    outputs |= {name: Part('bg..s', like(inputs[name].array)) for name in added}
    scratch = {name: Sums((call.tile.keys, inputs[name].array.shape[3])) for name in ('k', 'v')}
    scratch |= {name: Sums((call.sizes['r'], 1, call.tile.keys)) for name in added}
    visits = Sweep('attention_key_gradients', (2, 2), call, 'bgpr', 's', call.by_keys())
    return visits.run(add, inputs, outputs, scratch)


def pull_bias(call: Call, inputs: Parts) -> jax.Array:
    """The gradient of the bias, summed where it does not vary."""
    letters, array = inputs['bias']

    def add(step: Step, values: Arrays, memory: Arrays) -> None:
        memory['bias'][...] += _gradients(call, step, values, ('bias',))[2]['bias']

    def finish(memory: Arrays, results: Arrays) -> None:
        results['bias'][...] = upright(letters, memory['bias'][...]).astype(array.dtype)

    own = ''.join(axis for axis, n in zip('bgr', array.shape, strict=False) if n == call.sizes[axis])
    others = ''.join(axis for axis in 'bgr' if axis not in own)
    still = ''.join(letter for letter in 'ts' if letter in letters)
    visits = call.by_keys() if still == 's' else call.by_queries(together=still != 'ts')
    scratch = {'bias': Sums((call.tile.keys if 's' in still else 1, call.tile.queries if 't' in still else 1))}
    sweep = Sweep('attention_bias_gradients', (1, 1), call, f'{own}p{others}', still, visits)
    total = sweep.run(add, inputs, {'bias': Part(letters, like(array))}, scratch, finish)['bias']
    return jnp.where(_visited(call, total.shape[3:], visits.pairs), total, 0) if still == 'ts' else total


def _gradients(call: Call, step: Step, values: Arrays, names: tuple[str, ...]) -> tuple[jax.Array, jax.Array, Arrays]:
    """The weights of a block, and the gradients of its products and of the named operands added to them."""
    weights, statistics, made_of = call.rule.weights, statistics_of(call, values), products(call, values)

    def of(scaled_products: jax.Array, added: Arrays) -> tuple[jax.Array, Block]:
        block = block_of(call, step, scaled_products, values | added, made_of)
        return block.scores, block

    added = {name: values[name] for name in names}
    if 'slopes' in added:
        added['slopes'] = jnp.broadcast_to(added['slopes'], step.rows.shape)
    _, pull, block = jax.vjp(of, made_of.scores, added, has_aux=True)
    found, dweights = weights.recompute(block, statistics), dot(values['v'], values['doutput'], 1, 0)
    dscores = weights.score_gradient(block, found, statistics, dweights, values['delta'], values.get('companion_delta'))
    return found, *pull(dscores)


def _visited(call: Call, shape: tuple[int, ...], pairs: Pairs) -> jax.Array:
    """Which queries and keys are in the tiles of a list, `t s`."""
    t, s = (n // size for n, size in zip(shape, call.cut().values(), strict=True))
    queries, keys = (jnp.array(tiles) for tiles in zip(*pairs, strict=True))
    tiles = jnp.zeros((t, s), bool).at[queries, keys].set(True)
    return jnp.repeat(jnp.repeat(tiles, call.tile.queries, axis=0), call.tile.keys, axis=1)
