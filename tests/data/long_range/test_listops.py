import pickle
import random

import numpy as np
import pytest

from attnlab.config import build, spec
from attnlab.data.long_range.dataset import digest_of
from attnlab.data.long_range.drawn import Drawn, example
from attnlab.data.long_range.listops import SYMBOLS, ListOps
from attnlab.errors import UserError

from .probes import linear_probe

SHORT = ListOps(shortest=40, longest=200, max_depth=5, max_arguments=5)


def evaluate(text):
    """Value and depth of an expression, by a stack: nothing is shared with how it was written."""
    stack = []
    depth = 0
    for symbol in text:
        if symbol == ']':
            operator, *values = stack.pop()
            value = {
                '[MIN': min,
                '[MAX': max,
                '[SM': lambda v: sum(v) % 10,
                '[MED': lambda v: int(np.median(v)),
            }[operator](values)
            if not stack:
                return value, depth
            stack[-1].append(value)
        elif symbol.startswith('['):
            stack.append([symbol])
            depth = max(depth, len(stack))
        else:
            stack[-1].append(int(symbol))
    raise AssertionError('an expression that does not end')


def text_of(drawn):
    return [SYMBOLS[token] for token in drawn['x']]


@pytest.mark.parametrize(('problem', 'count'), [(ListOps(), 100), (SHORT, 150), (ListOps(3, 60, 3, 10), 300)])
def test_the_label_is_the_value(problem, count):
    rows = Drawn(problem).rows('train')
    for index in range(count):
        drawn = rows[index]
        text = text_of(drawn)
        assert evaluate(text) == (drawn['label'], drawn['depth'])
        assert problem.shortest < len(text) < problem.longest
        assert drawn['depth'] < problem.max_depth
        assert '' not in text and text[-1] == ']' and drawn['x'].dtype == np.uint8


def test_the_evaluator_knows_the_rules():
    cases = {
        '[MAX 3 [MED 1 9 4 2 ] 0 ]': (3, 2),
        '[MED 5 6 ]': (5, 1),
        '[SM 9 8 [MIN 7 5 ] ]': (2, 2),
        '[MED 1 [MAX 2 3 ] 9 ]': (3, 2),
    }
    assert {text: evaluate(text.split()) for text in cases} == cases


def published(rng, problem):
    """The published generator, a tree at a time."""

    def tree(depth):
        if depth == problem.max_depth or rng.random() > problem.operators:
            return rng.randrange(10), 1, [0, 0, 0, 0]
        parts = [tree(depth + 1) for _ in range(rng.randint(2, problem.max_arguments))]
        operator = rng.randrange(4)
        values = [value for value, _, _ in parts]
        value = (min(values), max(values), int(np.median(values)), sum(values) % 10)[operator]
        counts = [sum(column) for column in zip(*(count for _, _, count in parts), strict=True)]
        counts[operator] += 1
        return value, 2 + sum(length for _, length, _ in parts), counts

    while True:
        value, length, counts = tree(1)
        if problem.shortest < length < problem.longest:
            return value, length, counts


def test_the_distribution_is_the_published_one():
    rng, count = random.Random(0), 300
    theirs = [published(rng, SHORT) for _ in range(count)]
    rows = Drawn(SHORT).rows('train')
    ours = [rows[index] for index in range(count)]
    lengths = [np.sort([length for _, length, _ in theirs]), np.sort([len(drawn['x']) for drawn in ours])]
    everywhere = np.concatenate(lengths)
    shares = [np.searchsorted(part, everywhere, side='right') / count for part in lengths]
    # Kolmogorov and Smirnov's bound, at one in ten thousand.
    assert np.abs(shares[0] - shares[1]).max() < 2.23 * np.sqrt(2 / count)
    labels = [
        np.bincount([value for value, _, _ in theirs], minlength=10),
        np.bincount([int(drawn['label']) for drawn in ours], minlength=10),
    ]
    # Chi-squared with 9 degrees of freedom, at one in ten thousand.
    assert np.sum((labels[0] - labels[1]) ** 2 / (labels[0] + labels[1])) < 33.7
    operators = (
        np.array([counts for _, _, counts in theirs]),
        np.array([np.bincount(drawn['x'], minlength=16)[11:15] for drawn in ours]),
    )
    for mine, other in zip(operators[0].T, operators[1].T, strict=True):
        assert abs(mine.mean() - other.mean()) < 4 * np.sqrt((mine.var() + other.var()) / count)


