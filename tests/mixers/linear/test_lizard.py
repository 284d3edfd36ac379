"""Lizard against its equations, as sums over pairs of tokens in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.mixers.linear.lizard import Lizard
from attnlab.nn.feature_maps import SignedExponentials
from attnlab.testing.contract import compare_with_differences
from attnlab.testing.noise import noise, perturbed
from tests.mixers.linear.equations import DIM, HEADS, apply, check_layer, heads, sigmoid


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def lizard(mixer: Lizard, x: np.ndarray) -> np.ndarray:
    q, k, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.key, mixer.value))
    gate = sigmoid(apply(mixer.forget, x))
    query, key, metas = (
        np.asarray(p[...], np.float64) for p in (mixer.feature_map.query, mixer.feature_map.key, mixer.metas)
    )
    out = np.zeros_like(v)
    for h in range(HEADS):
        up, down = (np.concatenate([a, -a], axis=1) for a in (q[:, h] @ query[h], k[:, h] @ key[h]))
        for t in range(len(x)):
            gated = [np.exp(up[t]) @ np.exp(down[s]) * gate[s + 1 : t + 1, h].prod() for s in range(t + 1)]
            first = max(0, t + 1 - mixer.reach.window)
            near = np.exp(k[first : t + 1, h] @ q[t, h] / np.sqrt(DIM // HEADS))
            window = near @ v[first : t + 1, h] / (np.exp(metas[h]).sum() + near.sum())
            out[t, h] = gated @ v[: t + 1, h] / sum(gated) + float(mixer.share[...]) * window
    return apply(mixer.output, out.reshape(len(x), -1))


def test_the_layer_is_that_of_the_paper():
    check_layer('lizard', lizard, window=3, metas=2)


def test_gradients_of_the_feature_map_are_differences():
    made = perturbed(SignedExponentials(4, heads=2, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(made)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
    q, k, w = (noise(1, 3, 2, 4, seed=seed, dtype=jnp.float64) for seed in range(3))

    def loss(inputs):
        params, q, k = inputs
        of_query, of_key = nnx.merge(graphdef, params).features(q, k, jnp.zeros((1, 3), jnp.int32))
        weights = jnp.einsum('bthm,bshm->bhts', of_query, of_key)
        return jnp.sum(w * jnp.einsum('bhts,bshk->bthk', weights / weights.sum(-1, keepdims=True), k))

    compare_with_differences('signed exponentials', loss, (params, q, k))


def test_large_queries_do_not_overflow():
    made = SignedExponentials(4, heads=1, rngs=nnx.Rngs(0))
    of_query, _ = made.features(
        jnp.full((1, 1, 1, 4), 200.0, jnp.float32), noise(1, 1, 1, 4), jnp.zeros((1, 1), jnp.int32)
    )
    np.testing.assert_allclose(of_query[0, 0, 0], [1] * 4 + [0] * 4)


def test_errors():
    with pytest.raises(UserError, match='heads is 3; it must divide dim, which is 8'):
        Lizard(DIM, heads=3, rngs=nnx.Rngs(0))
