import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.data.synthetic.copying import Copying
from attnlab.data.synthetic.problem import ENDLESS
from attnlab.data.synthetic.recall import InductionHeads, MultiQueryRecall
from attnlab.data.synthetic.regression import LinearRegression
from attnlab.errors import UserError
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd
from attnlab.losses import softmax_loss, squared_error
from attnlab.models.heads.language import LanguageHead
from attnlab.models.inputs.embedding import Projection
from attnlab.models.model import Model
from attnlab.models.predictor import Predictor
from attnlab.models.stack import Stack
from attnlab.tasks.synthetic import InContextRegression, LabelPrediction
from attnlab.tasks.task import Sliced, Task
from attnlab.train.setup import prepare
from attnlab.zoo import ZOO
from configs.language import get_config as language
from configs.recall import get_config as recall


class Oracle(Predictor):
    """Stands for a model: its hidden state at a token is the token's entry of a table, its logits the hidden state."""

    def __init__(self, table, loss=softmax_loss):
        self.look = lambda: jnp.asarray(table)
        self.losses = lambda hidden, targets, dropout_key: loss(hidden, targets)

    def hidden(self, tokens, ctx, state=None):
        del tokens, ctx
        return self.look(), state

    def logits(self, hidden):
        return hidden


def stacked(source, count):
    return jax.tree.map(lambda *rows: jnp.asarray(np.stack(rows)), *(source[i] for i in range(count)))


def batch_of(task, length, count, split='train'):
    source = task.source(split, length)
    return stacked(source, count)


def test_metrics_count_labels_and_nothing_else():
    task = LabelPrediction(Copying(letters=4, shortest=2))
    batch = batch_of(task, 14, 8)
    table = np.full((8, 14, task.vocab), 50.0, np.float32)
    places, targets = np.asarray(batch['at']), np.asarray(batch['targets'])
    counts = np.asarray(batch['weights']).sum(1).astype(int)
    assert len({*counts}) > 1
    for row in range(8):
        table[row, places[row, : counts[row]]] = 0
        for i in range(counts[row]):
            wrong = row == 0 and i == 1
            table[row, places[row, i], (targets[row, i] + wrong) % task.vocab] = math.log(7)
    found = jax.tree.map(np.asarray, task.measure(Oracle(table), batch, None))
    assert found['accuracy'].count == counts.sum() and found['accuracy'].total == counts.sum() - 1
    assert (found['exact_match'].total, found['exact_match'].count) == (7, 8)
    right, wrong = math.log((task.vocab - 1 + 7) / 7), math.log(task.vocab - 1 + 7)
    assert found['loss'].total == pytest.approx((counts.sum() - 1) * right + wrong, rel=1e-5)
    np.testing.assert_array_equal(found['position_accuracy'].count, (counts[:, None] > np.arange(7)).sum(0))
    assert (found['position_accuracy'].count - found['position_accuracy'].total).tolist() == [0, 1, 0, 0, 0, 0, 0]


def test_a_row_without_labels_is_no_example():
    task = LabelPrediction(InductionHeads(vocab=4))
    batch = jax.tree.map(jnp.zeros_like, batch_of(task, 6, 3))
    found = task.measure(Oracle(np.zeros((3, 6, 4), np.float32)), batch, None)
    assert found['exact_match'].count == found['loss'].count == 0


def test_squared_error_and_baselines():
    task = InContextRegression(LinearRegression(dim=2, outputs=2))
    part = task.slices('test', 6, (1,), 4)['1x']
    batch = stacked(part.source, 4)
    table = np.zeros((4, 6, 2), np.float32)
    table[:, ::2] = np.asarray(batch['targets']) + np.array([1, 3], np.float32)
    found = jax.tree.map(np.asarray, task.measure(Oracle(table, squared_error), batch, None))
    assert found['loss'].mean() == pytest.approx(5.0, rel=1e-4)
    np.testing.assert_allclose(found['position_error'].mean(), [5.0] * 3, rtol=1e-4)
    np.testing.assert_allclose(found['zero'].mean(), np.mean(np.asarray(batch['targets']) ** 2), rtol=1e-5)
    assert found['position_ridge'].mean()[2] < 1e-6 < found['position_ridge'].mean()[0]
    assert set(task.measure(Oracle(table, squared_error), batch_of(task, 6, 4), None)) == {'loss', 'position_error'}


