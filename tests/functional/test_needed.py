"""What plain JAX is counted as: what it does is what a trace shows, what it needs are the pairs that are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.functional.attend import attend, look
from attnlab.functional.block_sparse import Blocks, Compressed, Located, attend_selected, scored, weighed
from attnlab.functional.cache import Entries
from attnlab.functional.reach import Reach
from attnlab.nn.dense_maps import GumbelSoftmax
from attnlab.train import cost
from pallas_kernels import counting

B, T, H, K, V = 2, 48, 4, 8, 6
BLOCKS = Blocks(block=4, stride=2, size=4, count=3, initial=1, local=1)


def selected(importance, groups):
    ends = jnp.broadcast_to(jnp.arange(3, T, 2, dtype=jnp.int32), (B, T // 2 - 1))
    k, v = (jnp.ones((B, groups, ends.shape[1], size)) for size in (K, V))
    compressed = Compressed(k, v, ends, (ends - 3) // 2)
    here = Located(jnp.arange(T, dtype=jnp.int32), jnp.zeros((B, T), jnp.int32))

    def call(q, keys, values):
        return attend_selected(
            q, keys, values, queries=here, compressed=compressed, blocks=BLOCKS, importance=importance
        )

    return call, (jnp.ones((B, T, H, K)), jnp.ones((B, groups, T, K)), jnp.ones((B, groups, T, V)))


def rows(reach):
    weights = GumbelSoftmax(heads=H, rngs=nnx.Rngs(0))

    def call(q, k, v):
        ctx = Context.full(B, T)
        return attend(q, k, v, look(Entries(k, v, ctx.segments_or_ones()), ctx, reach), weights=weights)

    return call, (jnp.ones((B, T, H, K)), jnp.ones((B, T, 2, K)), jnp.ones((B, T, 2, V)))


def flops(call, arrays, kind, *, gradient):
    def total(*arrays):
        return jnp.sum(call(*arrays))

    function = jax.value_and_grad(total, (0, 1, 2)) if gradient else total
    return cost._flops(cost._needed(jax.make_jaxpr(function)(*arrays)), kind)


CASES = {
    'weighed': selected(weighed, 2),
    'scored': selected(scored, H),
    'rows': rows(Reach()),
    'rows in a window': rows(Reach(window=5, sinks=2)),
}


@pytest.mark.parametrize('gradient', [False, True])
@pytest.mark.parametrize('case', CASES)
def test_what_is_executed_is_what_a_trace_shows(case, gradient):
    call, arrays = CASES[case]
    traced = flops(call, arrays, 'executed', gradient=gradient)
    with counting.counting():
        assert flops(call, arrays, 'executed', gradient=gradient) == traced


@pytest.mark.parametrize('case', CASES)
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
