import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.cli import main
from attnlab.config import build, load, save, spec
from attnlab.data.long_range.dataset import Dataset, Kind
from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.long_range.listops import ListOps
from attnlab.data.pipeline import spread
from attnlab.errors import UserError
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd
from attnlab.losses import absolute_error, next_token_loss, softmax_loss
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.heads.pairs import PairHead
from attnlab.models.model import Model
from attnlab.models.predictor import Predictor
from attnlab.models.stack import Stack
from attnlab.nn.pools import MeanPool
from attnlab.runs.loading import load_run
from attnlab.tasks.long_range import FEWEST, Classification, Denoising
from attnlab.tasks.task import Sliced, Task, context
from attnlab.train.optimizer import named_parameters
from attnlab.train.setup import prepare
from attnlab.train.start import FromRun
from attnlab.zoo import ZOO
from configs.long_range import get_config

SHORT = Drawn(ListOps(shortest=10, longest=40, max_depth=4, max_arguments=4), train=60, held_out=40)


@dataclasses.dataclass(frozen=True)
class Pairs(Dataset):
    """Pairs of a document of ones and one of twos."""

    @property
    def kind(self):
        return Kind(classes=2, length=8, vocab=4, documents=2)

    @property
    def splits(self):
        return {'train': 3, 'test': 3}

    def rows(self, split):
        return [
            {'x': np.ones(index + 1, np.uint8), 'second': np.full(3, 2, np.uint8), 'label': np.int32(index % 2)}
            for index in range(3)
        ]

    def describe(self):
        return {'source': 'pairs'}


class Oracle(Predictor):
    """Stands for a model: its hidden state is a table's entry of the token, its scores what the head makes of these."""

    documents = 1

    def __init__(self, table, classify, documents=1):
        self.look = lambda tokens: jnp.asarray(table)[tokens]
        self.logits = classify
        self.documents = documents

    def pooled(self, tokens, ctx):
        return MeanPool()(self.look(tokens), ctx.segments > 0)

    def losses(self, hidden, targets, key=None):
        return softmax_loss(self.logits(hidden), targets)


def batch_of(source, count):
    return jax.tree.map(lambda *rows: jnp.asarray(np.stack(rows)), *(source[i] for i in range(count)))


def test_loss_and_accuracy_are_of_examples():
    task = Classification(SHORT)
    source = task.source('test', 48)
    batch = batch_of(source, 8)
    labels = np.asarray(batch['label'])
    scores = np.zeros((8, 10), np.float32)
    scores[np.arange(8), np.where(np.arange(8) < 3, (labels + 1) % 10, labels)] = math.log(11)
    model = Oracle(np.ones((16, 1), np.float32), lambda x: jnp.asarray(scores) * x)
    found = task.measure(model, batch, None)
    assert float(found['accuracy'].mean()) == 5 / 8
    assert float(found['loss'].mean()) == pytest.approx((5 * math.log(20 / 11) + 3 * math.log(20)) / 8, rel=1e-5)
    # Rows that fill up the last batch of an evaluation count for nothing.
    half = task.measure(model, batch | {'weights': batch['weights'].at[3:].set(0)}, None)
    assert (float(half['accuracy'].total), float(half['accuracy'].count)) == (0, 3)


def test_padding_is_left_out_of_the_mean():
    task = Classification(SHORT)
    batch = batch_of(task.source('test', 48), 4)
    table = np.zeros((16, 16), np.float32)
    table[0] = 1000
    np.fill_diagonal(table[1:, 1:], 1)
    seen = []
    task.measure(Oracle(table, lambda x: seen.append(x) or x[:, :10]), batch, None)
    rows = [SHORT.rows('test')[index]['x'] for index in range(4)]
    np.testing.assert_allclose(seen[0], [np.bincount(x, minlength=16) / len(x) for x in rows], rtol=1e-6)


def test_two_documents_are_read_apart_and_compared():
    task = Classification(Pairs())
    batch = batch_of(task.source('train', 8), 3)
    seen = []
    table = np.array([[9.0], [1.0], [2.0], [0.0]], np.float32)
    model = Oracle(table, lambda x: seen.append(x) or x, documents=2)
    task.measure(model, batch, None)
    assert seen[0].tolist() == [[1, 2]] * 3
    with pytest.raises(UserError, match=r'config.length is 7; a pair of documents needs an even length'):
        task.source('train', 7)
    with pytest.raises(UserError, match=r'model.head is for 1 document\(s\); an example of Pairs has 2'):
        task.measure(Oracle(table, lambda x: x), batch, None)


