"""Norms of the stream, by hand and by what they leave unchanged."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.nn.norms import DynamicTanh, EvoNormS0, LayerNorm, NoNorm, RMSNorm
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
