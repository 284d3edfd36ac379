"""What a model is besides its stack: positions at its inputs."""

import functools

import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.context import Context
from attnlab.mixers.linear.attention import LinearAttention
from attnlab.models.model import LanguageModel
from attnlab.models.stack import Stack
from attnlab.nn.positions import Sinusoidal

TOKENS = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]])


def model(positions: Sinusoidal | None) -> LanguageModel:
    block = functools.partial(Block, mixer=functools.partial(LinearAttention, heads=2))
    stack = functools.partial(Stack, depth=1, blocks=(block,))
    return LanguageModel(10, dim=8, stack=stack, positions=positions, dtype=jnp.float32, rngs=nnx.Rngs(0))


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