def test_heads():
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal((3, 4)), jnp.float32) for _ in range(2))
    head = ClassificationHead(4, 99, classes=5, rngs=nnx.Rngs(0))
    head.linear.bias[...] = jnp.arange(5.0)
    np.testing.assert_allclose(
        head.logits(x), x @ head.linear.weight[...] + jnp.arange(5.0)[None], rtol=1e-5, atol=1e-6
    )
    pair = PairHead(4, 99, classes=2, rngs=nnx.Rngs(0))
    into, out = pair.into.weight[...], pair.out.weight[...]
    features = np.concatenate([x, y, x * y, x - y], 1)
    np.testing.assert_allclose(
        pair.logits(jnp.concatenate([x, y], 1)), np.maximum(features @ into, 0) @ out, rtol=1e-5, atol=1e-6
    )


def test_splits_and_slices():
    task = Classification(SHORT)
    assert isinstance(task, Task) and isinstance(task, Sliced) and task.vocab == 16
    assert len(task.source('train', 48)) == 60 and len(task.source('valid', 48)) == 40
    assert len(task.source('valid', 48, tokens=96)) == 2 and len(task.source('valid', 48, tokens=1)) == 1
    slices = task.slices('test', 48, (1, 2), 36)
    assert len(slices['all'].source) == 36 and {part.length for part in slices.values()} == {48}
    rows = [SHORT.rows('test')[place] for place in spread(len(SHORT.rows('test')), 36)]
    expected = {f'depth={depth}': [row for row in rows if row['depth'] == depth] for depth in (1, 2)}
    expected['depth>=3'] = [row for row in rows if row['depth'] >= 3]
    for least in (11, 18, 25, 32):
        expected[f'length>={least}'] = [
            row for row in rows if least <= len(row['x']) < least + 7 or len(row['x']) >= least == 32
        ]
    enough = {name: [row['x'].tolist() for row in part] for name, part in expected.items() if len(part) >= FEWEST}
    parts = {name: part.source for name, part in slices.items() if name != 'all'}
    assert len(enough) >= 2 and enough == {
        name: [part[i]['tokens'][part[i]['segments'] > 0].tolist() for i in range(len(part))]
        for name, part in parts.items()
    }
    pytest.importorskip('sklearn')
    assert set(Classification(Digits()).slices('test', 64, (1,), 1000)) == {'all'}
    assert Classification(Digits()).vocab == 1


def classifier(**parts):
    stack = spec(Stack, depth=1, blocks=(spec(Block, mixer=ZOO['mingru'].spec),))
    made = spec(Model, dim=8, stack=stack, pool=MeanPool(), streaming=False, **parts)
    return build(made)(16, dtype='float32', rngs=nnx.Rngs(0))


def test_a_classifier_does_not_see_padding_and_knows_its_stages():
    model = classifier(head=spec(ClassificationHead, classes=10))
    task = Classification(SHORT)
    logits = jax.jit(lambda batch: model.logits(task.vectors(model, batch, None)))
    short, long = (logits(batch_of(task.source('test', length), 3)) for length in (48, 64))
    np.testing.assert_allclose(short, long, rtol=1e-4, atol=1e-5)
    batch, names = batch_of(task.source('test', 48), 3), []

    def outputs(batch):
        found = list(model.stages(batch['tokens'], context(batch)))
        names.extend(stage.name for stage in found)
        return [stage.value for stage in found]

    assert jax.eval_shape(outputs, batch)[-1].shape == (3, 48, 10) and names[-2:] == ['norm', 'head']
    assert model.init_state(1, 8) == () and not model.decodes
    pair = classifier(head=spec(PairHead, classes=2))
    pairs = Classification(Pairs())
    vectors = pairs.vectors(pair, batch_of(pairs.source('train', 8), 3), None)
    assert pair.logits(vectors).shape == (3, 2)


