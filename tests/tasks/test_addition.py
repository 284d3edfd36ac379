"""Modular addition as a task: what is counted as collapsed, and the network that learns it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.commands.eval import check_lengths
from attnlab.context import Context
from attnlab.data.synthetic.addition import OPERANDS, ModularAddition
from attnlab.errors import UserError
from attnlab.losses import softmax_loss, stablemax_logits
from attnlab.models.perceptron import Perceptron
from attnlab.models.predictor import Predictor
from attnlab.tasks.addition import Addition


class Given(Predictor):
    """Stands for a model whose scores are these, whatever the sums."""

    def __init__(self, scores, loss):
        self.scores = jnp.array(scores)
        self.logits = stablemax_logits if loss == 'stablemax' else lambda hidden: hidden

    def pooled(self, tokens, ctx):
        del tokens, ctx
        return self.scores

    def losses(self, hidden, targets, key=None):
        return softmax_loss(self.logits(hidden), targets)


def measured(logits, loss='softmax'):
    """The metrics of a model that gives these logits, where class 0 is right."""
    count = len(logits)
    batch = {
        'tokens': jnp.zeros((count, 2), jnp.int32),
        'target': jnp.zeros(count, jnp.int32),
        'weights': jnp.ones(count),
    }
    averages = Addition(ModularAddition(modulus=3)).measure(Given(logits, loss), batch, None)
    return {name: float(average.mean()) for name, average in averages.items()}


def test_collapsed_and_vanished():
    right, sure, surer = [1.0, 0.0, 0.0], [20.0, 0.0, 0.0], [200.0, 0.0, 0.0]
    found = measured([right, sure, surer, [0.0, 200.0, 0.0]])
    assert (found['collapsed'], found['vanished'], found['accuracy']) == (2 / 4, 1 / 4, 3 / 4)
    found = measured([right, sure, surer, [0.0, 200.0, 0.0]], 'stablemax')
    assert (found['collapsed'], found['vanished'], found['accuracy']) == (0, 0, 3 / 4)


def test_a_loss_that_is_not_there():
    with pytest.raises(UserError, match="there is no loss=stablmax; did you mean 'stablemax'"):
        Perceptron(5, loss='stablmax', dtype='float32', rngs=nnx.Rngs(0))


def test_the_network_sees_which_token_is_where():
    model = Perceptron(5, hidden=(4,), dtype='float32', rngs=nnx.Rngs(0))
    first, second = (layer.weight[...] for layer in model.layers)
    assert first.shape == (10, 4) and second.shape == (4, 5)
    tokens, ctx = jnp.array([[1, 3], [3, 1]]), Context.full(2, 2)
    hidden = model.pooled(tokens, ctx)
    logits = model.logits(hidden)
    by_hand = [jax.nn.relu(first[1] + first[5 + 3]) @ second, jax.nn.relu(first[3] + first[5 + 1]) @ second]
    np.testing.assert_allclose(logits, by_hand, rtol=1e-5, atol=1e-6)
    assert isinstance(model, Predictor) and [stage.name for stage in model.stages(tokens, ctx)] == [
        'layers[0]',
        'layers[1]',
    ]
    stable = Perceptron(5, hidden=(4,), loss='stablemax', dtype='float32', rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(stable.logits(hidden), stablemax_logits(logits))
    targets = jnp.array([4, 0])
    expected = softmax_loss(stablemax_logits(logits), targets)
    np.testing.assert_allclose(stable.losses(hidden, targets), expected, rtol=1e-6)


def test_other_lengths_are_refused_where_there_are_none():
    task = Addition(ModularAddition(modulus=5))
    check_lengths(task, 'test', OPERANDS, (1,))
    with pytest.raises(UserError, match='--multiples holds 2; Addition has examples of the training length alone'):
        check_lengths(task, 'test', OPERANDS, (1, 2))