def test_an_example_is_made_alone():
    source = Drawn(SHORT, seed=3, train=50, held_out=20)
    rows = source.rows('train')
    again = example(SHORT, 3, 'train', 17)
    assert digest_of(rows[17]) == digest_of(again) == digest_of(pickle.loads(pickle.dumps(rows))[17])
    assert len(rows) == 50 and len(source.rows('test')) == 20
    others = [rows[16], source.rows('valid')[17], Drawn(SHORT, seed=4).rows('train')[17]]
    assert all(digest_of(other) != digest_of(again) for other in others)
    with pytest.raises(IndexError):
        rows[50]


def test_the_examples_of_seed_0_stay_what_they_are():
    digests = {split: digest_of(example(ListOps(), 0, split, 0)).hex()[:16] for split in ('train', 'valid', 'test')}
    assert digests == {'train': 'ff1f7ed1d6317806', 'valid': '47aed6a489015f15', 'test': 'f0d66c80fe71a324'}


def test_no_expression_is_in_two_splits():
    source = Drawn(SHORT, train=400, held_out=100)
    rows = {split: source.rows(split) for split in source.splits}
    seen = {split: {part[index]['x'].tobytes() for index in range(len(part))} for split, part in rows.items()}
    assert {split: len(texts) for split, texts in seen.items()} == source.splits
    assert len(set.union(*seen.values())) == 600


@pytest.fixture(scope='module')
def drawn():
    rows = Drawn(ListOps()).rows('train')
    return [rows[index] for index in range(1200)]


def test_classes_are_balanced(drawn):
    counts = np.bincount([example['label'] for example in drawn], minlength=10) / len(drawn)
    assert counts.min() > 0.05 and counts.max() < 0.2


def bags(drawn):
    counts = np.array([np.bincount(example['x'], minlength=len(SYMBOLS)) for example in drawn])
    return counts / counts.sum(1, keepdims=True), np.array([int(example['label']) for example in drawn])


def test_a_bag_of_tokens_tells_nothing_in_the_harder_half(drawn):
    lengths = [len(example['x']) for example in drawn]
    harder = [example for example, length in zip(drawn, lengths, strict=True) if length >= np.median(lengths)]
    accuracy, chance, spread = linear_probe(*bags(harder))
    assert accuracy < chance + 3 * spread


def test_the_bag_of_tokens_would_tell_if_there_were_something():
    rows = Drawn(ListOps(3, 14, 2, 10)).rows('train')
    accuracy, chance, spread = linear_probe(*bags([rows[index] for index in range(800)]))
    assert accuracy > chance + 5 * spread


@pytest.mark.parametrize(
    'wrong',
    [{'shortest': 600, 'longest': 600}, {'max_depth': 1}, {'max_arguments': 1}, {'operators': 1.0}, {'shortest': 2}],
)
def test_what_cannot_be_drawn_is_refused(wrong):
    with pytest.raises(UserError, match='ListOps'):
        ListOps(**wrong)


def test_lengths_that_no_expression_has_are_refused():
    """At three arguments and a depth of three the longest is `[f [f d d d] [f d d d] [f d d d]]`: 17 tokens."""
    assert ListOps(16, 60, 3, 3)
    with pytest.raises(UserError, match='has more than 17 tokens; shortest is 17'):
        ListOps(17, 60, 3, 3)
    with pytest.raises(UserError, match='seed of Drawn is -1'):
        Drawn(SHORT, seed=-1)


def test_specs():
    assert build(spec(Drawn, of=SHORT)) == Drawn(SHORT)
    with pytest.raises(UserError, match="has no split 'trian'; did you mean 'train'"):
        Drawn(SHORT).rows('trian')