def test_a_run_is_evaluated_by_slices():
    config = get_config('task=listops,zoo=mha,size=smoke')
    with config.unlocked():
        config.update(batch_size=4, length=48)
        config.model.dim = 8
        config.model.stack.depth = 1
        config.task.data = spec(Drawn, of=SHORT.of, train=16, held_out=10)
    assert not config.model.stack.blocks[0].mixer.causal
    setup = prepare(config)
    found = BySlice(AtEnd(), multiples=(1,), examples=9).evaluate(setup, setup.initialize().params)
    assert 'all/accuracy' in found.numbers and any(name.startswith('depth') for name in found.numbers)
    counted = [len(part.source) for part in setup.task.slices('test', 48, (1,), 9).values()]
    assert counted[0] == 9 and not found.curves


def test_what_follows_is_predicted_inside_documents_alone():
    task = Denoising(Pairs())
    batch = batch_of(task.source('train', 8), 3)
    seen = []

    class Follower(Predictor):
        def hidden(self, tokens, ctx, state=None):
            seen.append(tokens)
            return jax.nn.one_hot(tokens, 4) * 5.0, state

        def losses(self, hidden, targets, key=None):
            return next_token_loss(hidden, jnp.eye(4), targets)

    found = task.measure(Follower(), batch, None)['loss']
    # Of documents of n tokens n - 1 are predicted: 0, 1 and 2 of the first ones, twice of each of the second ones.
    assert float(found.count) == 0 + 1 + 2 + 3 * 2
    assert float(found.mean()) == pytest.approx(math.log(1 + 3 * math.exp(-5)), rel=1e-5)
    assert seen[0].shape == (6, 4)


@pytest.mark.parametrize('key', [None, 0])
def test_hidden_places_are_predicted_and_not_seen(key):
    task = Denoising(SHORT, hidden=0.3)
    batch = batch_of(task.source('train', 48), 16)
    seen = []

    class Blind(Predictor):
        def hidden(self, tokens, ctx, state=None):
            seen.append(tokens)
            return jnp.zeros((*tokens.shape, 2)), state

        def losses(self, hidden, targets, key=None):
            return next_token_loss(hidden, jnp.zeros((16, 2)), targets)

    found = task.measure(Blind(), batch, None if key is None else jax.random.key(key))['loss']
    hidden = (np.asarray(seen[0]) == 0) & (np.asarray(batch['segments']) > 0)
    assert found.count == hidden.sum() and float(found.mean()) == pytest.approx(math.log(16), rel=1e-5)
    assert abs(hidden.sum() / np.sum(batch['segments']) - 0.3) < 0.06
    assert np.array_equal(np.where(hidden, batch['tokens'], seen[0]), batch['tokens'])
    again = task.measure(Blind(), batch, None if key is None else jax.random.key(key + 1))['loss']
    assert (key is None) == np.array_equal(seen[0], seen[1]) and again.count > 0
    with pytest.raises(UserError, match=r'hidden of Denoising is 1\.0'):
        Denoising(SHORT, hidden=1.0)


def test_evaluations_hide_the_same_places_of_a_row_in_any_batch():
    seen = []

    class Blind(Predictor):
        def hidden(self, tokens, ctx, state=None):
            seen.append(np.asarray(tokens))
            return jnp.zeros((*tokens.shape, 2)), state

        def losses(self, hidden, targets, key=None):
            return jnp.zeros(targets.shape[:2])

    def shown(data, length, rows):
        """The rows of a split, a batch of so many after the other, as a model sees them."""
        task, seen[:] = Denoising(data, hidden=0.3), []
        batch = batch_of(task.source('train', length), 8)
        for start in range(0, 8, rows):
            task.measure(Blind(), {name: array[start : start + rows] for name, array in batch.items()}, None)
        return np.concatenate(seen)

    whole = shown(SHORT, 48, 8)
    np.testing.assert_array_equal(shown(SHORT, 48, 2), whole)
    pytest.importorskip('sklearn')
    numbers = shown(Digits(), 64, 8)
    np.testing.assert_array_equal(shown(Digits(), 64, 1), numbers)
    hidden = numbers[..., 0] == 0
    assert (hidden.sum(axis=1) > 8).all() and len(np.unique(hidden, axis=0)) == 8


