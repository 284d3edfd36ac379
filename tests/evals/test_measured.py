"""Intervals cover what they say: the share of simulated experiments whose interval has the true value in it."""

import numpy as np
import pytest

from attnlab.evals.measured import SHARE, Measured, of_documents, of_examples, of_seeds

RUNS = 2000
ERROR = 3 * np.sqrt(0.95 * 0.05 / RUNS)
"""Three standard errors of a share of 0.95 in as many runs."""


def coverage(made, truth):
    found = [made(np.random.default_rng(run)) for run in range(RUNS)]
    return np.mean([one.low <= truth <= one.high for one in found])


@pytest.mark.parametrize('n', [3, 5, 10])
def test_a_mean_of_seeds_is_covered(n):
    assert coverage(lambda rng: of_seeds(rng.normal(1.0, 2.0, n)), 1.0) == pytest.approx(0.95, abs=ERROR)


def test_the_noise_of_a_shared_test_set_is_covered():
    """Every seed sees the same deviation of the test set, which more of them do not average away."""

    def made(rng, noise):
        values = rng.normal(1.0, 0.1, 5) + rng.normal(0.0, 0.5)
        return of_seeds(values, noise)

    assert coverage(lambda rng: made(rng, 0.5), 1.0) == pytest.approx(0.95, abs=2 * ERROR)
    assert coverage(lambda rng: made(rng, None), 1.0) < 0.5


@pytest.mark.parametrize(
    ('documents', 'spread'), [(6, 0.5), (22, 0.5), (22, 1.0), pytest.param(200, 1.0, marks=pytest.mark.slow)]
)
def test_a_loss_over_documents_is_covered(documents, spread):
    """Documents of different length and difficulty; a long tail of lengths costs a little."""

    def made(rng):
        counts = np.ceil(1000 * rng.lognormal(0, spread, documents))
        return of_documents(counts * rng.normal(2.0, 0.4, documents), counts)

    assert 0.95 - ERROR - (0.04 if spread == 1.0 and documents < 100 else 0.015) < coverage(made, 2.0) < 0.98


def answered(rng, share, examples, most, alike):
    """Labels right and asked in examples of 1 to `most` labels; examples are as hard as Beta draws, `alike` or not."""
    asked = rng.integers(1, most + 1, examples)
    shares = rng.beta(share / alike, (1 - share) / alike, examples) if alike else np.full(examples, share)
    right = rng.binomial(asked, shares)
    products = np.array([np.mean(right * right), np.mean(right * asked), np.mean(asked * asked)])
    return of_examples(float(right.sum()), float(asked.sum()), products, examples)


@pytest.mark.parametrize(
    ('share', 'examples', 'most', 'alike'),
    [(0.5, 200, 1, 0), (0.97, 200, 1, 0), (0.6, 200, 8, 0), (0.6, 200, 8, 1.0), (0.97, 200, 8, 1.0)],
)
def test_a_share_of_a_finite_test_set_is_covered(share, examples, most, alike):
    """Labels of one example that fail together are as noisy as fewer labels; all right still has an interval."""
    found = coverage(lambda rng: answered(rng, share, examples, most, alike), share)
    assert 0.95 - ERROR - (0.03 if share == 0.97 else 0.01) < found < 0.98
    every = answered(np.random.default_rng(0), 1.0, 50, 4, 0)
    assert (every.mean, every.high, every.n, every.kind) == (1.0, 1.0, 50, 'examples')
    assert every.low == pytest.approx(50 / (50 + 1.96**2), rel=1e-3)


def test_accuracies_of_seeds_on_one_finite_test_set_are_covered():
    """Every seed is asked the same examples, of which some are hard for all: seeds alone are far too sure."""

    def made(rng, noisy):
        hard = rng.random(300) < 0.2
        rights = [rng.random(300) < np.where(hard, 0.1, 0.9) + rng.normal(0, 0.01) for _ in range(5)]
        p = float(np.mean(rights))
        noise = of_examples(300 * p, 300.0, np.array([p, p, 1.0]), 300).noise
        return of_seeds([float(np.mean(right)) for right in rights], noise if noisy else None)

    truth = 0.2 * 0.1 + 0.8 * 0.9
    assert coverage(lambda rng: made(rng, True), truth) > 0.95 - ERROR
    assert coverage(lambda rng: made(rng, False), truth) < 0.85


def test_intervals_end_where_the_quantity_does():
    wide = Measured(0.9, 0.7, 1.1, 3, 'seeds').within(0.0, 1.0)
    assert (wide.low, wide.mean, wide.high) == (0.7, 0.9, 1.0)
    assert Measured(0.9, None, None, 1, 'one').within(0.0, 1.0).low is None


def test_a_value_that_is_not_in_the_middle_of_its_interval_is_shown_with_its_ends():
    accuracies = of_seeds([0.9, 0.99, 1.0])
    assert accuracies.text(2) == '0.96 ± 0.14' and accuracies.within(*SHARE).text(2) == '0.96 [0.83, 1.00]'
    assert accuracies.negated().within(-1.0, 0.0).text(2) == '-0.96 [-1.00, -0.83]'
    assert Measured(0.5, 0.48, 0.5199, 1024, 'examples').text(3) == '0.500 ± 0.020'


def test_one_value_has_no_interval_and_two_have_a_range():
    one, two = of_seeds([2.0]), of_seeds([2.0, 3.0])
    assert (one.n, one.kind, one.low, one.half_width) == (1, 'one', None, None)
    assert (two.mean, two.low, two.high, two.kind) == (2.5, 2.0, 3.0, 'range')
    assert of_documents(np.array([3.0, 0.0]), np.array([2.0, 0.0])) == Measured(1.5, None, None, 1, 'one')
    with pytest.raises(ValueError, match='an interval over one'):
        Measured(1.0, 0.9, 1.1, 1, 'one')
    with pytest.raises(ValueError, match='an interval over seeds'):
        Measured(1.0, None, None, 3, 'seeds')
    with pytest.raises(ValueError, match='is not between'):
        Measured(1.0, 1.1, 1.2, 3, 'seeds')


def test_a_ratio_repeats_and_changes_its_sign_and_unit():
    totals, counts = np.array([3.0, 5.0, 1.0]), np.array([2.0, 2.0, 1.0])
    found = of_documents(totals, counts)
    assert found == of_documents(totals, counts) and found.mean == 9 / 5 and found.n == 3
    assert found.negated().negated() == found and found.negated().low == -found.high
    assert f'{of_seeds([0.0, 0.0]).negated().mean:g}' == '0'
    assert found.scaled(2.0).half_width == pytest.approx(2 * found.half_width)
