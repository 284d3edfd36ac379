import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.evals.cadence import AtEnd, EveryNSteps
from attnlab.evals.held_out import HeldOut
from attnlab.metrics import Average
from attnlab.train.setup import prepare
from configs.language import get_config


def test_cadences():
    assert [step for step in range(1, 8) if EveryNSteps(3).due(step, 7)] == [3, 6, 7]
    assert [step for step in range(1, 8) if AtEnd().due(step, 7)] == [7]


@pytest.fixture
def setup():
    config = get_config('zoo=mingru')
    with config.unlocked():
        config.update(batch_size=4, length=64)
        config.model.dim = 8
        config.model.stack.depth = 1
    return prepare(config)


@dataclasses.dataclass(frozen=True)
class Known:
    """Measures a loss that depends on nothing but the position."""

    task: object

    vocab: int = 256
    evaluated_split: str = 'valid'

    def source(self, split, length, tokens=None):
        return self.task.source(split, length, tokens)

    def example(self, length):
        return self.task.example(length)

    def describe(self):
        return {}

    def save(self, folder):
        raise NotImplementedError

    def measure(self, model, batch, dropout_key):
        weights = batch['weights']
        losses = jnp.broadcast_to(jnp.arange(weights.shape[1], dtype=jnp.float32), weights.shape)
        loss = Average.of(losses, weights)
        return {
            'loss': loss,
            'position_loss': Average.of(losses, weights, axis=0),
            'byte_loss': Average(loss.total, jnp.sum(batch['bytes'] * weights)),
        }


def test_numbers_are_of_the_same_tokens_at_every_length(setup):
    params = setup.initialize().params
    evaluation = HeldOut(cadence=AtEnd(), multiples=(1, 2, 4), tokens=1000).evaluate(setup, params)
    uniform = math.log(256)
    for name in ('loss', 'loss@2x', 'loss@4x'):
        assert evaluation.numbers[name] == pytest.approx(uniform, rel=0.2)
    assert evaluation.numbers['bits_per_byte'] == pytest.approx(evaluation.numbers['loss'] / math.log(2), rel=1e-6)
    assert evaluation.numbers['perplexity'] == pytest.approx(math.exp(evaluation.numbers['loss']), rel=1e-6)
    assert {name: len(curve) for name, curve in evaluation.curves.items()} == {'1x': 64, '2x': 128, '4x': 256}


def test_loss_by_position_and_in_all(setup):
    setup = dataclasses.replace(setup, task=Known(setup.task))
    evaluation = HeldOut(cadence=AtEnd(), tokens=640).evaluate(setup, setup.initialize().params)
    curve = evaluation.curves['1x']
    np.testing.assert_allclose(curve, np.arange(64), rtol=1e-6)
    assert 30 < evaluation.numbers['loss'] < 33
