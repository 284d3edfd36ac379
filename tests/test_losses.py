"""Losses against values worked out by hand, and where float32 ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.losses import next_token_loss, softmax_loss, stablemax_logits


def stablemax_loss(logits, targets):
    """The loss of a head, or a network, of StableMax."""
    return softmax_loss(stablemax_logits(logits), targets)


def of_target(logits, target=0, loss=stablemax_loss):
    return float(loss(jnp.array(logits, jnp.float32), jnp.int32(target)))


def test_stablemax_by_hand():
    # g = 3, 1, 1/2 of a sum of 4.5.
    assert of_target([2.0, 0.0, -1.0], 0) == pytest.approx(np.log(4.5 / 3), rel=1e-6)
    assert of_target([2.0, 0.0, -1.0], 1) == pytest.approx(np.log(4.5), rel=1e-6)
    assert of_target([2.0, 0.0, -1.0], 2) == pytest.approx(np.log(9), rel=1e-6)


def test_softmax_by_hand():
    assert of_target([0.0, np.log(3)], 0, softmax_loss) == pytest.approx(np.log(4), rel=1e-6)


def test_stablemax_has_batches_of_any_shape():
    logits = jnp.array([[[2.0, 0.0], [0.0, 2.0]]])
    np.testing.assert_allclose(stablemax_loss(logits, jnp.array([[0, 0]])), np.log([[4 / 3, 4 / 1]]), rtol=1e-6)


@pytest.mark.parametrize('x', [-3.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 3.0])
def test_the_derivative_of_stablemax_is_that_of_the_equation(x):
    # Against another logit at 0, whose g is 1: loss = log(1 + 1 / g).
    g, slope = (x + 1, 1) if x >= 0 else (1 / (1 - x), 1 / (1 - x) ** 2)
    found = jax.grad(lambda x: stablemax_loss(jnp.stack([x, jnp.float32(0)]), jnp.int32(0)))(jnp.float32(x))
    np.testing.assert_allclose(found, -slope / (g * (g + 1)), rtol=1e-5)


@pytest.mark.parametrize('gap', [20.0, 1000.0])
def test_where_softmax_is_silent_stablemax_is_not(gap):
    logits = jnp.array([gap, 0.0, -gap], jnp.float32)
    gradients = {loss: jax.jit(jax.grad(loss))(logits, jnp.int32(0)) for loss in (softmax_loss, stablemax_loss)}
    assert of_target(logits, 0, softmax_loss) == 0 and gradients[softmax_loss][0] == 0
    assert of_target(logits) > 0 and gradients[stablemax_loss][0] < 0
    assert all(jnp.all(jnp.isfinite(gradient)) for gradient in gradients.values())
    assert np.isfinite(of_target(logits * 1e30, 2))


@pytest.mark.parametrize('loss', [softmax_loss, stablemax_loss, next_token_loss])
@pytest.mark.parametrize('target', [-1, 3])
def test_targets_beyond_the_classes_are_refused_where_they_are_known(loss, target):
    table = (jnp.ones((2, 4)), jnp.ones((3, 4))) if loss is next_token_loss else (jnp.ones((2, 3)),)
    targets, least, most = jnp.array([0, target]), min(target, 0), max(target, 0)
    said = f'^targets are from {least} to {most}; there are 3 classes, so they must be from 0 to 2'
    for function in (loss, jax.grad(lambda *args: jnp.sum(loss(*args)))):
        with pytest.raises(UserError, match=said):
            function(*table, targets)
    assert jnp.all(jnp.isfinite(loss(*table, targets - targets)))


@pytest.mark.parametrize('loss', [softmax_loss, next_token_loss])
def test_targets_beyond_the_classes_are_nan_where_they_are_not_known(loss):
    table = (jnp.ones((4, 4)), jnp.ones((3, 4))) if loss is next_token_loss else (jnp.ones((4, 3)),)
    found = jax.jit(loss)(*table, jnp.array([0, -1, 3, -3]))
    np.testing.assert_array_equal(jnp.isnan(found), [False, True, True, True])
