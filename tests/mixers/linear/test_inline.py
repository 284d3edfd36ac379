"""InLine attention against its weights, in numpy float64."""

import math

import jax
import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.mixers.linear.inline import InLine
from attnlab.nn.feature_maps import EluPlusOne
from tests.mixers.linear.equations import DIM, HEADS, apply, check_layer, heads, recipe


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


def test_it_keeps_no_state():
    with pytest.raises(UserError, match='a bidirectional mixer cannot be streamed'):
        recipe('inline').init_state(1, 4, np.float64)