def test_errors_of_numbers_are_absolute():
    pytest.importorskip('sklearn')
    task = Denoising(Digits(), hidden=0.5)
    batch = batch_of(task.source('train', 64), 8)

    class Mean(Predictor):
        def hidden(self, tokens, ctx, state=None):
            self.seen = tokens
            return tokens, state

        def losses(self, hidden, targets, key=None):
            return absolute_error(jnp.zeros_like(hidden), targets)

    found = task.measure(Mean(), batch, jax.random.key(0))['loss']
    assert 0.4 < float(found.count) / (8 * 64) < 0.6
    assert 0.6 < float(found.mean()) < 1.2


def test_every_number_of_a_position_is_predicted():
    """Of three channels three, which a head of one number would have been compared with all the same."""
    task = Denoising(Coloured(), hidden=0.5)
    config = get_config('task=digits,zoo=mha,size=smoke,protocol=pretrain')
    with config.unlocked():
        config.task.data, config.length = spec(Coloured), 8
        config.model.dim, config.model.stack.depth, config.model.inputs.features = 8, 1, 3
    setup = prepare(config)
    model = nnx.merge(setup.graphdef, setup.initialize().variables)
    batch = batch_of(task.source('train', 8), 3)
    hidden, _ = model.hidden(batch['tokens'], context(batch))
    assert task.vocab == setup.task.vocab == model.outputs == 3
    assert model.logits(hidden).shape == batch['tokens'].shape == (3, 8, 3)


@dataclasses.dataclass(frozen=True)
class Coloured(Dataset):
    """Eight positions of three numbers each."""

    kind: ClassVar = Kind(classes=2, length=8, channels=3)
    splits: ClassVar = {'train': 3, 'test': 3}

    def rows(self, split):
        return [{'x': np.full((8, 3), index, np.float32), 'label': np.int32(0)} for index in range(3)]

    def describe(self):
        return {'source': 'coloured'}


# ml_collections loads config files so.
@pytest.mark.slow
def test_a_run_starts_from_the_parameters_of_another(tmp_path):
    first = tmp_path / 'first'
    tiny = [
        '--config.model.dim=8', '--config.model.stack.depth=1', '--config.length=24', '--config.batch_size=8',
        '--config.evals[0].examples=8', '--platform=cpu', '--compilation_cache=', '--config.task.data.train=16',
        '--config.task.data.held_out=8', '--config.steps=2',
    ]  # fmt: skip
    where = 'configs/long_range.py:task=listops,zoo=mingru,size=smoke'
    assert main(['train', f'--config={where},protocol=pretrain', f'--workdir={first}', *tiny]) == 0
    config = get_config(f'task=listops,zoo=mingru,size=smoke,protocol=finetune,run={first}')
    assert config.start.run == str(first) and config.start.leave == ('head/*',)
    with config.unlocked():
        config.update(length=24, batch_size=8, steps=2)
        config.model.dim = 8
        config.model.stack.depth = 1
    setup = prepare(config)

    def starting(start):
        return dataclasses.replace(setup, start=start).sharing(setup)

    before = named_parameters(load_run(first).variables)
    started = named_parameters(setup.initialize().params)
    fresh = named_parameters(starting(None).initialize().params)
    for name, variable in started.items():
        own = name.startswith('head/')
        assert np.array_equal(variable[...], (fresh if own else before)[name][...])
        assert own or name == 'norm/scale' or not np.array_equal(variable[...], fresh[name][...])
    quantized = tmp_path / 'quantized'
    quantized.mkdir()
    with load(first / 'config.json').unlocked() as made:
        made.quantization = None
    save(made, quantized / 'config.json')
    with pytest.raises(UserError, match=r'config.start.run is .*quantized, a quantized run; name the one that it was'):
        starting(FromRun(str(quantized))).start.check(setup.abstract)
    with pytest.raises(UserError, match=r'config.start.leave: no parameter matches .haed/'):
        starting(FromRun(str(first), leave=('haed/*',))).initialize()
    with pytest.raises(UserError, match=r'has no array params.head.linear'):
        starting(FromRun(str(first), leave=())).initialize()
    for start, wanted in (
        (FromRun(str(tmp_path)), 'checkpoint'),
        (FromRun(str(first), step=7), 'checkpoint of step 7'),
    ):
        with pytest.raises(UserError, match=f'config.start.run is {start.run}, which has no {wanted}'):
            start.check(setup.abstract)
    for argument in ('protocol=finetune', f'protocol=scratch,run={first}'):
        with pytest.raises(UserError, match='protocol=finetune needs run=WORKDIR'):
            get_config(argument)