def test_the_gradient_reaches_the_model_through_the_labels_alone():
    task = LabelPrediction(MultiQueryRecall(vocab=16, pairs=(2,)))
    batch = batch_of(task, 8, 4)
    rng = np.random.default_rng(0)

    def loss(table):
        return task.measure(Oracle(table), batch, None)['loss'].total

    gradient = np.asarray(jax.grad(loss)(jnp.asarray(rng.standard_normal((4, 8, 16)), jnp.float32)))
    touched = [set(np.flatnonzero(abs(row).sum(1)).tolist()) for row in gradient]
    assert touched == [set(row) for row in batch['at'].tolist()]


def test_splits_and_slices():
    problem = MultiQueryRecall(vocab=64, pairs=(4,))
    task = LabelPrediction(problem, held_out=100)
    assert isinstance(task, Task) and isinstance(task, Sliced)
    assert len(task.source('train', 32)) == ENDLESS and len(task.source('test', 32)) == 100
    assert len(dataclasses.replace(task, examples=5).source('train', 32)) == 5
    assert len(task.source('valid', 32, tokens=64)) == 2 and len(task.source('valid', 32, tokens=1)) == 1
    slices = task.slices('test', 32, (1, 2, 8), 9)
    assert {name: (part.length, part.source.problem.pairs) for name, part in slices.items()} == {
        '1x': (32, (4,)),
        '2x': (64, (4,)),
        '8x': (256, (4,)),
        'pairs=4': (32, (4,)),
        'pairs=8': (32, (8,)),
    }
    assert {part.source.split for part in slices.values()} == {'test'} and len(slices['2x'].source) == 9
    stretched = LabelPrediction(Copying()).slices('test', 32, (1, 2), 4)
    assert [part.source.problem.shortest for part in stretched.values()] == [5, None]
    with pytest.raises(UserError, match="has no split 'trian'; did you mean 'train'"):
        task.source('trian', 32)


def test_slices_of_a_run_are_evaluated_each_by_all_of_its_examples():
    config = recall('task=regression,zoo=mingru')
    with config.unlocked():
        config.update(batch_size=4, length=8)
        config.model.dim = 8
        config.model.stack.depth = 1
    setup = prepare(config)
    evaluator = BySlice(AtEnd(), examples=10, multiples=(1, 3))
    params = setup.initialize().params
    found = evaluator.evaluate(setup, params)
    assert {name.partition('/')[0] for name in found.numbers} == {'1x', '3x', 'noise=1', 'decay=1'}
    part = setup.task.slices('test', 8, (1,), 10)['1x'].source
    zero = np.mean([part[i]['baseline/zero'] for i in range(10)])
    assert found.numbers['1x/zero'] == pytest.approx(zero, rel=1e-5)
    assert {name: len(curve) for name, curve in found.curves['error'].items()} == {
        '1x': 4,
        '3x': 12,
        'noise=1': 4,
        'decay=1': 4,
    }


def test_evaluating_what_has_no_slices():
    config = language('zoo=mingru')
    with config.unlocked():
        config.evals = (spec(BySlice, cadence=spec(AtEnd)),)
    setup = prepare(config)
    with pytest.raises(UserError, match='LanguageModelling has no slices; evaluate it with HeldOut'):
        setup.evals[0].load_data(setup)
    setup = prepare(recall())
    with pytest.raises(UserError, match='examples and multiples of BySlice must be at least 1; got 0'):
        BySlice(AtEnd(), examples=0).load_data(setup)
    with pytest.raises(UserError, match='length is 34; Copying needs at least 64'):
        BySlice(AtEnd()).load_data(dataclasses.replace(setup, task=LabelPrediction(Copying(shortest=31)), length=34))


def model(**parts):
    stack = spec(Stack, depth=1, blocks=(spec(Block, mixer=ZOO['mingru'].spec),))
    return build(spec(Model, dim=8, stack=stack, **parts))(2, dtype='float32', rngs=nnx.Rngs(0))


def test_real_inputs_are_projected():
    made = model(inputs=spec(Projection, features=3), head=spec(LanguageHead))
    hidden, _ = made.hidden(jnp.ones((1, 4, 3)), Context.full(1, 4))
    assert made.logits(hidden).shape == (1, 4, 2)
    assert made.streaming and not made.decodes and model().decodes
    with pytest.raises(UserError, match=r'model.inputs.features is 3; the inputs of the task have 5'):
        made.hidden(jnp.ones((1, 4, 5)), Context.full(1, 4))
    with pytest.raises(UserError, match=r'model.head is None, which ties it to the embedding'):
        model(inputs=spec(Projection, features=3))
