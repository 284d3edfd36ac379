"""Softmax-free attention against its equations with exact inverses, in numpy float64."""

import jax
import numpy as np
import pytest

from attnlab.mixers.linear.softmax_free import SoftmaxFreeAttention
from tests.mixers.linear.equations import DIM, HEADS, apply, check_layer, heads
from tests.mixers.linear.test_inline import gelu

PACKED = np.asarray([[1] * 9, [1, 1, 1, 2, 2, 3, 4, 4, 4]])
STRIDE, WIDTH = 2, 3


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def gaussian(a: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.exp(-((a[:, None] - c[None]) ** 2).sum(axis=-1) / 2)


def soft(mixer: SoftmaxFreeAttention, x: np.ndarray) -> np.ndarray:
    q, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.value))
    q = q / (DIM // HEADS) ** 0.25
    scale, shift, taps = (np.asarray(p[...], np.float64) for p in (mixer.norm.scale, mixer.norm.bias, mixer.conv.taps))
    out = np.zeros_like(v)
    for h in range(HEADS):
        filled = np.pad(q[:, h], ((0, -len(x) % STRIDE), (0, 0)))
        made = apply(mixer.landmark, filled.reshape(-1, STRIDE * filled.shape[1]))
        made = (made - made.mean(axis=1, keepdims=True)) / np.sqrt(made.var(axis=1, keepdims=True) + mixer.norm.eps)
        landmarks = gelu(scale * made + shift)
        to, between = gaussian(q[:, h], landmarks), gaussian(landmarks, landmarks)
        inverse = np.linalg.inv(between + 0.01 * np.eye(len(landmarks)))
        if mixer.normalised:
            roots = np.sqrt(between.sum(axis=1))
            inverse = inverse / roots[:, None] / roots
        values = np.pad(v[:, h], ((WIDTH // 2,) * 2, (0, 0)))
        near = np.stack([taps[:, h] @ values[t : t + WIDTH] for t in range(len(x))])
        out[:, h] = to @ inverse @ to.T @ v[:, h] + near
    return apply(mixer.output, out.reshape(len(x), DIM))


@pytest.mark.parametrize('name', ['soft', 'soft_plus'])
def test_the_layer_is_that_of_the_paper(name):
    check_layer(name, soft, PACKED, stride=STRIDE, width=WIDTH, documents=4, iterations=30)
