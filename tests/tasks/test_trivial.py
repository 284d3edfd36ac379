"""Trivial predictors against what is known of them by counting."""

import dataclasses

import numpy as np
import pytest

from attnlab.compare.baselines import is_of_this_python, text_scores, trivial_scores
from attnlab.config import build
from attnlab.configuration import config_of
from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.long_range.listops import ListOps
from attnlab.data.synthetic.addition import OPERANDS
from attnlab.data.synthetic.recall import MultiQueryRecall
from attnlab.tasks.long_range import Classification
from attnlab.tasks.synthetic import LabelPrediction
from attnlab.tasks.task import Guessable, Slice
from attnlab.tasks.trivial import PRIOR, linear, of_sequences, of_text, of_tokens
from configs import long_range
from tests.sweep.tiny import LANGUAGE


def row(tokens, at, targets):
    tokens = np.array(tokens, np.int32)
    return {
        'tokens': tokens,
        'segments': (np.arange(len(tokens)) < len(tokens) - 1).astype(np.int32),
        'at': np.array([*at, 0], np.int32),
        'targets': np.array([*targets, 0], np.int32),
        'weights': np.array([*[1.0] * len(at), 0.0], np.float32),
    }


def test_labels_are_guessed_among_those_shown_before_the_place():
    train = [row([1, 5, 2, 6, 1, 0], [4], [5]), row([1, 5, 2, 6, 2, 0], [2, 4], [5, 6])]
    asked = [row([1, 5, 2, 6, 1, 0], [2, 4], [5, 6]), row([1, 6, 2, 5, 1, 0], [4], [5])]
    found = of_tokens(train, asked, 8)
    # Labels are 5, 5 and 6: two that occur. At place 2 of the first only 5 has been shown; then both.
    assert found == {'chance': 0.5, 'majority': 2 / 3, 'a label shown': pytest.approx((1 + 0.5 + 0.5) / 3)}
    reals = [one | {'tokens': one['tokens'].astype(np.float32)} for one in asked]
    assert set(of_tokens(train, reals, 8)) == {'chance', 'majority'}


def test_recall_is_guessed_among_the_values_shown():
    task = LabelPrediction(MultiQueryRecall(vocab=16, pairs=(2,)))
    found = task.trivial(task.slices('test', 16, (1,), 200)['1x'])['accuracy']
    assert isinstance(task, Guessable)
    assert found['chance'] == 1 / 8 and found['a label shown'] == pytest.approx(0.5)


def test_recall_of_more_values_than_training_examples_show_is_guessed_among_the_values_shown():
    """With 4,096 values 1,024 examples of training do not have every one that is asked."""
    task = LabelPrediction(MultiQueryRecall(vocab=8192, pairs=(4,)))
    found = task.trivial(task.slices('test', 32, (1,), 1024)['1x'])['accuracy']
    assert found['a label shown'] == pytest.approx(0.25)
    assert found['chance'] == pytest.approx(1 / 4096, rel=0.05)


def test_classes_are_guessed_by_the_first_token_and_the_bag():
    def sequence(tokens, label):
        return {'tokens': np.array(tokens), 'segments': np.ones(len(tokens), np.int32), 'label': np.int32(label)}

    train = [sequence([1, 3, 3], 0), sequence([1, 3, 1], 0), sequence([2, 4, 4], 1), sequence([2, 4, 1], 1)]
    asked = [sequence([1, 4, 4], 1), sequence([2, 4, 4], 1), sequence([1, 3, 3], 0), sequence([1, 3, 3], 1)]
    found = of_sequences(train, asked, 2, 5)
    assert found == {'chance': 0.5, 'majority': 0.25, 'first token': 0.5, 'bag of tokens': 0.75}
    assert set(of_sequences(train, asked, 2, None)) == {'chance', 'majority'}


def test_a_linear_map_of_numbers_is_the_same_for_few_examples_and_for_many():
    rng = np.random.default_rng(0)

    def rows(count):
        labels = rng.integers(3, size=count)
        tokens = rng.standard_normal((count, 8, 1)) + 0.3 * labels[:, None, None]
        return [{'tokens': x, 'label': np.int32(label)} for x, label in zip(tokens, labels, strict=True)]

    asked = rows(400)
    for train in (rows(6), rows(60)):
        x, y = (np.stack([row['tokens'].reshape(-1) for row in each]) for each in (train, asked))
        mean, spread = x.mean(axis=0), x.std(axis=0)
        x, y = (np.column_stack([(each - mean) / spread, np.ones(len(each))]) for each in (x, y))
        weights = np.linalg.solve(x.T @ x + np.eye(9), x.T @ np.eye(3)[[row['label'] for row in train]])
        right = (y @ weights).argmax(axis=1) == [row['label'] for row in asked]
        assert linear(train, asked, 3) == right.mean() > 0.34
    digits = Classification(Digits())
    found = digits.trivial(digits.slices('test', 64, (1,), 180)['all'])['accuracy']
    assert set(found) == {'chance', 'majority', 'linear'} and found['linear'] > 0.85


