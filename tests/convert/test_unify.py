"""A trained model whose layers come to share attention weights, and the compensation that is fitted to it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.blocks.unified import UnifiedBlocks
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.convert.unify import unified
from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.heads.language import LanguageHead
from attnlab.models.model import Model
from attnlab.models.stack import Stack
from attnlab.nn.mlps import GatedMLP
from attnlab.nn.positions import Rope
from attnlab.quantize.formats import Symmetric
from attnlab.quantize.layers import Quantization
from attnlab.quantize.training import rounding_called
from attnlab.testing.tolerances import assert_close
from attnlab.zoo import ZOO
from pallas_kernels import Softmax

DIM = 8


@functools.cache
def language_model(**kwargs) -> Model:
    block = spec(Block, mixer=spec(Attention, heads=2, position=Rope(), **kwargs), mlp=spec(GatedMLP, hidden=12))
    stack = spec(Stack, depth=4, blocks=(block,))
    model = spec(Model, dim=DIM, stack=stack, head=spec(LanguageHead), dtype='float32')
    return build(model)(11, rngs=nnx.Rngs(0))


def tokens(length: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 11, (5, length)), jnp.int32)


def read_streams(block: UnifiedBlocks, x: jax.Array, ctx: Context) -> list[tuple[jax.Array, jax.Array]]:
    """The normed input of every layer's attention, and the residual stream after it."""
    return [(step.normed, step.streams) for step in block.steps(x, ctx) if step.name.endswith('mixer')]


def streams(model: Model, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For the layers in groups of two: normed inputs, and residual streams after attention, both averaged over rows."""
    x, ctx, found = model.embedding(tokens(length), model.dtype), Context.full(5, length), []
    for block in model.stack.layers():
        if isinstance(block, UnifiedBlocks):
            found += read_streams(block, x, ctx)
        else:
            normed = block.mixer_norm(x)
            found.append((normed, x + block.mixer(normed, ctx)[0]))
        x, _ = block(x, ctx)
    return [tuple(np.asarray(y, np.float64).mean(axis=0) for y in pair) for pair in found]


@pytest.mark.slow
@pytest.mark.parametrize('length', [5, 12], ids=['interpolated', 'least_squares'])
def test_the_compensation_makes_up_for_the_difference_as_far_as_it_can(length: int):
    model = language_model()
    converted = unified(model, tokens(length), layers=2, begin=2)
    assert [type(block) for block in converted.stack.layers()] == [Block, Block, UnifiedBlocks]
    before, after = streams(model, length), streams(converted, length)
    left = before[3][1] - after[3][1]
    assert_close(after[2][1], before[2][1], dtype=jnp.float32, reduction=DIM * length, what='the leader')
    (*_, group) = converted.stack.layers()
    group.layers[1].compensation.weight[...] = jnp.zeros((DIM, DIM))
    x = model.embedding(tokens(length), model.dtype)
    for block in list(converted.stack.layers())[:2]:
        x, _ = block(x, Context.full(5, length))
    unfitted = before[3][1] - np.asarray(read_streams(group, x, Context.full(5, length))[1][1]).mean(axis=0)
    assert np.abs(unfitted).max() > 1e-2
    if length <= DIM:
        assert np.abs(left).max() < 1e-4 * np.abs(unfitted).max()
    else:
        # What is left is orthogonal to the inputs of the fit.
        assert np.abs(after[3][0].T @ left).max() < 1e-4 * np.abs(after[3][0].T @ unfitted).max()
        assert np.linalg.norm(left) < np.linalg.norm(unfitted)


@pytest.mark.slow
@pytest.mark.parametrize(
    'how', [None, Quantization(Symmetric(4)), rounding_called('int4+int8')], ids=('whole', 'stored', 'rounded')
)
def test_groups_of_one_change_nothing(how):
    model = language_model() if how is None else how(nnx.clone(language_model()))
    converted = unified(model, tokens(6), layers=1)
    ctx = Context.full(5, 6)
    expected, actual = (each.hidden(tokens(6), ctx)[0] for each in (model, converted))
    assert_close(actual, expected, dtype=jnp.float32, reduction=DIM * 6, what='hidden')
    state = converted.init_state(5, 6)
    streamed, _ = converted.hidden(tokens(6), ctx, state)
    assert_close(streamed, expected, dtype=jnp.float32, reduction=DIM * 6, what='streamed')


@pytest.mark.parametrize(('name', 'value'), [('window', 8), ('weights', Softmax(soft_cap=20.0))])
def test_parts_that_a_few_tokens_do_not_show_are_refused(name: str, value):
    with pytest.raises(UserError, match=f'layer 0 is attention with {name}; only plain attention'):
        unified(language_model(**{name: value}), tokens(6), layers=1)


def test_what_cannot_share_weights_is_refused():
    with pytest.raises(UserError, match='layer 0 is not plain softmax attention'):
        unified(language_model(value_dim=3), tokens(6))
    stack = spec(Stack, depth=1, blocks=(spec(Block, mixer=ZOO['mingru'].spec),))
    recurrent = build(spec(Model, dim=DIM, stack=stack, head=spec(LanguageHead), dtype='float32'))
    with pytest.raises(UserError, match='layer 0 is Block; only causal attention blocks'):
        unified(recurrent(11, rngs=nnx.Rngs(0)), tokens(6))
    blocks = tuple(spec(Block, mixer=spec(Attention, heads=heads), mlp=None) for heads in (2, 4))
    mixed = build(
        spec(Model, dim=DIM, stack=spec(Stack, depth=2, blocks=blocks), head=spec(LanguageHead), dtype='float32')
    )
    with pytest.raises(UserError, match='layers 0 to 1 have other heads; those of a group share their weights'):
        unified(mixed(11, rngs=nnx.Rngs(0)), tokens(6), layers=2)
    with pytest.raises(UserError, match='layers is 0 and begin 0; the model has 4 layers'):
        unified(language_model(), tokens(6), layers=0)
