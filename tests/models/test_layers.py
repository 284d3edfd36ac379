"""The layers of a model, one by one, whatever its stack is."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.blocks.hyper_connections import HyperConnections
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.linear.rwkv7 import RWKV7
from attnlab.mixers.recurrent.diagonal import DiagonalRecurrence
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.heads.language import LanguageHead
from attnlab.models.layers import entered, layers, stacks
from attnlab.models.model import Model
from attnlab.models.stack import LinearStack, Stack, stack_spec
from attnlab.models.two_rates import TwoRates
from attnlab.nn.gates import MinGRUGates

DIM = 8
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 6)), jnp.int32)
MIXERS = (spec(Attention, heads=2), spec(DiagonalRecurrence, gates=spec(MinGRUGates)), spec(Attention, heads=1))


def model(stack):
    return build(spec(Model, dim=DIM, stack=stack, head=spec(LanguageHead), dtype='float32'))(11, rngs=nnx.Rngs(0))


MIXING = spec(RWKV7, heads=2, value_residual=True, rank=2, gate_rank=2, value_rank=2)


@pytest.mark.parametrize(
    ('kind', 'residual', 'mixers'),
    [
        (Stack, None, MIXERS),
        (Stack, spec(HyperConnections), MIXERS),
        (LinearStack, None, MIXERS),
        (Stack, None, (MIXERS[0], MIXING)),
        (LinearStack, None, (MIXING,)),
    ],
)
def test_streams_through_the_layers_one_by_one_are_those_of_the_stack(kind, residual, mixers):
    made = model(stack_spec(mixers, kind=kind, depth=5, mlp=None, residual=residual))
    streams, ctx = entered(made, TOKENS, Context.full(*TOKENS.shape))
    for index, layer in layers(made):
        own, ctx = made.stack.told(index, layer, streams, ctx)
        streams, _ = layer(streams, own.fold_in(index))
    hidden, _ = made.hidden(TOKENS, Context.full(*TOKENS.shape))
    np.testing.assert_allclose(made.norm(made.stack.residual.close(streams)), hidden, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('depth', [3, 5, 6])
def test_every_layer_is_a_repeat_of_a_block_of_the_pattern(depth):
    stack = model(stack_spec(MIXERS, depth=depth, mlp=None)).stack
    for layer, block in enumerate(stack.layers()):
        place, repeat = stack.place(layer)
        own, where = stack.pattern()[place]
        assert where[repeat] == layer and own is stack.blocks[place]
        np.testing.assert_array_equal(block.mixer_norm.scale[...], own.mixer_norm.scale[...][repeat])
        assert type(block.mixer) is type(own.mixer)
    assert sorted(layer for _, where in stack.pattern() for layer in where) == list(range(depth))


def test_stacks_are_found_wherever_they_are_but_layers_are_of_one():
    one = model(stack_spec(MIXERS, depth=3, mlp=None))
    assert stacks(one) == [one.stack] and [index for index, _ in layers(one)] == [0, 1, 2]
    parts = {name: stack_spec(MIXERS, depth=1, mlp=None) for name in ('fast', 'slow')}
    two = model(spec(TwoRates, window=2, **parts))
    assert {id(stack) for stack in stacks(two)} == {id(stack) for stack in two.stack.parts}
    with pytest.raises(UserError, match='the model is a TwoRates; only the layers of one Stack'):
        list(layers(two))
    assert stacks(Block(DIM, mixer=build(MIXERS[0]), rngs=nnx.Rngs(0))) == []
