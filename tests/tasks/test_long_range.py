import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.config import build, spec
from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.long_range.listops import ListOps
from attnlab.data.long_range.source import Kind, Source
from attnlab.errors import UserError
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd
from attnlab.models.block import Block
from attnlab.models.heads import ClassificationHead, PairHead
from attnlab.models.model import Classifier
from attnlab.models.stack import Stack
from attnlab.tasks.long_range import Classification, pooled
from attnlab.tasks.task import Sliced, Task, context
from attnlab.train.setup import prepare
from attnlab.zoo import ZOO
from configs.long_range import get_config

SHORT = Drawn(ListOps(shortest=10, longest=40, max_depth=4, max_arguments=4), train=60, held_out=40)


@dataclasses.dataclass(frozen=True)
class Pairs(Source):
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


class Oracle(Classifier):
    """Stands for a model: its hidden state is a table's entry of the token, its scores what the head makes of these."""

    def __init__(self, table, classify, documents=1):
        self.look = lambda tokens: jnp.asarray(table)[tokens]
        self.make = classify
        self.count = documents

    @property
    def documents(self):
        return self.count

    def hidden(self, tokens, ctx, state=None):
        return self.look(tokens), state

    def classify(self, *documents):
        return self.make(*documents)


def batch_of(source, count):
    return jax.tree.map(lambda *rows: jnp.asarray(np.stack(rows)), *(source[i] for i in range(count)))


def test_pooling_is_the_mean_of_what_is_there():
    hidden = jnp.asarray(np.arange(24).reshape(2, 4, 3), jnp.bfloat16)
    where = jnp.asarray([[True, True, False, False], [False] * 4])
    found = pooled(hidden, where)
    assert found.tolist() == [[1.5, 2.5, 3.5], [0, 0, 0]] and found.dtype == jnp.float32


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
    model = Oracle(table, lambda x, y: seen.append((x, y)) or jnp.concatenate([x, y], 1), documents=2)
    task.measure(model, batch, None)
    ((first, second),) = seen
    assert first[:, 0].tolist() == [1, 1, 1] and second[:, 0].tolist() == [2, 2, 2]
    with pytest.raises(UserError, match=r'config.length is 7; a pair of documents wants an even one'):
        task.source('train', 7)
    with pytest.raises(UserError, match=r'model.head is for 1 document\(s\); an example of Pairs has 2'):
        task.measure(Oracle(table, lambda x: x), batch, None)


def test_heads():
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal((3, 4)), jnp.float32) for _ in range(2))
    head = ClassificationHead(4, 99, classes=5, rngs=nnx.Rngs(0))
    head.linear.bias[...] = jnp.arange(5.0)
    np.testing.assert_allclose(head(x), x @ head.linear.weight[...] + jnp.arange(5.0)[None], rtol=1e-5, atol=1e-6)
    pair = PairHead(4, 99, classes=2, rngs=nnx.Rngs(0))
    into, out = pair.into.weight[...], pair.out.weight[...]
    features = np.concatenate([x, y, x * y, x - y], 1)
    np.testing.assert_allclose(pair(x, y), np.maximum(features @ into, 0) @ out, rtol=1e-5, atol=1e-6)


def test_splits_and_slices():
    task = Classification(SHORT)
    assert isinstance(task, Task) and isinstance(task, Sliced) and task.vocab == 16
    assert len(task.source('train', 48)) == 60 and len(task.source('valid', 48)) == 40
    assert len(task.source('valid', 48, tokens=96)) == 2 and len(task.source('valid', 48, tokens=1)) == 1
    slices = task.slices('test', 48, (1, 2), 30)
    rows = [SHORT.rows('test')[index] for index in range(30)]
    assert len(slices['all'].source) == 30 and {part.length for part in slices.values()} == {48}
    for depth in (1, 2, 3):
        expected = [row['x'].tolist() for row in rows if row['depth'] == depth]
        if expected:
            part = slices[f'depth={depth}' if depth < 3 else 'depth>=3'].source
            found = [part[index]['tokens'][part[index]['segments'] > 0].tolist() for index in range(len(part))]
            assert found == expected
    by_length = [part for name, part in slices.items() if name.startswith('length>=')]
    assert len(by_length) > 1 and sum(len(part.source) for part in by_length) == 30
    pytest.importorskip('sklearn')
    assert set(Classification(Digits()).slices('test', 64, (1,), 1000)) == {'all'}
    assert Classification(Digits()).vocab == 10


def classifier(**parts):
    stack = spec(Stack, depth=1, blocks=(spec(Block, mixer=ZOO['mingru'].spec),))
    return build(spec(Classifier, dim=8, stack=stack, **parts))(16, dtype='float32', rngs=nnx.Rngs(0))


def test_a_classifier_does_not_see_padding_and_knows_its_stages():
    model = classifier(head=spec(ClassificationHead, classes=10))
    task = Classification(SHORT)
    short, long = (task.logits(model, batch_of(task.source('test', length), 3), None) for length in (48, 64))
    np.testing.assert_allclose(short, long, rtol=1e-4, atol=1e-5)
    batch = batch_of(task.source('test', 48), 3)
    assert [stage.name for stage in model.stages(batch['tokens'], context(batch))][-2:] == ['norm', 'head']
    assert model.init_state(1, 8) == ()
    pair = classifier(head=spec(PairHead, classes=2))
    assert Classification(Pairs()).logits(
        pair, batch_of(Classification(Pairs()).source('train', 8), 3), None
    ).shape == (3, 2)


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
