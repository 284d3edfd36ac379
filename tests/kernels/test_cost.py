"""What calls cost, against their definitions: counted by hand, one by one, or by XLA, which sees into references."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Softmax, cost, counting, dispatch, target, tiling
from pallas_kernels.attention import blocks
from pallas_kernels.attention.problem import Rule


def test_visible_pairs_are_those_of_a_mask():
    sizes, windows = ((1, 1), (5, 5), (3, 7), (7, 3), (1, 6)), ((None, 0), (1, 0), (3, 0), (3, 2), (2, 5), (9, 1))
    for (t, s), (window, sinks), causal in itertools.product(sizes, windows, (True, False)):
        keys, distance = np.arange(s), np.arange(t)[:, None] + s - t - np.arange(s)
        visible = (distance >= 0) if causal else np.ones((t, s), bool)
        if window is not None:
            visible &= (abs(distance) < window) | (keys < sinks)
        found = cost.visible_pairs(t, s, causal=causal, window=window, sinks=sinks)
        assert found == visible.sum(), (t, s, window, sinks, causal)


def tiles_seen(t, s, queries, keys, causal, window):
    """The tiles of a mask with something in them."""
    distance = np.arange(t)[:, None] + s - t - np.arange(s)
    visible = (distance >= 0) if causal else np.ones((t, s), bool)
    if window is not None:
        visible &= abs(distance) < window
    visible = np.pad(visible, ((0, -t % queries), (0, -s % keys)))
    return int(visible.reshape(-(-t // queries), queries, -1, keys).any((1, 3)).sum())


@pytest.mark.parametrize(
    ('causal', 'window', 't', 's'), [(True, 128, 2048, 2048), (True, None, 1500, 2100), (False, 300, 2048, 2048)]
)
def test_executed_attention_counts_whole_tiles(causal, window, t, s):
    sizes = {'b': 2, 't': t, 's': s, 'h': 6, 'g': 2, 'k': 64, 'v': 128, 'causal': causal, 'window': window}
    call = {name: cost.attention(**sizes, implementation=name) for name in ('xla', 'mosaic_tpu', 'mosaic_gpu')}

    def scores(queries, keys):
        return 12 * queries * keys * tiles_seen(t, s, queries, keys, causal, window)

    done = scores(512, 512)
    assert call['xla'].executed.forward.flops == 2 * done * (64 + 128)
    assert call['xla'].executed.forward.exponentials == call['xla'].executed.backward.exponentials == done
    # Scores again, and two products for each gradient of a factor.
    assert call['xla'].executed.backward.flops == 2 * done * (3 * 64 + 2 * 128)
    tile = tiling.attention_tpu(t, s)
    done = scores(tile.queries, tile.keys)
    assert call['mosaic_tpu'].executed.forward.flops == 2 * done * (64 + 128)
    assert call['mosaic_tpu'].executed.backward.flops == 2 * done * (4 * 64 + 3 * 128)
    steps = tiling.attention_hopper(64, 128, 3, vectors=0, numbers=2, bias=False)
    found = call['mosaic_gpu'].executed
    assert found.forward.flops == 2 * scores(128, steps.forward) * (64 + 128)
    of_queries, of_keys = scores(128, steps.query_gradients), scores(steps.key_gradients, 128)
    assert found.backward.flops == 2 * (of_queries * (2 * 64 + 128) + of_keys * (2 * 64 + 2 * 128))
    assert found.backward.exponentials == of_queries + of_keys


def test_a_narrow_window_in_blocks_costs_the_blocks():
    rule = Rule(Softmax(), 1.0, True, 128, 0)
    tile = tiling.attention(8192, 8192)
    done = len(blocks.pairs(rule, 8192, 8192, tile)) * tile.queries * tile.keys
    call = cost.attention(b=1, t=8192, s=8192, h=1, g=1, k=64, v=64, window=128, implementation='xla')
    assert call.executed.forward.exponentials == done == 31 * 512 * 512
    assert call.model.forward.exponentials == 128 * 8192 - 127 * 128 // 2


@functools.cache
def _arrays(core: str):
    def draw(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    # One step of recurrences, of loops over which XLA counts one turn.
    q, v, beta = draw(2, 1, 3, 64), draw(2, 1, 3, 32), draw(2, 1, 3)
    rows = draw(2, 1, 256)
    return {
        'attention': {'q': draw(2, 50, 4, 64), 'k': draw(2, 60, 2, 64), 'v': draw(2, 60, 2, 128)},
        'linear_attention': {'q': q, 'k': q, 'v': v, 'log_decay': q},
        'delta_rule': {'q': q, 'k': q, 'v': v, 'beta': beta, 'log_decay': q},
        'diagonal_low_rank': {'q': q, 'k': q, 'v': v, 'a': q, 'b': q, 'log_decay': q},
        'linear_scan': {'x': rows, 'decay': rows},
        'selective_scan': {'x': rows, 'dt': rows, 'A': draw(256, 16), 'B': draw(2, 1, 16), 'C': draw(2, 1, 16)},
        'softmax': {'x': draw(64, 256)},
        'cross_entropy': {'hidden': draw(64, 128), 'embedding': draw(1000, 128)},
    }[core]


OPTIONS = {'attention': {'causal': False}, 'cross_entropy': {'labels': np.zeros(64, np.int32)}}


def entry(core: str, arrays, **options) -> dispatch.Entry:
    with dispatch.ledger() as entries:
        jax.eval_shape(lambda arrays: getattr(pallas_kernels, core)(**arrays, **options), arrays)
    return entries[0]


@pytest.mark.parametrize(
    'core',
    [
        'attention',
        'linear_attention',
        'delta_rule',
        'diagonal_low_rank',
        'linear_scan',
        'selective_scan',
        'softmax',
        'cross_entropy',
    ],
)
def test_operations_are_those_that_xla_counts_in_the_reference(core):
    """Which counts sums, masks and gradients that nobody needs as well, but no exponentials."""
    arrays, options = _arrays(core), OPTIONS.get(core, {}) | {'implementation': 'reference'}
    known = entry(core, arrays, **options).cost.model

    def forward(arrays):
        return getattr(pallas_kernels, core)(**arrays, **options)

    def both(arrays, cotangents):
        outputs, pull = jax.vjp(forward, arrays)
        return outputs, pull(cotangents)

    found = {
        'forward': jax.jit(forward).lower(arrays),
        'both': jax.jit(both).lower(arrays, jax.eval_shape(forward, arrays)),
    }
    counted = {name: lowered.compile().cost_analysis()['flops'] for name, lowered in found.items()}
    assert 0.8 < counted['forward'] / known.forward.flops < 1.45
    assert 0.8 < counted['both'] / (known.forward.flops + known.backward.flops) < 1.45


@pytest.mark.parametrize('core', ['attention', 'linear_attention', 'delta_rule', 'selective_scan', 'cross_entropy'])
def test_the_model_costs_the_same_whatever_form_runs(core):
    costs = {}
    for implementation, here in {'xla': None, 'mosaic_gpu': target.H100, 'mosaic_tpu': target.TPU_V5E}.items():
        arrays = {
            name: jax.ShapeDtypeStruct((x.shape[0], 128, *x.shape[2:]), jnp.bfloat16) if x.ndim > 2 else x
            for name, x in _arrays(core).items()
        }
        if core == 'cross_entropy':
            arrays = {name: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for name, x in arrays.items()}
        with target.compiling_for(here or target.current()):
            found = entry(core, arrays, **OPTIONS.get(core, {}))
        assert found.implementation == implementation
        costs[implementation] = found.cost
    assert len({found.model for found in costs.values()}) == 1
    for found in costs.values():
        assert found.executed.backward.flops > found.model.backward.flops


def flops(closed) -> list[int]:
    """The operations of the calls in a program, those in loops once."""
    found = []
    for equation in getattr(closed, 'jaxpr', closed).eqns:
        if equation.primitive is counting.call:
            found.append(equation.params['model'].flops)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')):
            found += flops(inner) if hasattr(inner, 'eqns') else []
    return found


def test_calls_are_counted_not_computed():
    x = jax.ShapeDtypeStruct((2, 8, 4), jnp.float32)
    known = cost.linear_scan(b=2, t=8, d=4).model

    def loss(x):
        h, last = pallas_kernels.linear_scan(jnp.tanh(x), x)
        return jnp.sum(h) + jnp.sum(last)

    # Traced before, too: what was found then is not taken for what is counted now.
    assert flops(jax.make_jaxpr(jax.jit(loss))(x)) == []
    both = [known.forward.flops, known.backward.flops]
    with counting.counting():
        assert flops(jax.make_jaxpr(jax.jit(loss))(x)) == both[:1]
        gradient = jax.make_jaxpr(jax.grad(loss))(x)
        again = jax.make_jaxpr(jax.grad(jax.checkpoint(loss)))(x)
        mapped = jax.make_jaxpr(jax.vmap(loss))(jax.ShapeDtypeStruct((5, *x.shape), x.dtype))
    assert flops(gradient) == both
    assert sorted(flops(again)) == sorted([*both, known.forward.flops])
    assert flops(mapped) == [5 * known.forward.flops]
    assert [aval.shape for aval in gradient.out_avals] == [x.shape]
    assert flops(jax.make_jaxpr(jax.jit(loss))(x)) == []


def test_integers_and_missing_arguments_have_no_gradients():
    q = jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((2, 8), jnp.int32)

    def loss(q, segments):
        return jnp.sum(pallas_kernels.attention(q, q, q, segments=segments).astype(jnp.float32))

    with counting.counting():
        gradient = jax.make_jaxpr(jax.grad(loss))(q, segments)
    assert [aval.dtype for aval in gradient.out_avals] == [jnp.bfloat16]
    assert len(flops(gradient)) == 2
