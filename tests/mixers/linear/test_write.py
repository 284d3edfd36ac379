"""Write rules on their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.mixers.linear.write import Additive, Delta
from attnlab.nn.gates import Terms
from attnlab.testing.noise import noise


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def arrays(length: int) -> tuple[jax.Array, ...]:
    return tuple(noise(1, length, 1, 4, seed=seed, dtype=jnp.float64) for seed in range(3))


def test_the_additive_rule_weights_what_is_written():
    q, k, v = arrays(5)
    strength = jnp.abs(noise(1, 5, 1, seed=3, dtype=jnp.float64))
    y, memory = Additive()(q, k, v, Terms(strength=strength), scale=1.0)
    expected = sum(strength[0, t, 0] * np.outer(k[0, t, 0], v[0, t, 0]) for t in range(5))
    np.testing.assert_allclose(memory[0, 0], expected, rtol=1e-12)
    np.testing.assert_allclose(y[0, 4, 0], expected.T @ q[0, 4, 0], rtol=1e-12)
    both = Additive().both_ways(q, k, v, Terms(strength=strength), scale=1.0, segments=None)
    np.testing.assert_allclose(both[0, :, 0], q[0, :, 0] @ expected, rtol=1e-12)


def test_on_orthogonal_keys_the_two_rules_agree():
    q, _, v = arrays(4)
    terms = Terms(strength=jax.nn.sigmoid(noise(1, 4, 1, seed=3, dtype=jnp.float64)))
    keys = jnp.eye(4)[None, :, None]
    for replaced, added in zip(Delta()(q, keys, v, terms), Additive()(q, keys, v, terms), strict=True):
        np.testing.assert_allclose(replaced, added, rtol=1e-12, atol=1e-12)
