"""Branches that are scaled, shifted and gated by what a row is about."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis.lens import residuals
from attnlab.blocks.adaptive import AdaptiveBlock
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.inputs.patches import Patches, ToldPatches
from attnlab.models.model import Model
from attnlab.models.stack import Stack
from attnlab.nn.mlps import GatedMLP
from attnlab.testing.noise import noise, perturbed
from attnlab.train.fit import fit_hashes

DIM = 8
X, CONDITION = noise(2, 5, DIM), noise(2, DIM, seed=1)
CTX = dataclasses.replace(Context.full(2, 5), condition=CONDITION)
BLOCK = functools.partial(
    AdaptiveBlock,
    mixer=functools.partial(Attention, heads=2, causal=False),
    mlp=functools.partial(GatedMLP, hidden=12),
)


def test_at_first_nothing_is_added():
    np.testing.assert_array_equal(BLOCK(DIM, rngs=nnx.Rngs(0))(X, CTX)[0], X)


def test_branches_are_told_by_hand():
    block = perturbed(BLOCK(DIM, rngs=nnx.Rngs(0)))
    c = np.asarray(CONDITION, np.float64)
    told = (c / (1 + np.exp(-c))) @ np.asarray(block.told.weight) + np.asarray(block.told.bias)
    numbers = [part[:, None] for part in np.split(told, 6, axis=1)]
    x = np.asarray(X, np.float64)
    for (shift, scale, gate), norm, branch in (
        (numbers[:3], block.mixer_norm, lambda y: block.mixer(y, CTX)[0]),
        (numbers[3:], block.mlp_norm, block.mlp),
    ):
        normed = np.asarray(norm(jnp.asarray(x, jnp.float32))) * (1 + scale) + shift
        x = x + gate * np.asarray(branch(jnp.asarray(normed, jnp.float32)))
    np.testing.assert_allclose(block(X, CTX)[0], x, rtol=1e-3, atol=1e-4)


def test_rows_are_told_apart_and_layers_all_see_it():
    stack = perturbed(Stack(DIM, depth=2, blocks=(BLOCK,), loop='scan', rngs=nnx.Rngs(0)))
    unrolled = perturbed(Stack(DIM, depth=2, blocks=(BLOCK,), loop='unroll', rngs=nnx.Rngs(0)))
    found = stack(X, CTX)[0]
    np.testing.assert_allclose(found, unrolled(X, CTX)[0], rtol=1e-4, atol=1e-5)
    other = stack(X, dataclasses.replace(CTX, condition=CONDITION.at[1].add(1.0)))[0]
    np.testing.assert_allclose(other[0], found[0], atol=1e-6)
    assert not np.allclose(other[1], found[1], atol=1e-3)


def test_inputs_tell_what_stands_behind_the_pixels():
    told = perturbed(ToldPatches(1, DIM, size=(4, 4), channels=1, told=3, patch=2, rngs=nnx.Rngs(0)))
    plain = Patches(1, DIM, size=(4, 4), channels=1, patch=2, rngs=nnx.Rngs(0))
    for part in ('stem', 'positions'):
        nnx.update(getattr(plain, part), nnx.state(getattr(told, part)))
    tokens = noise(2, 16, 4)
    np.testing.assert_array_equal(told(tokens), plain(tokens[..., :1]))
    hidden = np.asarray(tokens[:, 0, 1:]) @ np.asarray(told.first.weight) + np.asarray(told.first.bias)
    expected = (hidden / (1 + np.exp(-hidden))) @ np.asarray(told.second.weight) + np.asarray(told.second.bias)
    np.testing.assert_allclose(told.condition(tokens), expected, rtol=1e-3, atol=1e-5)
    assert plain.condition(tokens) is None


def test_every_look_at_the_layers_has_what_they_are_told():
    """A model whose inputs tell its blocks something, run layer by layer, is the model."""
    inputs = functools.partial(ToldPatches, size=(4, 4), channels=1, told=3, patch=2)
    stack = functools.partial(Stack, depth=1, blocks=(BLOCK,))
    head, few = functools.partial(ClassificationHead, classes=3), {'inputs': inputs, 'streaming': False}
    model = perturbed(Model(3, dim=DIM, stack=stack, head=head, dtype='float32', rngs=nnx.Rngs(0), **few))
    tokens, ctx = noise(2, 16, 4), Context.full(2, 16)
    found = model.norm(residuals(model, tokens, ctx)[-1])
    np.testing.assert_allclose(found, model.hidden(tokens, ctx)[0], rtol=1e-5, atol=1e-6)
    fit_hashes(model, tokens, ctx, jax.random.key(0))


def test_a_missing_condition_is_named():
    with pytest.raises(UserError, match=r'ctx.condition is None, and an AdaptiveBlock is told by it'):
        BLOCK(DIM, rngs=nnx.Rngs(0))(X, Context.full(2, 5))
