"""Two rates: windows one by one, and their summaries, against both stacks run by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.convolution.gated import GatedConvolution
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.inputs.embedding import Projection
from attnlab.models.model import Model
from attnlab.models.stack import Stack
from attnlab.models.two_rates import TwoRates
from attnlab.nn.pools import MeanPool
from attnlab.testing.contract.gradients import compare_with_differences
from attnlab.testing.noise import noise, perturbed

stack = functools.partial(Stack, depth=2, blocks=(functools.partial(Block, mixer=GatedConvolution),))


@functools.cache
def two_rates():
    """Windows of four tokens, summaries twice as wide."""
    return perturbed(TwoRates(8, fast=stack, slow=stack, window=4, width=2, rngs=nnx.Rngs(0)), 0.1)


def by_hand(x: jax.Array) -> jax.Array:
    """Of one document: every window alone, what it ends in, and the second stack on these."""
    subject, ends = two_rates(), []
    for start in range(0, x.shape[0], 4):
        window = x[None, start : start + 4]
        y, _ = subject.fast(window, Context.full(1, window.shape[1]))
        ends.append(subject.summary(subject.norm(y[:, -1:]))[0, 0])
    return subject.slow(jnp.stack(ends)[None], Context.full(1, len(ends)))[0][0]


@pytest.mark.parametrize('length', [12, 10])
def test_the_definition(length):
    x, ctx = noise(2, length, 8), Context.full(2, length)
    found, state = two_rates()(x, ctx)
    assert state is None and found.shape == (2, 3, 16) and two_rates().dim == 16
    for row in range(2):
        np.testing.assert_allclose(found[row], by_hand(x[row]), rtol=1e-4, atol=1e-5)
    *_, stage = two_rates().stages(x, ctx)
    assert stage.name == 'slow.output'
    np.testing.assert_array_equal(stage.value, found)
    assert [(part.dim, inner.positions.shape) for part, inner in two_rates().stacks(ctx)] == [(8, (6, 4)), (16, (2, 3))]


def test_padding_behind_a_document_is_not_read():
    segments = jnp.asarray([[1] * 6 + [0] * 6, [1] * 12])
    ctx = dataclasses.replace(Context.full(2, 12), segments=segments)
    found, _ = two_rates()(noise(2, 12, 8), ctx)
    np.testing.assert_allclose(found[0, :2], by_hand(noise(2, 12, 8)[0, :6]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[1], by_hand(noise(2, 12, 8)[1]), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(two_rates().context(ctx).segments, [[1, 1, 0], [1, 1, 1]])


def test_gradients_are_those_of_differences():
    """Of all parameters and of the input, with a window that is part padding."""
    with jax.enable_x64(True):
        graphdef, params, rest = nnx.split(two_rates(), nnx.Param, ...)
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        x, weights = noise(1, 8, 8, dtype=jnp.float64), noise(1, 2, 16, seed=1, dtype=jnp.float64)
        ctx = dataclasses.replace(Context.full(1, 8), segments=jnp.asarray([[1] * 6 + [0] * 2]))

        def loss(inputs):
            params, x = inputs
            return jnp.vdot(weights, nnx.merge(graphdef, params, rest)(x, ctx)[0])

        compare_with_differences('two rates', loss, (params, x))
        # Both stacks have gradients, and padding has none.
        found = jax.jit(jax.grad(loss))((params, x))
        assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(found[0]))
        assert np.abs(found[1][0]).max(axis=1).nonzero()[0].max() == 5


def test_a_classifier_reads_the_mean_of_summaries():
    model = Model(
        1,
        dim=8,
        stack=functools.partial(TwoRates, fast=stack, slow=stack, window=4),
        inputs=functools.partial(Projection, features=1),
        head=functools.partial(ClassificationHead, classes=3),
        pool=MeanPool(),
        streaming=False,
        dtype=jnp.float32,
        rngs=nnx.Rngs(0),
    )
    ctx = dataclasses.replace(Context.full(2, 10), segments=jnp.asarray([[1] * 5 + [0] * 5, [1] * 10]))
    hidden, pooled = model.hidden(noise(2, 10, 1), ctx)[0], model.pooled(noise(2, 10, 1), ctx)
    np.testing.assert_allclose(pooled[0], hidden[0, :2].mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pooled[1], hidden[1].mean(axis=0), rtol=1e-5, atol=1e-6)
    assert model.logits(pooled).shape == (2, 3)


def test_mistakes_are_named():
    with pytest.raises(UserError, match='window of TwoRates is 0'):
        TwoRates(8, fast=stack, slow=stack, window=0, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='a model of two rates cannot be streamed'):
        two_rates()(noise(1, 4, 8), Context.full(1, 4), ())
    with pytest.raises(UserError, match='a model of two rates cannot be streamed'):
        two_rates().init_state(1, 4, jnp.float32)
