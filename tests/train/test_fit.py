"""Hashes are fitted before the first step, layer by layer, and never after."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.config import spec
from attnlab.errors import UserError
from attnlab.mixers.linear.hashed import HashedAttention
from attnlab.models.stack import LinearStack, stack_spec
from attnlab.tasks.task import context
from attnlab.train.fit import ROWS, with_hashes_fitted
from attnlab.train.setup import prepare
from configs.recall import get_config


def setup_of(zoo):
    config = get_config(f'task=mqar,zoo={zoo}')
    with config.unlocked():
        config.update(batch_size=4, steps=1)
        config.model.dim = 8
        config.model.stack.depth = 2
    return prepare(config)


def test_every_layer_is_fitted_to_what_layers_before_it_give():
    setup = setup_of('ecoformer')
    state = setup.initialize()
    after = with_hashes_fitted(setup, state)
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    model = nnx.merge(setup.graphdef, after.variables)
    source = setup.task.source('train', setup.length)
    rows = [source[index] for index in range(ROWS)]
    batch = {name: jnp.asarray(np.stack([row[name] for row in rows])) for name in rows[0]}
    ctx = model.context(context(batch), batch['tokens'])
    streams = model.embed(batch['tokens'], ctx)
    for block in model.stack.layers():
        assert isinstance(block.mixer, HashedAttention) and block.mixer.hash.fitted[...]
        vectors = np.asarray(block.mixer.hashed(block.mixer_norm(streams)))[0]
        for head, anchors in enumerate(np.asarray(block.mixer.hash.anchors[...])):
            apart = np.abs(vectors[:, head][None] - anchors[:, None]).max(-1)
            assert (apart.min(axis=1) < 1e-4).all()
        streams, _ = block(streams, ctx)
    again = with_hashes_fitted(setup, after)
    jax.tree.map(np.testing.assert_array_equal, again.buffers, after.buffers)


def test_layers_without_hashes_of_their_own_cannot_be_fitted():
    config = get_config('task=mqar,zoo=ecoformer')
    with config.unlocked():
        config.model.stack = stack_spec((spec(HashedAttention, heads=2),), kind=LinearStack, depth=3, mlp=None)
    setup = prepare(config)
    with pytest.raises(UserError, match='layers of a LinearStack share two sets of parameters'):
        with_hashes_fitted(setup, setup.initialize())


def test_a_model_without_hashes_is_left_as_it_is():
    setup = setup_of('mingru')
    state = setup.initialize()
    assert with_hashes_fitted(setup, state) is state
