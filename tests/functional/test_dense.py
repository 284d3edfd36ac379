"""The softmax over the visible entries of a row: its values, and its derivative, which is made of its weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from attnlab.functional.dense import softmax
from attnlab.testing.noise import noise

SEEN = np.array([[True, True, False, True], [False, False, False, False], [False, True, False, False]])


def test_what_is_not_visible_has_no_weight():
    with jax.enable_x64(True):
        scores = jnp.asarray(8 * noise(3, 4), jnp.float64)
        raised = np.where(SEEN, np.exp(scores), 0)
        expected = raised / np.maximum(raised.sum(axis=-1, keepdims=True), 1e-300)
        np.testing.assert_allclose(softmax(scores, jnp.asarray(SEEN)), expected, rtol=1e-14)


@pytest.mark.parametrize('shape', [(3, 4), (1, 4)])
def test_derivatives_agree_with_differences(shape):
    with jax.enable_x64(True):
        seen = jnp.asarray(SEEN[: shape[0]])
        scores = jnp.asarray(noise(3, 4), jnp.float64)
        check_grads(lambda scores: softmax(jnp.asarray(scores), seen), (scores,), order=2, eps=1e-4)


def test_scores_of_any_size_have_derivatives():
    scores, seen = jnp.array([[1e30, -1e30, 0.0], [jnp.inf, 1.0, 2.0]]), jnp.array([[True] * 3, [False, True, True]])
    weights, moved = jax.jvp(lambda scores: softmax(scores, seen), (scores,), (jnp.ones_like(scores),))
    np.testing.assert_allclose(weights[0], [1, 0, 0])
    np.testing.assert_allclose(moved, 0, atol=1e-6)


def test_weights_are_all_that_is_kept():
    scores, seen = noise(2, 64, seed=1), jnp.ones((1, 64), bool)
    _, pull = jax.vjp(lambda scores: softmax(scores, seen), scores)
    assert sum(kept.size for kept in jax.tree.leaves(pull) if kept.shape == scores.shape) == scores.size
