"""Cascades of answers whose confidence is made to tell something, or nothing."""

import numpy as np
import pytest

from attnlab.analysis.cascade import budgeted, cascade, described, learned_confidence
from attnlab.errors import UserError


def test_the_least_sure_are_handed_on():
    confidence = np.array([0.9, 0.5, 0.8, 0.6, 0.7])
    first = np.array([True, False, True, False, True])
    second = np.array([False, True, True, True, True])
    found = cascade(confidence, first, second, 0.25)
    # Sure in order: 0.5, 0.6 (wrong), 0.7, 0.8, 0.9 (right, where the second is wrong).
    at = dict(zip(found.rates, found.accuracy, strict=True))
    np.testing.assert_allclose([at[0.0], at[0.2], at[0.4], at[0.6], at[0.8], at[1.0]], [0.6, 0.8, 1, 1, 1, 0.8])
    np.testing.assert_allclose(found.by_chance[0], 0.6)
    np.testing.assert_allclose(found.by_chance[-1], 0.8)
    assert found.cost[0] == 0.25 and found.cost[-1] == 1.25
    place = found.rates.index(0.4)
    # What is below the threshold is handed on: 0.5 and 0.6.
    assert found.thresholds[place] == 0.7 and np.sum(confidence < found.thresholds[place]) == 2
    assert np.all(confidence < found.thresholds[-1])
    above = np.array([0, 0.8 - 0.64, 1 - 0.68, 1 - 0.72, 1 - 0.76, 0])
    np.testing.assert_allclose(found.gain.value, np.sum((above[1:] + above[:-1]) / 2) / 5)


def test_confidence_that_is_always_the_same_gains_nothing():
    rng = np.random.default_rng(0)
    first, second = rng.random(50) < 0.5, rng.random(50) < 0.9
    found = cascade(np.full(50, 0.7), first, second, 0.1)
    np.testing.assert_allclose(found.accuracy, found.by_chance, atol=1e-12)
    assert found.gain.value == pytest.approx(0, abs=1e-12) and found.gain.high == pytest.approx(0, abs=1e-12)


def test_rows_of_several_predictions_have_shares_of_right_ones():
    found = cascade(np.array([0.2, 0.9, 0.5]), np.array([0.25, 1.0, 0.5]), np.array([0.75, 0.5, 0.5]), 0.5)
    # The first row gains a half, the third nothing, and the second loses a half.
    at = dict(zip(np.round(found.rates, 2), found.accuracy, strict=True))
    np.testing.assert_allclose([at[0.0], at[0.33], at[0.67], at[1.0]], np.array([1.75, 2.25, 2.25, 1.75]) / 3)


@pytest.mark.slow
def test_the_interval_of_a_gain_covers_what_it_says():
    """Of confidence that has nothing to do with being right the gain is 0; 95 % of intervals hold it."""
    rng = np.random.default_rng(0)
    draws = (cascade(rng.random(100), rng.random(100) < 0.6, rng.random(100) < 0.8, 0.1).gain for _ in range(60))
    held = np.mean([gain.low <= 0 <= gain.high for gain in draws])
    assert 0.86 <= held <= 1.0, held


def specialist(rng, count):
    """Logits of a classifier of four classes, and whether it and a second one, which knows the first two, are right."""
    labels = rng.integers(0, 4, count)
    logits = rng.standard_normal((count, 4))
    logits[np.arange(count), labels] += 1.5
    return logits, logits.argmax(1) == labels, labels < 2


def test_a_rule_that_is_learned_knows_what_a_specialist_knows():
    rng = np.random.default_rng(0)
    logits, first, second = specialist(rng, 800)
    asked, ours, theirs = specialist(rng, 800)
    p = np.exp(asked) / np.exp(asked).sum(1, keepdims=True)
    plain = cascade(p.max(1), ours, theirs, 0.1)
    known, new = described(logits), described(asked)
    learned = cascade(learned_confidence(known, first, second, new), ours, theirs, 0.1)
    # Handing on the unsure sends half of them to a classifier that does not know their classes.
    assert learned.gain.low > plain.gain.value + 0.02
    # Where the second is always right, being unsure is all that counts, and both rules are alike.
    always = np.ones(800, bool)
    both = [
        cascade(confidence, ours, always, 0.1).gain.value
        for confidence in (p.max(1), learned_confidence(known, first, always, new))
    ]
    assert abs(both[0] - both[1]) < 0.02


@pytest.mark.parametrize(('first_cost', 'budget'), [(0.25, 0.75), (0.1, 0.3), (0.2, 0.5), (0.3, 0.3), (0.4, 1.39)])
def test_a_budget_is_never_exceeded(first_cost, budget):
    """Of few rows, and of rows less sure than those that the threshold was chosen on; ties are broken fairly."""
    for known in (np.array([0.9]), np.array([0.9, 0.8, 0.9]), np.linspace(0.5, 0.9, 7)):
        for confidence in (np.array([0.1]), np.array([0.5, 0.4, 0.85]), np.full(4, 0.7), np.linspace(0, 0.8, 9)):
            count = len(confidence)
            first, second = np.zeros(count, bool), np.ones(count, bool)
            found = budgeted(known, confidence, first, second, first_cost, budget)
            assert found.cost <= budget and found.cost == first_cost + found.share
            # The second is right on what it is asked.
            assert found.accuracy == pytest.approx(found.share)


def test_a_threshold_keeps_the_budget_in_the_mean_over_rows_drawn_alike():
    """A row is below the k-th of n others with probability k / (n + 1)."""
    rng = np.random.default_rng(0)
    rows = rng.random((4000, 3))
    none = np.zeros(1, bool)
    below = [new < budgeted(np.array(known), np.array([new]), none, none, 0.1, 0.6).threshold for *known, new in rows]
    # One of two others would have been exceeded by two thirds of rows.
    assert abs(np.mean(below) - 1 / 3) < 0.03


def test_a_budget_is_kept():
    chosen, confidence = np.linspace(0, 1, 101)[:-1], np.linspace(0, 1, 1001)[:-1]
    first, second = confidence > 0.5, np.ones(1000, bool)
    found = budgeted(chosen, confidence, first, second, 0.2, 0.5)
    # Nearly three tenths are handed on, of the half that is wrong: those less sure than the 30th of 100.
    assert found.threshold == pytest.approx(0.29) and found.share == pytest.approx(0.29, abs=2e-3)
    assert found.cost == pytest.approx(0.49, abs=2e-3) and found.accuracy == pytest.approx(0.79, abs=3e-3)
    assert budgeted(chosen, confidence, first, second, 0.2, 2.0).accuracy == 1.0
    with pytest.raises(UserError, match=r'the budget is 0\.1 of what the second run costs; the first alone costs 0\.2'):
        budgeted(chosen, confidence, first, second, 0.2, 0.1)
