"""Norms of the stream, by hand and by what they leave unchanged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.nn.norms import DynamicTanh, EvoNormB0, EvoNormS0, LayerNorm, NoNorm, RMSNorm
from attnlab.testing.noise import noise, perturbed

X = 3 * noise(2, 3, 8)
KINDS = {'layernorm': LayerNorm, 'rmsnorm': RMSNorm, 'dyt': DynamicTanh, 'evonorm_s0': EvoNormS0, 'none': NoNorm}


def by_hand(name, norm, x):
    x = np.asarray(x, np.float64)
    if name == 'none':
        return x
    scale, bias = np.asarray(norm.scale[...]), np.asarray(norm.bias[...]) if name != 'rmsnorm' else 0
    if name == 'layernorm':
        return scale * (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) + bias
    if name == 'rmsnorm':
        return scale * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    if name == 'dyt':
        return scale * np.tanh(np.asarray(norm.alpha[...]) * x) + bias
    gated = x / (1 + np.exp(-np.asarray(norm.sharpness[...]) * x))
    return scale * gated / np.sqrt(x.var(-1, keepdims=True) + 1e-5) + bias


@pytest.mark.parametrize('name', KINDS)
def test_by_hand_and_in_the_type_of_its_input(name):
    norm = perturbed(KINDS[name](8, rngs=nnx.Rngs(0)))
    np.testing.assert_allclose(norm(X), by_hand(name, norm, X), rtol=1e-5, atol=1e-5)
    narrow = norm(X.astype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), norm(X), atol=0.1, rtol=0.02)


def test_what_leaves_them_unchanged():
    layer, root = (kind(8, eps=1e-12, rngs=nnx.Rngs(0)) for kind in (LayerNorm, RMSNorm))
    np.testing.assert_allclose(layer(5 * X + 2), layer(X), atol=1e-5)
    np.testing.assert_allclose(root(5 * X), root(X), atol=1e-5)
    assert np.abs(root(X + 2) - root(X)).max() > 0.1
    # A large mean beside a small spread does not cancel.
    np.testing.assert_allclose(layer(X * 2**-8 + 1024), layer(X), atol=0.05)


def test_groups_of_one_token():
    norm = EvoNormS0(8, groups=2, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(norm(X)[..., :4], EvoNormS0(4, rngs=nnx.Rngs(0))(X[..., :4]), rtol=1e-5)
    with pytest.raises(UserError, match='groups of EvoNormS0 is 3; it must divide dim, which is 8'):
        EvoNormS0(8, groups=3, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r'alpha of DynamicTanh is -1.0; it must be positive'):
        DynamicTanh(8, alpha=-1.0, rngs=nnx.Rngs(0))


def of_batches(norm, x, spread):
    """EvoNorm-B0 by hand, with the variance `spread` of the batch."""
    scale, sharpness, bias = (np.asarray(each[...]) for each in (norm.scale, norm.sharpness, norm.bias))
    own = np.sqrt(x.var(1, keepdims=True) + 1e-5)
    return scale * x / np.maximum(np.sqrt(spread + 1e-5), sharpness * x + own) + bias


def test_a_norm_of_batches_by_hand_in_training_and_after():
    norm, x = perturbed(EvoNormB0(8, rngs=nnx.Rngs(0))), np.asarray(X, np.float64)
    spread = x.var((0, 1))
    np.testing.assert_allclose(norm.in_training(X), of_batches(norm, x, spread), rtol=1e-5, atol=1e-5)
    norm.moments[...] = jnp.linspace(1, 2, 9)
    np.testing.assert_allclose(norm(X), of_batches(norm, x, np.linspace(1, 2, 9)[:8]), rtol=1e-5, atol=1e-5)
    assert norm(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    # What it measures is told by the gradient of the moving average: without bias, and counted.
    _, pull = jax.vjp(lambda moments: _with(norm, moments).in_training(X), norm.moments[...])
    np.testing.assert_allclose(pull(jnp.ones_like(X))[0], [*(spread * 6 / 5), 1], rtol=1e-5)
    with pytest.raises(UserError, match='a batch of one token has no variance'):
        norm.in_training(X[:1, :1])


def _with(norm, moments):
    graphdef, params, _ = nnx.split(norm, nnx.Param, ...)
    _, _, buffers = nnx.split(norm, nnx.Param, ...)
    return nnx.merge(graphdef, params, jax.tree.map(lambda _: moments, buffers))


def test_blocks_tell_a_norm_of_batches_what_is_training():
    make = build(spec(Block, mixer=spec(Attention, heads=2, causal=False), norm=spec(EvoNormB0)))
    block = make(8, rngs=nnx.Rngs(0))
    ctx = Context.full(2, 3)
    training = dataclasses.replace(ctx, deterministic=False)
    evaluated, trained = block(X, ctx)[0], block(X, training)[0]
    assert np.abs(evaluated - trained).max() > 0.01
    # Alone, a row is what it was in evaluation, and another in training.
    alone = Context.full(1, 3)
    np.testing.assert_allclose(block(X[:1], alone)[0], evaluated[:1], rtol=1e-5, atol=1e-5)
    assert np.abs(block(X[:1], dataclasses.replace(alone, deterministic=False))[0] - trained[:1]).max() > 0.001
    with pytest.raises(UserError, match='EvoNormB0 looks at all tokens of a row'):
        causal = build(spec(Block, mixer=spec(Attention, heads=2), norm=spec(EvoNormB0)))(8, rngs=nnx.Rngs(0))
        causal(X, ctx, causal.init_state(2, 3, jnp.float32))
