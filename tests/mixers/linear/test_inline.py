"""InLine attention against its weights, in numpy float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.mixers.linear.inline import InLine
from attnlab.nn.feature_maps import EluPlusOne, FixedMap
from tests.mixers.linear.equations import DIM, HEADS, apply, batch, check_layer, heads, recipe


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def gelu(x: np.ndarray) -> np.ndarray:
    return x * np.vectorize(lambda each: 0.5 * (1 + math.erf(each / math.sqrt(2))))(x)


def in_blocks(linear, x: np.ndarray) -> np.ndarray:
    weight, bias = (np.asarray(each[...], np.float64) for each in (linear.weight, linear.bias))
    return np.concatenate([part @ block for part, block in zip(np.split(x, HEADS), weight, strict=True)]) + bias


def inline(mixer: InLine, x: np.ndarray, features=lambda x: x) -> np.ndarray:
    q, k, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.key, mixer.value))
    out, n = np.zeros_like(v), len(x)
    for h in range(HEADS):
        products = features(q[:, h]) @ features(k[:, h]).T / (n * math.sqrt(DIM // HEADS))
        weights = products - products.mean(axis=1, keepdims=True) + 1 / n
        out[:, h] = weights @ v[:, h]
    hidden = gelu(in_blocks(mixer.residual.first, x.mean(axis=0)))
    taps = in_blocks(mixer.residual.second, hidden).reshape(DIM, 3)
    values, out = np.pad(v.reshape(n, DIM), ((1, 1), (0, 0))), out.reshape(n, DIM)
    for t in range(n):
        out[t] += (taps * values[t : t + 3].T).sum(axis=1)
    return apply(mixer.output, out)


def test_the_layer_is_that_of_the_paper():
    check_layer('inline', inline)


def test_with_a_feature_map():
    elu = np.vectorize(lambda x: x + 1 if x > 0 else math.exp(x))
    check_layer('inline', lambda mixer, x: inline(mixer, x, elu), feature_map=EluPlusOne())


class Positive(FixedMap):
    """Positively homogeneous: a multiple of a query has the same multiple of features."""

    def apply(self, x):
        return jax.nn.relu(x)


def test_it_tells_queries_of_one_direction_apart_where_linear_attention_does_not():
    with_map = {'feature_map': Positive(), 'bias': False}
    mixer = recipe('inline', **with_map)
    other = recipe('linear_transformer', causal=False, **with_map)
    mixer.residual.second.weight[...] = jnp.zeros_like(mixer.residual.second.weight[...])
    mixer.residual.second.bias[...] = jnp.zeros_like(mixer.residual.second.bias[...])
    x, ctx = batch(np.ones((1, 6), int))
    x = x.at[:, 0].set(2 * x[:, 1])
    (found, _), (same, _) = mixer(x, ctx), other(x, ctx)
    np.testing.assert_allclose(same[:, 0], same[:, 1], rtol=1e-4, atol=1e-6)
    assert np.abs(found[:, 0] - found[:, 1]).max() > 1e-2 * np.abs(found).max()
    plain, _ = recipe('inline', bias=False)(x, ctx)
    assert np.abs(plain[:, 0] - plain[:, 1]).max() > 1e-2 * np.abs(plain).max()


def test_it_keeps_no_state():
    with pytest.raises(UserError, match='InLine has no causal form; a bidirectional mixer cannot be streamed'):
        recipe('inline').init_state(1, 4, np.float64)
