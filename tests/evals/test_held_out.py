import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.data.text.text import TextFiles
from attnlab.errors import UserError
from attnlab.evals import totals
from attnlab.evals.cadence import AtEnd, EveryNSteps
from attnlab.evals.held_out import HeldOut
from attnlab.metrics import Average
from attnlab.models.predictor import Predictor
from attnlab.tasks.addition import Addition
from attnlab.tasks.language import LanguageModelling
from attnlab.train import partition
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

    packs: ClassVar[bool] = True
    labels: ClassVar[str] = 'targets'
    vocab: int = 256
    tokenizer: object = None
    evaluated_split: str = 'valid'

    def source(self, split, length, tokens=None):
        return self.task.source(split, length, tokens)

    def sample(self, *args, **kwargs):
        return self.task.sample(*args, **kwargs)

    def example(self, length):
        return self.task.example(length)

    def describe(self):
        return {}

    def save(self, folder):
        raise NotImplementedError

    def restored(self, folder):
        raise NotImplementedError

    def measure(self, model, batch, dropout_key):
        weights = batch['weights']
        losses = jnp.broadcast_to(jnp.arange(weights.shape[1], dtype=jnp.float32), weights.shape)
        loss = Average.of(losses, weights)
        count = jnp.sum(batch['bytes'] * weights)
        return {
            'loss': loss,
            'position_loss': Average.of(losses, weights, axis=0),
            'byte_loss': Average(loss.total, count),
            'document_loss': Average(loss.total[None], loss.count[None]),
            'document_byte_loss': Average(loss.total[None], count[None]),
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


class Unigram(Predictor):
    """A model whose loss at a token is the token's own number: what documents have is known."""

    def hidden(self, tokens, ctx):
        return tokens, None

    def losses(self, hidden, targets, key=None):
        return targets.astype(jnp.float32)


def test_losses_by_document_are_those_of_the_documents(setup, tmp_path):
    """Every document is one letter throughout, so that its loss is the letter; the sums are of a sample of 8 * 32."""
    for letter in 'abcdef':
        (tmp_path / f'{letter}.txt').write_text(letter * 100)
    task = LanguageModelling(TextFiles(str(tmp_path), valid_path=str(tmp_path), cache=None))
    total: dict = {}
    for row in task.sample('valid', 32, 256, block=64):
        batch = {name: jnp.asarray(values)[None] for name, values in row.items()}
        found = task.measure(Unigram(), batch, None)
        total = {name: average.merge(total[name]) if total else average for name, average in found.items()}
    sums = total['document_loss']
    seen = np.flatnonzero(sums.count)
    assert seen.tolist() == [0, 1, 2, 3, 4, 5] and 240 < float(sums.count.sum()) <= 256
    np.testing.assert_allclose((sums.total / np.maximum(sums.count, 1))[seen], seen + ord('a'), rtol=1e-6)
    np.testing.assert_allclose(sums.total.sum(), total['loss'].total, rtol=1e-6)


def test_a_sample_is_called_one_and_has_an_interval(setup):
    params = setup.initialize().params
    sample = HeldOut(cadence=AtEnd(), multiples=(1, 2), tokens=4000).evaluate(setup, params)
    numbers = sample.numbers
    assert 3500 < numbers['sampled_tokens'] <= 4000 and numbers['sampled_documents'] > 10 and 'tokens' not in numbers
    for suffix in ('', '@2x'):
        for name in ('loss', 'bits_per_byte'):
            value, low, high = (numbers[f'{name}{end}{suffix}'] for end in ('', '_low', '_high'))
            assert low < value < high and (low + high) / 2 == pytest.approx(value, rel=1e-5)
    assert '±' in sample.table('title').text()[0][2] and 'a sample, ' in sample.table('title').title
    with pytest.raises(UserError, match='does not have text; evaluate it with BySlice'):
        HeldOut(AtEnd()).load_data(dataclasses.replace(setup, task=Addition()))


def test_overlapping_windows_count_the_same_tokens_with_more_before_them(setup):
    setup = dataclasses.replace(setup, task=Known(setup.task))
    params = setup.initialize().params
    beside, over = (
        HeldOut(AtEnd(), tokens=640, stride=stride).evaluate(setup, params).numbers for stride in (None, 16)
    )
    assert over['sampled_tokens'] == beside['sampled_tokens'] and over['loss'] == beside['loss']
    longer = HeldOut(AtEnd(), multiples=(1, 4), tokens=640, stride=16).evaluate(setup, params).numbers
    apart = HeldOut(AtEnd(), multiples=(1, 4), tokens=640).evaluate(setup, params).numbers
    assert longer['sampled_tokens'] == apart['sampled_tokens']
    assert longer['loss'] > apart['loss'] + 15, 'Known has a loss that grows with what stands before a token'


def test_loss_by_position_and_in_all(setup):
    setup = dataclasses.replace(setup, task=Known(setup.task))
    evaluation = HeldOut(cadence=AtEnd(), tokens=640).evaluate(setup, setup.initialize().params)
    curve = evaluation.curves['1x']
    np.testing.assert_allclose(curve, np.arange(64), rtol=1e-6)
    assert 30 < evaluation.numbers['loss'] < 33


@pytest.mark.parametrize(('size', 'devices'), [('125m', 1), ('1b', 1), ('1b', 2)])
def test_evaluations_take_no_more_rows_at_once_than_training(size, devices, monkeypatch):
    setup = prepare(get_config(f'zoo=mingru,size={size}'))
    for module in (totals, partition):
        monkeypatch.setattr(module, 'batch_shards', lambda mesh: devices)
    assert totals._rows(setup, setup.length) == setup.rows_at_once * devices
    assert totals._rows(setup, 2 * setup.length) == setup.rows_at_once * devices // 2
    assert totals._rows(setup, setup.length // 2) == 2 * setup.rows_at_once * devices
    # No fewer than a row a device.
    assert totals._rows(setup, 64 * setup.length) == devices
    free = dataclasses.replace(setup, rows_at_once=None)
    assert totals._rows(free, setup.length) == setup.batch_size
    assert totals._rows(dataclasses.replace(free, accumulate=2), setup.length) == setup.batch_size // 2


def test_a_batch_that_the_devices_at_hand_do_not_divide_is_evaluated_on_them():
    """Only training needs rows that divide: a run of three rows a step on one device opens on two."""
    config = get_config('zoo=mingru')
    with config.unlocked():
        config.update(length=16, batch_size=3)
        config.model.dim, config.model.stack.depth = 8, 1
    one, two = (prepare(config, jax.devices()[:count]) for count in (1, 2))
    variables = jax.device_get(one.initialize().variables)
    found = []
    for setup in (one, two):
        setup.load_data()
        here = jax.device_put(variables, jax.tree.map(lambda leaf: leaf.sharding, setup.abstract.variables))
        found.append(HeldOut(AtEnd(), tokens=112).evaluate(setup, here).numbers)
    assert found[0].keys() == found[1].keys() and found[0]['sampled_tokens'] > 0
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, err_msg=name)
    with pytest.raises(UserError, match='does not divide'):
        two.check()
