"""Lizard against its equations, as sums over pairs of tokens in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.linear.lizard import Lizard
from attnlab.nn.feature_maps import SignedExponentials
from attnlab.nn.positions import Rope
from attnlab.testing.noise import noise, perturbed
from tests.mixers.linear.equations import DIM, HEADS, apply, check_layer, heads, sigmoid


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def rotated(x: np.ndarray) -> np.ndarray:
    """The halves of the channels as complex numbers, turned by their place."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)[None]
    turned = np.exp(1j * angle)[:, None] * (x[..., :half] + 1j * x[..., half:])
    return np.concatenate([turned.real, turned.imag], axis=-1)


def lizard(mixer: Lizard, x: np.ndarray) -> np.ndarray:
    q, k, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.key, mixer.value))
    turned, turned_keys = (q, k) if mixer.position is None else (rotated(q), rotated(k))
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
            near = np.exp(turned_keys[first : t + 1, h] @ turned[t, h] / np.sqrt(DIM // HEADS))
            window = near @ v[first : t + 1, h] / (np.exp(metas[h]).sum() + near.sum())
            out[t, h] = gated @ v[: t + 1, h] / sum(gated) + float(mixer.share[...]) * window
    return apply(mixer.output, out.reshape(len(x), -1))


def test_the_layer_is_that_of_the_paper():
    check_layer('lizard', lizard, window=3, metas=2)
    check_layer('lizard', lizard, window=3, metas=2, position=Rope())


@pytest.mark.slow
@pytest.mark.parametrize('logit', [-8.0, 8.0])
def test_over_a_long_sequence_in_bfloat16_it_stays_near_the_equations(logit):
    length, window = 65536, 3
    mixer = perturbed(Lizard(DIM, heads=1, window=window, rngs=nnx.Rngs(0)))
    mixer.forget.weight[...] = mixer.forget.weight[...].at[0].set(logit)
    x = noise(1, length, DIM, dtype=jnp.bfloat16).at[..., 0].set(1)
    y, _ = jax.jit(mixer)(x, Context.full(1, length))
    rows = np.asarray(x[0], np.float64)
    q, k, v = (apply(linear, rows) for linear in (mixer.query, mixer.key, mixer.value))
    (query,), (key,), (metas,) = (
        np.asarray(p[...], np.float64) for p in (mixer.feature_map.query, mixer.feature_map.key, mixer.metas)
    )
    of_query, of_key = (np.exp(np.concatenate([a, -a], axis=1)) for a in (q @ query, k @ key))
    gate, memory, out = sigmoid(apply(mixer.forget, rows))[:, 0], np.zeros((2 * DIM, DIM + 1)), np.zeros_like(v)
    with_ones = np.concatenate([v, np.ones((length, 1))], axis=1)
    for t in range(length):
        memory = gate[t] * memory + np.outer(of_key[t], with_ones[t])
        read = of_query[t] @ memory
        out[t] = read[:-1] / read[-1]
    lagged = [np.pad(a, ((window - 1, 0), (0, 0))) for a in (k, with_ones)]
    for_lag = [tuple(a[i : i + length] for a in lagged) for i in range(window)]
    near = sum(np.exp((q * a).sum(1, keepdims=True) / np.sqrt(DIM)) * b for a, b in for_lag)
    latest = near[:, :-1] / (np.exp(metas).sum() + near[:, -1:])
    expected = apply(mixer.output, out + float(mixer.share[...]) * latest)
    assert jnp.all(jnp.isfinite(y))
    np.testing.assert_allclose(np.asarray(y[0], np.float64), expected, rtol=0, atol=0.02 * np.abs(expected).max())


def test_large_queries_do_not_overflow():
    made = SignedExponentials(4, heads=1, rngs=nnx.Rngs(0))
    of_query, _ = made.features(
        jnp.full((1, 1, 1, 4), 200.0, jnp.float32), noise(1, 1, 1, 4), jnp.zeros((1, 1), jnp.int32)
    )
    np.testing.assert_allclose(of_query[0, 0, 0], [1] * 4 + [0] * 4)


def test_errors():
    with pytest.raises(UserError, match='heads is 3; it must divide dim, which is 8'):
        Lizard(DIM, heads=3, rngs=nnx.Rngs(0))
