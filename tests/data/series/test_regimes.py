"""Windows of regimes: their laws, and how well they can be told apart at all."""

import numpy as np
import pytest

from attnlab.data.long_range.drawn import Drawn, example
from attnlab.data.series.regimes import RegimeWindows
from attnlab.errors import UserError

WINDOWS = RegimeWindows()


def drawn(count, law=WINDOWS):
    found = [example(law, 0, 'test', index) for index in range(count)]
    return np.stack([one['x'] for one in found]), np.array([one['label'] for one in found])


def test_windows_have_their_label_s_law_and_no_level_or_size():
    x, labels = drawn(400)
    np.testing.assert_allclose(x.mean(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(axis=1), 1, atol=1e-5)
    assert x.shape == (400, 96) and x.dtype == np.float32
    np.testing.assert_allclose(np.bincount(labels) / 400, 0.25, atol=0.08)
    for label in range(4):
        first, second = WINDOWS.law(label).coefficients
        # The first autocorrelation of an autoregression of two terms, by Yule and Walker.
        measured = np.mean(x[labels == label][:, 1:] * x[labels == label][:, :-1])
        assert measured == pytest.approx(first / (1 - second), abs=0.05)


def test_likelihood_tells_regimes_apart_and_a_guess_does_not():
    """By the errors of the laws' own predictions: about 86 % can be told at all."""
    x, labels = drawn(600)
    errors = []
    for label in range(4):
        first, second = WINDOWS.law(label).coefficients
        errors.append(np.log(((x[:, 2:] - first * x[:, 1:-1] - second * x[:, :-2]) ** 2).mean(axis=1)))
    right = np.mean(np.argmin(errors, axis=0) == labels)
    assert 0.8 < right < 0.92


def test_examples_are_a_function_of_seed_split_and_index():
    rows = Drawn(WINDOWS, train=5, held_out=3).rows('train')
    np.testing.assert_array_equal(rows[1]['x'], example(WINDOWS, 0, 'train', 1)['x'])
    for other in (example(WINDOWS, 1, 'train', 1), example(WINDOWS, 0, 'valid', 1), example(WINDOWS, 0, 'train', 2)):
        assert (other['x'] != rows[1]['x']).any()


@pytest.mark.parametrize('given', [{'angles': (0.4,)}, {'angles': (0.4, 0.4)}, {'radius': 1.0}])
def test_mistakes_are_named(given):
    with pytest.raises(UserError, match='angles and radius of RegimeWindows are'):
        RegimeWindows(**given)


def test_a_window_of_one_step_has_no_size():
    with pytest.raises(UserError, match='steps of RegimeWindows is 1; a window needs two or more'):
        RegimeWindows(steps=1)
