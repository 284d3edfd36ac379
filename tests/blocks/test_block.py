"""What a block asks of parts, by what their classes say of themselves: parts of one's own take part as attnlab's do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis.interventions import last_map
from attnlab.blocks.block import Block, step
from attnlab.blocks.residual import Addition
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.mixer import Mixer
from attnlab.module import Module
from attnlab.nn.norms import NoNorm
from attnlab.nn.projections import Linear

X = jnp.arange(12.0).reshape(1, 6, 2)
CTX = Context.full(1, 6)
TRAINING = dataclasses.replace(CTX, deterministic=False, dropout_key=jax.random.key(0), labels=jnp.ones(()))


class Nothing(Mixer):
    """y = 0, of nothing but itself."""

    def __init__(self, dim, *, rngs):
        del dim, rngs

    def __call__(self, x, ctx, state=None):
        return jnp.zeros_like(x), state

    def init_state(self, batch, length, dtype):
        return ()


def block(**parts) -> Block:
    return Block(2, mixer=Nothing, rngs=nnx.Rngs(0), **{'norm': NoNorm, **parts})


class OfBatches(NoNorm):
    """The mean of the batch, taken away in training alone."""

    learns_in_training = True

    def in_training(self, x):
        return x - jnp.mean(x)


class Ahead(NoNorm):
    looks_ahead = True


class Sum(Module):
    """A channel mixer with a state: the sum of all inputs so far."""

    remembers = True

    def __init__(self, dim, *, rngs):
        self.map = Linear(dim, dim, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(self, x, segments, state=None):
        total = jnp.cumsum(x, axis=1) + (0 if state is None else state[:, None])
        return total, None if state is None else total[:, -1]

    def init_state(self, batch, dtype):
        return jnp.zeros((batch, 2), dtype)


class Told(Module):
    """A channel mixer that gives one where it has a key, and one more where it has labels."""

    routes = True

    def __init__(self, dim, *, rngs):
        self.map = Linear(dim, dim, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(self, x, key=None, labels=None, segments=None, *, trains=True):
        assert segments is None and (key is None) != trains
        return jnp.full_like(x, (key is not None) + (labels is not None))


def test_a_norm_that_learns_in_training_has_another_form_there():
    made = block(mlp=Told, norm=OfBatches)
    for ctx, mean in ((CTX, 0), (TRAINING, X.mean())):
        mixed, _ = made.steps(X, ctx)
        np.testing.assert_allclose(mixed.normed, X - mean)


def test_a_norm_that_looks_ahead_has_no_stream():
    made = block(norm=Ahead)
    with pytest.raises(UserError, match=r'^Ahead looks at all tokens of a row; a block'):
        made(X, CTX, made.init_state(1, 6, jnp.float32))


def test_a_channel_mixer_that_remembers_goes_on_where_it_stopped():
    made = block(mlp=Sum)
    whole, _ = made(X, CTX)
    np.testing.assert_allclose(whole, X + jnp.cumsum(X, axis=1))
    first, state = made(X[:, :2], Context.full(1, 2), made.init_state(1, 6, jnp.float32))
    second, _ = made(X[:, 2:], Context.full(1, 4, start=2), state)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), whole)


def test_a_channel_mixer_that_routes_has_a_key_in_training_alone():
    made = block(mlp=Told)
    np.testing.assert_array_equal(made(X, CTX)[0], X)
    np.testing.assert_array_equal(made(X, TRAINING)[0], X + 2)


def test_what_blocks_call_in_other_ways_has_no_last_map():
    assert last_map(Sum(2, rngs=nnx.Rngs(0))) is None and last_map(Told(2, rngs=nnx.Rngs(0))) is None


def test_a_part_that_changes_the_shape_is_named():
    def last_token(x):
        return x[:, -1:], None

    with pytest.raises(UserError, match=r'the mixer of a block returned shape \(1, 1, 2\); expected .*\(1, 6, 2\)'):
        step('mixer', X, last_token, norm=lambda x: x, connection=Addition(), ctx=CTX)


def test_a_part_that_changes_the_type_is_named():
    def wide(x):
        return x.astype(jnp.float32), None

    with pytest.raises(UserError, match=r'the mlp of a block returned float32; expected the type of the .* bfloat16'):
        step('mlp', X.astype(jnp.bfloat16), wide, norm=lambda x: x, connection=Addition(), ctx=CTX)
