"""What is true of every mixer by its base class."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.models.stack import Stack
from attnlab.nn.mlps import ConvolvedMLP
from attnlab.nn.preludes import Canon
from attnlab.testing.noise import noise
from attnlab.zoo import ZOO
from tests.chosen import FIRST_OF_ROOM, one_or_all

DIM = 32


@pytest.mark.parametrize('names', one_or_all(FIRST_OF_ROOM, 'room'))
def test_a_call_of_no_tokens_gives_back_what_it_was_given(names):
    for name in names:
        recipe = ZOO[name]
        mixer = build(recipe.reduced()[0])(DIM, rngs=nnx.Rngs(0))
        x, ctx = noise(2, 0, DIM), Context.full(2, 0)
        for state in (None, mixer.init_state(2, 8, x.dtype)) if recipe.streaming else (None,):
            y, after = mixer(x, ctx, state)
            assert y.shape == x.shape and y.dtype == x.dtype, name
            jax.tree.map(np.testing.assert_array_equal, after, state)


def test_a_stack_is_left_as_it_was_by_no_tokens():
    """Short convolutions around a mixer remember nothing new either."""
    prelude = spec(Canon, width=3)
    mlp = spec(ConvolvedMLP, hidden=8, prelude=prelude)
    block = spec(Block, mixer=ZOO['mingru'].spec, mlp=mlp, mixer_prelude=prelude, mlp_prelude=prelude)
    stack = build(spec(Stack, depth=1, blocks=(block,)))(8, rngs=nnx.Rngs(0))
    state = jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), stack.init_state(1, 5, jnp.float32))
    y, after = stack(noise(1, 0, 8), Context.full(1, 0), state)
    assert y.shape == (1, 0, 8)
    jax.tree.map(np.testing.assert_array_equal, after, state)
