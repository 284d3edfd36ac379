"""Layers without a mixer: against their equation, and models of them, which cannot tell the order of patches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import stages
from attnlab.blocks.mixerless import MixerlessBlock
from attnlab.config import build
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.nn.mlps import MLP, NormedGatedMLP
from attnlab.testing.noise import noise, perturbed
from attnlab.train.setup import prepare
from configs import images

NETWORKS = (functools.partial(NormedGatedMLP, hidden=6), functools.partial(MLP, hidden=6, activation='gelu_exact'))


def test_branches_are_added_one_after_the_other_and_share_a_norm():
    block, x, ctx = (
        perturbed(MixerlessBlock(4, networks=NETWORKS, rngs=nnx.Rngs(0))),
        noise(2, 3, 4),
        Context.full(2, 3),
    )
    scale, bias = (np.asarray(each[...], np.float64) for each in (block.norm.scale, block.norm.bias))

    def normed(y):
        y = np.asarray(y, np.float64)
        return (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5) * scale + bias

    expected = np.asarray(x, np.float64)
    for network in block.networks:
        expected = expected + np.asarray(network(jnp.asarray(normed(expected), jnp.float32)))
    y, state = block(x, ctx)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert state is None and block.init_state(2, 3, x.dtype) == () and block(x, ctx, ())[1] == ()
    last = list(stages(block, x, ctx))[-1]
    np.testing.assert_allclose(last.value, y, rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match='networks of MixerlessBlock is empty'):
        MixerlessBlock(4, networks=(), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ('argument', 'same'),
    [
        ('system=activator', True),
        ('system=activator_gates', True),
        ('system=activator,positions=learned', False),
        ('zoo=mha,conv=none,positions=none', False),
    ],
)
def test_the_order_of_patches_changes_nothing_where_none_meets_another(argument, same):
    config = images.get_config(f'{argument},data=digits')
    model = perturbed(build(config.model)(1, dtype=np.float32, rngs=nnx.Rngs(0)), 0.1)
    order, x = np.random.default_rng(0).permutation(64), noise(3, 64, 1)

    @jax.jit
    def logits(x):
        return model.logits(model.pooled(x, Context.full(3, 64)))

    apart = np.abs(np.asarray(logits(x)) - np.asarray(logits(x[:, order]))).max()
    assert (apart < 1e-5) == same, apart


def test_they_are_trained_as_other_layers_are():
    setup = prepare(images.get_config('system=activator,data=cifar10,predict=v'))
    setup.trace()
    block = setup.model.stack.blocks[0]
    assert block.networks[0].up.weight.shape[1:] == (64, 128) and setup.model.embedding.positions is None


@pytest.mark.parametrize(
    ('argument', 'sentence'),
    [
        ('system=activator,zoo=mha', 'zoo=mha is of recipes; system=activator has layers of its own'),
        ('system=activator,norm=dyt', 'norm=dyt is of recipes'),
        ('system=activator,layout=pyramid,token=first', 'has one width; it takes no layout=pyramid, token=first'),
        ('system=activatr', "there is no system=activatr; did you mean 'activator'"),
        ('system=activator,init=paper', 'init=paper goes with recipes'),
    ],
)
def test_arguments_of_recipes_are_refused(argument, sentence):
    with pytest.raises(UserError, match=sentence):
        images.get_config(argument)
