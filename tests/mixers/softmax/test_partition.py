"""One layer of attention computes any continuous function: keys that are affine functions, values that are constants.

Scores `beta (a_i x + b_i)` with `a_i = 2 c_i`, `b_i = -|c_i|^2` are largest for the nearest centre `c_i`: the softmax
looks up the value of a cell of a max-affine partition. Liu, Hu, Song and Liu 2025, https://arxiv.org/abs/2504.19901.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.mixers.softmax.attention import Attention

NEVER = -1e4
"""The constant of an affine function that is nowhere the largest: of tokens that ask."""


def function(x):
    return np.sin(2 * np.pi * x[:, 0]) * np.cos(2 * np.pi * x[:, 1])


def grid(m):
    middle = (np.arange(m) + 0.5) / m
    return np.stack(np.meshgrid(middle, middle, indexing='ij'), axis=-1).reshape(-1, 2)


def layer(beta):
    """Attention of one head whose maps read their parts of a token: x and 1, then a and b, then a value."""
    made = Attention(8, heads=1, key_dim=8, position=None, causal=False, rngs=nnx.Rngs(0))
    query, key, value = (np.zeros((8, 8), np.float32) for _ in range(3))
    query[[0, 1, 2], [0, 1, 2]] = beta * np.sqrt(8)
    key[[3, 4, 5], [0, 1, 2]] = 1.0
    value[6, 0] = 1.0
    for map_, weight in (
        (made.query, query),
        (made.key, key),
        (made.value, value),
        (made.output, np.eye(8, dtype=np.float32)),
    ):
        map_.weight[...] = jnp.asarray(weight)
    return made


def computed(m, beta, asked):
    """What the layer makes of points, among the tokens of `m x m` centres with the function's values there."""
    centres = grid(m)
    tokens = np.zeros((1, len(centres) + len(asked), 8), np.float32)
    tokens[0, : len(centres), 3:5] = 2 * centres
    tokens[0, : len(centres), 5] = -np.sum(centres**2, axis=1)
    tokens[0, : len(centres), 6] = function(centres)
    tokens[0, len(centres) :, :2], tokens[0, len(centres) :, 2] = asked, 1
    tokens[0, len(centres) :, 5] = NEVER
    y, _ = layer(beta)(jnp.asarray(tokens), Context.full(1, tokens.shape[1]))
    return np.asarray(y)[0, len(centres) :, 0]


def test_a_sharp_layer_looks_up_the_nearest_centre():
    asked = np.random.default_rng(0).random((60, 2))
    centres = grid(6)
    apart = ((asked[:, None] - centres[None]) ** 2).sum(-1)
    clear = np.diff(np.sort(apart, axis=1)[:, :2], axis=1)[:, 0] > 2e-3
    np.testing.assert_allclose(computed(6, 1e4, asked)[clear], function(centres)[apart.argmin(1)][clear], atol=1e-3)


@pytest.mark.parametrize('m', [4, 8, 16])
def test_the_error_is_that_of_a_cell(m):
    asked = np.random.default_rng(1).random((200, 2))
    error = np.abs(computed(m, 3 * m**2, asked) - function(asked)).max()
    # The gradient is 2 pi at most, and half the diagonal of a cell 1 / (sqrt(2) m); softness reaches one cell further.
    assert error < 2 * np.pi * 1.5 / (np.sqrt(2) * m)
    assert error > 0.05 / m**2
