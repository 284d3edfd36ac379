"""What plain JAX is counted as: what it does is what a trace shows, what it needs are the pairs that are read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attnlab
from attnlab.context import Context
from attnlab.functional.attend import attend, look
from attnlab.functional.block_sparse import Blocks, Compressed, Located, attend_in_stream, choices, scored, weighed
from attnlab.functional.cache import Entries
from attnlab.functional.entropy import row_entropy
from attnlab.functional.reach import Reach
from attnlab.nn.dense_maps import GumbelSoftmax
from attnlab.train import cost
from pallas_kernels import counting

B, T, H, K, V = 2, 48, 4, 8, 6
BLOCKS = Blocks(block=4, stride=2, size=4, count=3, initial=1, local=1)


def summaries(groups):
    ends = jnp.broadcast_to(jnp.arange(3, T, 2, dtype=jnp.int32), (B, T // 2 - 1))
    k, v = (jnp.ones((B, groups, ends.shape[1], size)) for size in (K, V))
    compressed = Compressed(k, v, ends, (ends - 3) // 2)
    return Located(jnp.arange(T, dtype=jnp.int32), jnp.zeros((B, T), jnp.int32)), compressed


def selected(importance, groups):
    here, compressed = summaries(groups)

    def call(q, keys, values):
        return attend_in_stream(
            q, keys, values, queries=here, compressed=compressed, blocks=BLOCKS, importance=importance
        )

    return call, (jnp.ones((B, T, H, K)), jnp.ones((B, groups, T, K)), jnp.ones((B, groups, T, V)))


def choosing(importance, groups):
    here, compressed = summaries(groups)

    def call(q):
        return choices(q, here, compressed, T, BLOCKS, importance).astype(q.dtype)

    return call, (jnp.ones((B, T, H, K)),)


def rows(reach):
    weights = GumbelSoftmax(heads=H, rngs=nnx.Rngs(0))

    def call(q, k, v):
        ctx = Context.full(B, T)
        return attend(q, k, v, look(Entries(k, v, ctx.segments_or_ones()), ctx, reach), weights=weights)

    return call, (jnp.ones((B, T, H, K)), jnp.ones((B, T, 2, K)), jnp.ones((B, T, 2, V)))


def flops(call, arrays, kind, *, gradient):
    def total(*arrays):
        return jnp.sum(call(*arrays))

    function = jax.value_and_grad(total, tuple(range(len(arrays)))) if gradient else total
    return cost._flops(cost._needed(jax.make_jaxpr(function)(*arrays)), kind)


CASES = {
    'weighed': selected(weighed, 2),
    'scored': selected(scored, H),
    'choosing, weighed': choosing(weighed, 2),
    'choosing, scored': choosing(scored, H),
    'rows': rows(Reach()),
    'rows in a window': rows(Reach(window=5, sinks=2)),
    'entropy': (row_entropy, (jnp.ones((B, 70, H, K)), jnp.ones((B, 70, 2, K)))),
}


@pytest.mark.parametrize('gradient', [False, True])
@pytest.mark.parametrize('case', CASES)
def test_what_is_executed_is_what_a_trace_shows(case, gradient):
    call, arrays = CASES[case]
    traced = flops(call, arrays, 'executed', gradient=gradient)
    with counting.counting():
        assert flops(call, arrays, 'executed', gradient=gradient) == traced


@pytest.mark.parametrize('case', [case for case in CASES if case != 'entropy' and 'choosing' not in case])
def test_what_is_needed_are_pairs_that_are_read(case):
    call, arrays = CASES[case]
    places = np.arange(T)
    distance = places[:, None] - places[None]
    compared = 0
    match case:
        case 'rows':
            pairs = np.sum(distance >= 0)
        case 'rows in a window':
            pairs = np.sum((distance >= 0) & ((distance < 5) | (places[None] < 2)))
        case _:
            # The own block up to the query, and as many others as are to be had, but for those that are none.
            pairs = np.sum(np.minimum(places + 1, 2 * 4 + places % 4 + 1))
            ended = places[:, None] >= np.arange(3, T, 2)[None]
            compared = 2 * B * H * K * int(np.sum(ended)) if case == 'scored' else 0
    forward = 2 * B * H * (K + V) * int(pairs)
    with counting.counting():
        assert flops(call, arrays, 'model', gradient=False) == forward + compared
        assert flops(call, arrays, 'model', gradient=True) == 3 * forward + compared


@pytest.mark.parametrize('importance', [weighed, scored])
def test_a_choice_needs_products_with_blocks_that_are_over_unless_others_have_them(importance):
    call, arrays = choosing(importance, H)
    ended = int(np.sum(np.arange(T)[:, None] >= np.arange(3, T, 2)[None]))
    with counting.counting():
        found = [flops(call, arrays, 'model', gradient=gradient) for gradient in (False, True)]
    assert found == [2 * B * H * K * ended if importance is scored else 0] * 2


def calls(jaxpr, kind):
    """The FLOPs of all calls of `attention` in a program."""
    own = sum(
        equation.params[kind].flops
        for equation in jaxpr.eqns
        if equation.primitive.name == 'core_call' and equation.params['core'] == 'attention'
    )
    return own + sum(calls(getattr(each, 'jaxpr', each), kind) for e in jaxpr.eqns for each in cost._programs(e))


def traced(mixer, ctx, *, gradient):
    graphdef, params, rest = nnx.split(mixer, nnx.Param, ...)

    def total(params, x):
        return jnp.sum(nnx.merge(graphdef, params, rest)(x, ctx)[0])

    function = jax.value_and_grad(total, (0, 1)) if gradient else total
    with counting.counting():
        return cost._needed(jax.make_jaxpr(function)(params, jnp.ones((B, T, 16))))


def made(name, **sizes):
    return attnlab.make_mixer(name, 16, rngs=nnx.Rngs(0), **sizes)


PAIRS = T * (T + 1) // 2
NSA = {'compressed_block': 4, 'compressed_stride': 2, 'selected_block': 4, 'selected_blocks': 4, 'window': 5}
READS = {
    # The mean of the values is sums.
    'shaped_attention': ({'heads': 4}, 4 * PAIRS * (4 + 4)),
    # Two maps of scores, and one read by their difference.
    'differential': ({'heads': 4}, PAIRS * (4 * 4 + 2 * 8)),
    # The second layer has the weights of the first.
    'uniattn': ({'heads': 4, 'layers': 2}, 4 * PAIRS * (4 + 4 + 4)),
    # Tokens of a chunk alone.
    'mega': ({'key_dim': 8, 'state': 4, 'chunk': 8}, sum(t % 8 + 1 for t in range(T)) * (8 + 32)),
    # Blocks that are over, a window, and the tokens of four blocks.
    'nsa': (
        {'heads': 4, **NSA},
        4 * sum(len(range(3, t + 1, 2)) + min(t + 1, 5) + min(t + 1, 3 * 4 + t % 4 + 1) for t in range(T)) * (4 + 4),
    ),
}


@pytest.mark.parametrize('name', READS)
def test_what_a_recipe_needs_of_attention_is_what_its_equations_say(name):
    sizes, products = READS[name]
    forward, both = (traced(made(name, **sizes), Context.full(B, T), gradient=each) for each in (False, True))
    assert calls(forward, 'model') == 2 * B * products
    assert calls(both, 'model') == 3 * 2 * B * products


def test_what_attention_does_that_its_recipe_does_not_need_is_executed():
    shaped, plain = (
        calls(traced(made(name, heads=4), Context.full(B, T), gradient=True), 'executed')
        for name in ('shaped_attention', 'mha')
    )
    assert shaped == 2 * plain


def test_the_head_that_selects_needs_no_scores_but_those_it_has():
    selective, plain = (
        traced(made(name, heads=4), Context.full(B, T), gradient=True) for name in ('selective_attention', 'mha')
    )
    assert cost._flops(selective, 'model') == cost._flops(plain, 'model')
    # A product of all pairs of one head of four channels, and two for gradients.
    other = [cost._flops(each, 'executed') - calls(each, 'executed') for each in (selective, plain)]
    assert other[0] - other[1] == 3 * 2 * B * T * T * 4


@pytest.mark.parametrize('name', ['reluformer', 'aero'])
def test_a_penalty_of_rows_needs_no_product_that_attention_has_not(name):
    ctx = Context.full(B, T)
    training = dataclasses.replace(ctx, deterministic=False, dropout_key=jax.random.key(0))
    found = {}
    for mode, given in (('evaluation', ctx), ('training', training)):
        for kind in ('model', 'executed'):
            found[mode, kind] = cost._flops(traced(made(name, heads=4), given, gradient=True), kind)
    assert found['training', 'model'] == found['evaluation', 'model']
    assert found['training', 'executed'] > found['evaluation', 'executed']