def test_the_outermost_operator_says_much_of_an_expression():
    """MIN is mostly 0 and MAX mostly 9."""
    task = Classification(Drawn(ListOps(shortest=10, longest=60, max_depth=4), held_out=400))
    found = task.trivial(task.slices('test', 60, (1,), 400)['all'])['accuracy']
    assert found['chance'] == 0.1 < found['majority'] < found['first token'] and found['first token'] > 0.25


@pytest.mark.parametrize(
    ('data', 'low', 'high'),
    [
        (Drawn(ListOps(), held_out=600), 0.35, 0.43),
        (dataclasses.replace(long_range.SMOKE['listops'].data, held_out=600), 0.24, 0.32),
    ],
    ids=['full', 'smoke'],
)
def test_the_outermost_operator_of_the_forms_that_are_trained_on(data, low, high):
    """What docs/problems.md has: bounds are two standard errors of 600 examples about 0.39 and 0.28."""
    task = Classification(data)
    found = task.trivial(task.slices('test', data.kind.length, (1,), 600)['all'])['accuracy']
    assert low < found['first token'] < high and found['majority'] < 0.25


def test_text_is_predicted_by_what_was_counted():
    def window(tokens, weights):
        tokens = np.array(tokens, np.int32)
        return {'tokens': tokens[:-1], 'targets': tokens[1:], 'weights': np.array(weights, np.float32)}

    train = [window([0, 1, 0, 1, 2], [1, 1, 1, 0]), window([0, 2, 0, 1, 1], [1, 1, 1, 0])]
    # Targets 1, 0, 1 and 2, 0, 1: of three tokens 2, 3, 1. After 0 there are 1, 1, 2, 1, and after 1 a 0.
    shares = np.array([3, 4, 2]) / 9
    asked = [window([0, 1, 2], [1, 1]), window([2, 2, 1], [1, 0])]
    found = of_text(train, asked, 3)
    after = [(3 + PRIOR * shares[1]) / (4 + PRIOR), PRIOR * shares[2] / (1 + PRIOR), PRIOR * shares[2] / (1 + PRIOR)]
    assert found['unigram'] == pytest.approx(-np.log(shares[[1, 2, 2]]).mean())
    assert found['bigram'] == pytest.approx(-np.log(after).mean())


def test_a_language_model_is_compared_with_counts_of_the_sample_that_it_is_asked_about():
    config = config_of(LANGUAGE, 'size=tiny')
    with config.unlocked():
        config.evals[0].tokens = 2000
    task, evaluator = build(config.task), build(config.evals[0])
    found = task.trivial(Slice(task.sample('valid', config.length, 2000), config.length))
    assert 2 < found['loss']['bigram'] < found['loss']['unigram'] < np.log(256)
    for name, loss in found['loss'].items():
        assert found['perplexity'][name] == pytest.approx(np.exp(loss))
        assert found['bits_per_byte'][name] == pytest.approx(loss / np.log(2))
    assert evaluator.multiples == (1,) and trivial_scores(config, 'valid/loss@2x') == found['loss']
    assert trivial_scores(config, 'train/loss') == {}
    beside = text_scores(config)
    assert beside == {f'valid/{name}': found[name] for name in ('loss', 'bits_per_byte')}
    assert text_scores(config_of(LANGUAGE.parent / 'recall.py')) == {}


def test_regression_and_addition_know_theirs():
    regression = build(config_of(LANGUAGE.parent / 'recall.py', 'task=regression').task)
    found = regression.trivial(regression.slices('test', 16, (1,), 8)['1x'])['loss']
    assert 0 < found['ridge'] < found['zero']
    addition = build(config_of(LANGUAGE.parent / 'grokking.py').task)
    found = addition.trivial(addition.slices('test', OPERANDS, (1,), 50)['all'])['accuracy']
    assert found['chance'] == 1 / addition.vocab and 0 <= found['majority'] < 0.2


def test_the_text_of_the_standard_library_is_of_the_python_that_runs():
    assert is_of_this_python(config_of(LANGUAGE, 'size=tiny'))
    assert not is_of_this_python(config_of(LANGUAGE.parent / 'recall.py'))
