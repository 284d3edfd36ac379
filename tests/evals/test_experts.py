"""Loads of experts and choices without room, counted and shown."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.evals.cadence import AtEnd
from attnlab.evals.experts import ExpertLoads, LayerLoads, Loads, routings
from attnlab.models.layers import entered
from attnlab.tasks.task import context
from attnlab.train.setup import prepare
from attnlab.train.state import joined, split
from configs.language import get_config


def setup_of(arguments: str, **mlp):
    config = get_config(arguments)
    with config.unlocked():
        config.update(batch_size=2, length=16)
        config.model.dim = 8
        config.model.stack.depth = 2
        for block in config.model.stack.blocks:
            block.mlp.update(mlp)
    return prepare(config)


def test_a_config_with_experts_counts_where_tokens_go():
    assert [type(each).__name__ for each in setup_of('zoo=mingru,mlp=moe_hierarchical').evals] == [
        'HeldOut',
        'ExpertLoads',
    ]
    assert len(setup_of('zoo=mingru').evals) == 1


def test_loads_of_every_layer_add_up_and_what_has_no_room_is_counted():
    setup = setup_of('zoo=mingru,mlp=moe', experts=4, active=2, hidden=4, capacity=0.5)
    _, params, buffers = split(setup.make_model(nnx.Rngs(0)))
    found = ExpertLoads(AtEnd(), batches=2).evaluate(setup, joined(params, buffers))
    assert [each.layer for each in found.layers] == [0, 1]
    for each in found.layers:
        # Two batches of 32 tokens, two choices each; four experts with room for 8 of a batch's 64 choices.
        assert each.load.sum() == 128 and 64 <= each.dropped < 128
    assert found.numbers['dropped'] == np.mean([each.share for each in found.layers]) >= 0.5
    assert found.numbers['load'] == max(found.numbers['load@0'], found.numbers['load@1']) >= 1


def test_the_table_has_a_row_a_layer():
    table = Loads([LayerLoads(3, np.array([1, 5, 2, 0]), 2)]).table('a run')
    assert table.rows == [(3, 0.25, 2.5, 0.0)]


def test_a_model_without_experts_and_too_few_rows_are_named():
    setup = setup_of('zoo=mingru')
    _, params, buffers = split(setup.make_model(nnx.Rngs(0)))
    with pytest.raises(UserError, match='this one has none'):
        ExpertLoads(AtEnd()).evaluate(setup, joined(params, buffers))
    with pytest.raises(UserError, match='the valid split has'):
        ExpertLoads(AtEnd(), batches=10**6).load_data(setup)
    with pytest.raises(UserError, match='batches of ExpertLoads is 0'):
        ExpertLoads(AtEnd(), batches=0)


def test_loads_are_of_what_experts_read_past_a_residual_convolution():
    setup = setup_of('zoo=mha,conv=AC,mlp=moe', experts=4, active=1, hidden=4)
    model = setup.make_model(nnx.Rngs(0))
    row = jnp.arange(16, dtype=jnp.int32)[None]
    batch = {'tokens': row, 'positions': row, 'segments': jnp.ones_like(row)}
    found = dict(routings(model, batch['tokens'], context(batch)))
    streams, ctx = entered(model, batch['tokens'], context(batch))
    (block, *_) = model.stack.layers()
    seen = []
    block.mlp.routing = lambda x, *rest, own=block.mlp.routing: seen.append(own(x, *rest)) or seen[-1]
    block(streams, ctx)
    np.testing.assert_array_equal(found[0].experts, seen[0].experts.reshape(-1, 1))
