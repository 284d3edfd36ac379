"""What a model is besides its stack: positions at its inputs."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.linear.attention import LinearAttention
from attnlab.mixers.mixer import Mixer
from attnlab.models.heads.language import LanguageHead
from attnlab.models.inputs.embedding import Embedding
from attnlab.models.model import Model
from attnlab.models.predictor import Predictor
from attnlab.models.stack import Stack
from attnlab.nn.norms import EvoNormB0, GlobalLayerNorm
from attnlab.nn.positions import Sinusoidal


class OfOnesOwn(GlobalLayerNorm):
    """A norm that no list of names has."""


TOKENS = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]])


def model(positions: Sinusoidal | None) -> Model:
    block = functools.partial(Block, mixer=functools.partial(LinearAttention, heads=2))
    stack = functools.partial(Stack, depth=1, blocks=(block,))
    return Model(10, dim=8, stack=stack, positions=positions, dtype=jnp.float32, rngs=nnx.Rngs(0))


@pytest.mark.parametrize('kind', [EvoNormB0, GlobalLayerNorm, OfOnesOwn])
@pytest.mark.parametrize(
    ('parts', 'place'),
    [
        (lambda norm: {'block': {'norm': norm}}, 'stack.blocks.0.mixer_norm of Model'),
        (lambda norm: {'mixer': {'joint_norm': norm}}, 'stack.blocks.0.mixer.joint_norm of Model'),
        (lambda norm: {'model': {'norm': norm}}, 'norm of Model'),
    ],
)
def test_what_looks_ahead_is_in_no_model_that_predicts_the_next_token(kind, parts, place):
    """Wherever it stands; a model of whole rows may have it."""
    given = {'block': {}, 'mixer': {}, 'model': {}} | parts(kind)
    mixer = functools.partial(LinearAttention, heads=2, **given['mixer'])
    stack = functools.partial(Stack, depth=1, blocks=(functools.partial(Block, mixer=mixer, **given['block']),))
    make = functools.partial(Model, 10, dim=8, stack=stack, dtype=jnp.float32, rngs=nnx.Rngs(0), **given['model'])
    with pytest.raises(UserError, match=f'^{place} is {kind.__name__}, which looks at later tokens; a model that'):
        make()
    assert isinstance(make(streaming=False), Model)


def test_positions_are_added_to_the_embedding_and_begin_anew_with_a_document():
    ctx = Context(jnp.asarray([[0, 1, 2, 3, 4, 0, 1, 2]]), jnp.asarray([[1] * 5 + [2] * 3]))
    with_positions, without = model(Sinusoidal()), model(None)
    added = with_positions.embed(TOKENS, ctx) - without.embed(TOKENS, ctx)
    np.testing.assert_allclose(added, Sinusoidal().encode(ctx.positions, 8), atol=1e-6)
    np.testing.assert_array_equal(without.embed(TOKENS, ctx), without.embedding(TOKENS))


def test_positions_are_streamed():
    waves = model(Sinusoidal())
    whole, _ = waves.hidden(TOKENS, Context.full(1, 8))
    state, pieces = waves.init_state(1, 8), []
    for start, length in ((0, 5), (5, 1), (6, 2)):
        ctx = Context.full(1, length, start=start)
        piece, state = waves.hidden(TOKENS[:, start : start + length], ctx, state)
        pieces.append(piece)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=1e-5)


def test_stages_begin_with_what_the_first_block_is_given():
    waves, ctx = model(Sinusoidal()), Context.full(1, 8)
    first = next(iter(waves.stages(TOKENS, ctx)))
    assert first.name == 'embedding'
    np.testing.assert_array_equal(first.value, waves.embed(TOKENS, ctx))


def test_a_tied_head_is_the_table_of_the_embedding():
    graphdef, params = nnx.split(model(None))
    paths = {'.'.join(map(str, path)) for path, _ in nnx.to_flat_state(params)}
    assert 'embedding.weight' in paths and not any(path.startswith('head') for path in paths)
    made = nnx.merge(graphdef, params)
    made.embedding.weight[...] = 2 * made.embedding.weight[...]
    hidden = jnp.ones((1, 1, 8))
    np.testing.assert_allclose(made.logits(hidden), 2 * model(None).logits(hidden), rtol=1e-6)


def test_models_keep_the_protocol():
    made = model(None)
    assert isinstance(made, Predictor) and made.streaming and made.decodes and made.documents == 1
    with pytest.raises(UserError, match=r'model.pool is None; .* such as MeanPool'):
        made.pooled(TOKENS, Context.full(1, 8))


class Spread(LanguageHead):
    """A head whose losses have a dimension too many."""

    def losses(self, hidden, targets):
        return super().losses(hidden, targets)[..., None]

    def objective(self, hidden, targets, key):
        return self.losses(hidden, targets)


@pytest.mark.parametrize('key', [None, jax.random.key(0)])
def test_a_head_gives_one_loss_per_hidden_state(key):
    made = model(None)
    hidden, _ = made.hidden(TOKENS, Context.full(1, 8))
    assert made.losses(hidden, TOKENS, key).shape == (1, 8)
    made.head = Spread(8, 10, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r'Spread gave losses of shape \(1, 8, 1\); expected .* state, \(1, 8\)'):
        made.losses(hidden, TOKENS, key)


class Patches(Embedding):
    """Inputs whose places are a grid."""

    grid = (2, 4)


class Reader(Mixer):
    """Keeps the grids it was shown."""

    seen: ClassVar[list] = []

    def __init__(self, dim, *, rngs):
        del dim, rngs

    def __call__(self, x, ctx, state=None):
        Reader.seen.append(ctx.grid)
        return x, state

    def init_state(self, batch, length, dtype):
        return ()


def test_the_grid_of_the_inputs_reaches_the_mixers():
    stack = functools.partial(Stack, depth=1, blocks=(functools.partial(Block, mixer=Reader),), loop='unroll')
    made = Model(10, dim=8, stack=stack, inputs=Patches, dtype=jnp.float32, rngs=nnx.Rngs(0))
    Reader.seen.clear()
    made.hidden(TOKENS, Context.full(1, 8))
    list(made.stages(TOKENS, Context.full(1, 8)))
    assert Reader.seen == [(2, 4)] * 2
    with pytest.raises(UserError, match=r'the grid of the inputs is \(2, 4\), 8 positions; the rows have 4'):
        made.hidden(TOKENS[:, :4], Context.full(1, 4))
