"""Draws from logits."""

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.functional.sampling import nucleus, sample

LOGITS = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1], [0.1, 0.15, 0.25, 0.5]]))


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p():
    np.testing.assert_array_equal(nucleus(LOGITS, 0.6), [[1, 1, 0, 0], [0, 0, 1, 1]])
    np.testing.assert_array_equal(nucleus(LOGITS, 0.01), [[1, 0, 0, 0], [0, 0, 0, 1]])
    assert nucleus(LOGITS, 1.0).all()


def test_samples_follow_the_tempered_distribution():
    keys = jax.random.split(jax.random.key(0), 4096)
    drawn = jax.vmap(lambda key: sample(LOGITS, key, temperature=0.5, top_p=1.0))(keys)[:, 0]
    expected = np.array([0.5, 0.25, 0.15, 0.1]) ** 2
    expected /= expected.sum()
    found = np.bincount(np.asarray(drawn), minlength=4) / len(keys)
    np.testing.assert_allclose(found, expected, atol=4 * (0.25 / len(keys)) ** 0.5)


def test_temperature_zero_takes_the_likeliest():
    for temperature in (0.0, 1e-320, 1e-39, 1e-20):
        np.testing.assert_array_equal(sample(LOGITS, jax.random.key(0), temperature=temperature, top_p=1.0), [0, 3])
