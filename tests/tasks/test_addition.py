"""Modular addition as a task: what is counted as collapsed, and the network that learns it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.data.synthetic.addition import ModularAddition
from attnlab.errors import UserError
from attnlab.models.perceptron import Perceptron
from attnlab.tasks.addition import Addition


class Given(Perceptron):
    """Gives these logits, whatever the sums."""

    def __init__(self, logits):
        self.logits = tuple(map(tuple, logits))

    def __call__(self, tokens):
        return jnp.array(self.logits)


def measured(logits, loss='softmax'):
    """The metrics of a model that gives these logits, where class 0 is right."""
    count = len(logits)
    batch = {
        'tokens': jnp.zeros((count, 2), jnp.int32),
        'target': jnp.zeros(count, jnp.int32),
        'weights': jnp.ones(count),
    }
    averages = Addition(ModularAddition(modulus=3), loss).measure(Given(logits), batch, None)
    return {name: float(average.mean()) for name, average in averages.items()}


def test_collapsed_and_vanished():
    right, sure, surer = [1.0, 0.0, 0.0], [20.0, 0.0, 0.0], [200.0, 0.0, 0.0]
    found = measured([right, sure, surer, [0.0, 200.0, 0.0]])
    assert (found['collapsed'], found['vanished'], found['accuracy']) == (2 / 4, 1 / 4, 3 / 4)
    found = measured([right, sure, surer, [0.0, 200.0, 0.0]], 'stablemax')
    assert (found['collapsed'], found['vanished'], found['accuracy']) == (0, 0, 3 / 4)


def test_a_loss_that_is_not_there():
    with pytest.raises(UserError, match="there is no loss=stablmax; did you mean 'stablemax'"):
        Addition(loss='stablmax')


def test_the_network_sees_which_token_is_where():
    model = Perceptron(5, hidden=(4,), dtype='float32', rngs=nnx.Rngs(0))
    first, second = (layer.weight[...] for layer in model.layers)
    assert first.shape == (10, 4) and second.shape == (4, 5)
    logits = model(jnp.array([[1, 3], [3, 1]]))
    by_hand = [jax.nn.relu(first[1] + first[5 + 3]) @ second, jax.nn.relu(first[3] + first[5 + 1]) @ second]
    np.testing.assert_allclose(logits, by_hand, rtol=1e-5, atol=1e-6)
