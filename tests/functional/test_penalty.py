"""What penalties of layers add to the gradient of a training step, whatever its task counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from attnlab.blocks.alignment import Alignment
from attnlab.blocks.block import Block
from attnlab.blocks.softmax_only import EntropyMargin, SoftmaxOnlyBlock
from attnlab.config import build, spec, spec_of
from attnlab.context import Context
from attnlab.data.long_range.digits import Digits
from attnlab.functional.penalty import penalised
from attnlab.models.stack import Stack
from attnlab.nn.experts import MixtureOfExperts
from attnlab.tasks.language import LanguageModelling
from attnlab.tasks.long_range import Classification, Denoising
from attnlab.train.state import initialize, split
from attnlab.train.step import make_step
from attnlab.zoo import ZOO

ROWS, T = 4, 12

LAYERS = {
    'experts': spec(Block, mixer=ZOO['mingru'].spec, mlp=spec(MixtureOfExperts, hidden=4, experts=3, active=1)),
    'rows of weights': spec(Block, mixer=ZOO['reluformer'].sized(heads=2)[0]),
    'entropy': spec(SoftmaxOnlyBlock, heads=2, length=T, penalty=EntropyMargin(weight=1.0, margin=0.0)),
    'alignment': spec(Block, mixer=ZOO['mingru'].spec),
}
"""Layers with each of the penalties that there are."""

TASKS = {
    'language': LanguageModelling(),
    'following': Denoising(Digits(), hidden=None),
    'classes': Classification(Digits()),
}
"""Tasks that count every token, all but one of a row, and rows; nothing of their data is read."""


class Unmoved(nnx.Module):
    """A stack under a loss without a gradient, so that what a step takes is the gradient of penalties alone."""

    streaming = decodes = False
    documents = outputs = 1

    def __init__(self, layer: str, *, rngs: nnx.Rngs):
        alignment = spec_of(Alignment(0.5)) if layer == 'alignment' else None
        self.stack = build(spec(Stack, depth=1, blocks=(LAYERS[layer],), alignment=alignment))(4, rngs=rngs)

    def hidden(self, tokens, ctx, state=None):
        return self.stack(jnp.sin(jnp.stack([n * tokens for n in range(1, 5)], axis=-1)), ctx, state)

    def pooled(self, tokens, ctx):
        return jnp.mean(self.hidden(tokens, ctx)[0], axis=1)

    def losses(self, hidden, targets, key):
        return 0.0 * jnp.sum(hidden, axis=-1)

    def logits(self, hidden):
        return hidden

    def _unasked(self, *args, **named):
        raise NotImplementedError

    sample = init_state = stages = _unasked


def rows():
    tokens = np.random.default_rng(0).normal(size=(ROWS, T)).astype(np.float32)
    return {
        'tokens': tokens,
        'positions': np.tile(np.arange(T, dtype=np.int32), (ROWS, 1)),
        'segments': np.ones((ROWS, T), np.int32),
    }


def batch(task):
    if task == 'language':
        each = {name: np.ones((ROWS, T), np.int32) for name in ('targets', 'bytes')}
        return rows() | each | {'weights': np.ones((ROWS, T), np.float32)}
    return rows() | {'label': np.zeros(ROWS, np.int32), 'weights': np.ones(ROWS, np.float32)}


def taken(layer, task, parts):
    """What a step of gradient descent takes from the parameters."""
    transform = optax.sgd(1.0)
    graphdef = split(Unmoved(layer, rngs=nnx.Rngs(0)))[0]
    state = initialize(lambda rngs: Unmoved(layer, rngs=rngs), transform, 0)
    step = jax.jit(make_step(graphdef, TASKS[task], transform, seed=0, accumulate=parts))
    after, _ = step(state, batch(task), jnp.int32(1))
    return state.params, jax.tree.map(jnp.subtract, state.params, after.params)


def mean_over_tokens(layer, params, parts):
    """The gradient of the layer's own sum over the tokens of a part over their number, in the mean over parts."""
    graphdef, _, buffers = split(Unmoved(layer, rngs=nnx.Rngs(0)))

    def total(params, part):
        ctx = Context(part['positions'], part['segments'], deterministic=False, dropout_key=jax.random.key(0))
        return jnp.sum(0.0 * nnx.merge(graphdef, params, buffers).hidden(part['tokens'], ctx)[0])

    slope = jax.jit(jax.grad(total))
    found = [slope(params, {name: x[i::parts] for name, x in rows().items()}) for i in range(parts)]
    return jax.tree.map(lambda *each: sum(each) / (ROWS * T), *found)


@pytest.mark.parametrize(
    ('layer', 'task', 'parts'),
    [('experts', 'language', 2), ('experts', 'following', 1), *((layer, 'classes', 2) for layer in LAYERS)],
)
def test_a_step_takes_the_gradient_of_the_mean_over_tokens(layer, task, parts):
    params, found = taken(layer, task, parts)
    expected = mean_over_tokens(layer, params, parts)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 1e-4
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize('layer', LAYERS)
def test_as_many_labels_as_tokens_change_no_bit(layer):
    x = jax.random.normal(jax.random.key(0), (3, 7, 4))
    ctx = dataclasses.replace(Context.full(3, 7), deterministic=False, dropout_key=jax.random.key(0))
    graphdef, params, buffers = split(Unmoved(layer, rngs=nnx.Rngs(0)))

    def total(params, labels):
        y, _ = nnx.merge(graphdef, params, buffers).stack(x, dataclasses.replace(ctx, labels=labels))
        return jnp.sum(y**2)

    slope = jax.jit(jax.grad(total))
    for one, other in zip(*map(jax.tree.leaves, (slope(params, None), slope(params, jnp.float32(21)))), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('layer', ['experts', 'rows of weights', 'alignment'])
def test_padding_has_no_part_in_the_mean(layer):
    """Rows of four tokens and three of padding are as rows of four; what stands in padding is of no account."""
    x, segments = jax.random.normal(jax.random.key(0), (3, 7, 4)), jnp.tile(jnp.array([[1, 1, 1, 1, 0, 0, 0]]), (3, 1))
    padded = dataclasses.replace(
        Context.full(3, 7), segments=segments, deterministic=False, dropout_key=jax.random.key(0), labels=jnp.float32(3)
    )
    bare = dataclasses.replace(padded, positions=padded.positions[:, :4], segments=None)
    graphdef, params, buffers = split(Unmoved(layer, rngs=nnx.Rngs(0)))

    def total(params, x, ctx):
        return jnp.sum(0.0 * nnx.merge(graphdef, params, buffers).stack(x, ctx)[0])

    found, expected = jax.grad(total)(params, x, padded), jax.grad(total)(params, x[:, :4], bare)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 1e-3
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(('tokens', 'labels'), [(0, 3.0), (5, 0.0)])
def test_a_part_without_tokens_or_labels_adds_nothing(tokens, labels):
    def total(w):
        return 0.0 * penalised(w, tokens * w, tokens, jnp.float32(labels))

    assert jax.grad(total)(jnp.float32(1.0)) == 0
