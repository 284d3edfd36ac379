"""Hashed attention against its weights, in numpy float64."""

import jax
import numpy as np
import pytest

from attnlab.mixers.linear.hashed import HashedAttention
from tests.mixers.linear.equations import HEADS, apply, check_layer, heads

SIZES = {'bits': 6, 'anchors': 7}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def hashed(mixer: HashedAttention, x: np.ndarray, causal: bool = True) -> np.ndarray:
    q, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.value))
    q, out = q / np.linalg.norm(q, axis=-1, keepdims=True), np.zeros_like(v)
    for h in range(HEADS):
        anchors, means, directions = (
            np.asarray(getattr(mixer.hash, name)[...], np.float64)[h] for name in ('anchors', 'means', 'directions')
        )
        distances = ((q[:, None, h] - anchors[None]) ** 2).sum(-1)
        kernels = np.exp(-distances / (2 * float(mixer.hash.spread[...][h]))) - means
        codes = np.where(kernels @ directions.T > 0, 1, -1)
        shared = (codes[:, None] == codes[None]).sum(-1)
        weights = 2 * shared - SIZES['bits'] + SIZES['bits'] + 1.0
        weights = np.tril(weights) if causal else weights
        assert weights[0, 0] == 2 * SIZES['bits'] + 1
        out[:, h] = weights @ v[:, h] / weights.sum(1, keepdims=True)
    return apply(mixer.output, out.reshape(len(x), -1))


@pytest.mark.parametrize('causal', [True, False])
def test_the_layer_weighs_keys_by_the_bits_they_share(causal):
    check_layer('ecoformer', lambda mixer, x: hashed(mixer, x, causal), causal=causal, **SIZES)
