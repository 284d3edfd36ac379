"""What is true of every mixer by its base class."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.mixer import Mixer
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


class Returns(Mixer):
    """A mixer whose state is one number a row, and which returns what it is made with in its place."""

    def __init__(self, dim, *, state, rngs):
        del dim, rngs
        self.returned = nnx.data(state)

    def __call__(self, x, ctx, state=None):
        return x, None if state is None else self.returned

    def init_state(self, batch, length, dtype):
        return (jnp.zeros(batch, dtype),)


@pytest.mark.parametrize('state', [None, (), (jnp.zeros((2, 1)),), [jnp.zeros(2)]])
def test_a_mixer_that_does_not_return_its_state_is_named(state):
    mixer, x = Returns(4, state=state, rngs=nnx.Rngs(0)), noise(2, 3, 4)
    with pytest.raises(UserError, match=r'^Returns was given a state and returned .*state, tuple of .* shapes \(2,\)'):
        mixer(x, Context.full(2, 3), mixer.init_state(2, 8, x.dtype))
    assert mixer(x, Context.full(2, 3))[1] is None
