"""Mixers that divide by sums of weights, with values that fill whole tiles of the kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.mixers.linear.hashed import HashedAttention
from attnlab.mixers.linear.lizard import Lizard
from attnlab.mixers.linear.mlstm import MLSTM
from attnlab.testing.contract import context
from attnlab.testing.jaxprs import equations
from attnlab.testing.noise import noise, perturbed

DIM = 128

MIXERS = {
    'mlstm': functools.partial(MLSTM, key_dim=4),
    'lizard': functools.partial(Lizard, window=3),
    'ecoformer': functools.partial(HashedAttention, bits=4, anchors=5),
}


@pytest.mark.parametrize('name', MIXERS)
def test_sums_of_weights_apart_are_those_of_a_column_of_ones(name, monkeypatch):
    """With documents, and in parts of a row after states that are not empty."""
    mixer, ctx = perturbed(MIXERS[name](DIM, heads=1, rngs=nnx.Rngs(0)), 0.1), context(((1, 5), (2, 4)), ((1, 9),))
    x = noise(2, 9, DIM)

    def in_two(x):
        state, read = mixer.init_state(2, 9, jnp.float32), []
        for part in (slice(0, 4), slice(4, 9)):
            here = Context(ctx.positions[:, part], ctx.segments[:, part])
            y, state = mixer(x[:, part], here, state)
            read.append(y)
        return jnp.concatenate(read, axis=1), state

    def columns_in_products():
        traced = equations(jax.make_jaxpr(lambda x: mixer(x, ctx)[0])(x).jaxpr)
        products = (each for each in traced if each.primitive.name == 'dot_general')
        return sum(DIM + 1 in operand.aval.shape for each in products for operand in each.invars)

    assert columns_in_products() == 0
    found = jax.jit(lambda x: in_two(x))(x)
    monkeypatch.setattr('attnlab.functional.counted.LANES', 1000)
    assert columns_in_products() > 0
    expected = jax.jit(lambda x: in_two(x))(x)
    for actual, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)
