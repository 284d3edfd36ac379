"""Calibration, selection and conformal sets: numbers by hand, and coverage over a thousand draws."""

import numpy as np
import pytest
from scipy.special import softmax

from attnlab.analysis import calibration
from attnlab.analysis.calibration import (
    Estimate,
    bootstrapped,
    calibration_error,
    calibration_interval,
    conformal_sets,
    conformal_threshold,
    controlled,
    fitted_temperature,
    misfit,
    risk_by_coverage,
    weighted_threshold,
)
from attnlab.errors import UserError


def test_the_calibration_error_by_hand():
    confidence = np.array([0.95, 0.95, 0.55, 0.55])
    right = np.array([True, False, True, True])
    # Two bins of two: |0.5 - 0.95| and |1 - 0.55|.
    assert calibration_error(confidence, right) == pytest.approx(0.45)
    assert calibration_error(np.array([1.0, 0.0]), np.array([True, False])) == 0.0
    found = calibration_interval(np.tile(confidence, 50), np.tile(right, 50))
    assert found.value == pytest.approx(0.45) and found.low < 0.45 < found.high < 0.6


def test_the_temperature_of_logits_that_are_three_times_too_large_is_three():
    rng = np.random.default_rng(0)
    logits = 2 * rng.standard_normal((20_000, 5))
    labels = np.array([rng.choice(5, p=each) for each in softmax(logits, axis=1)])
    assert fitted_temperature(3 * logits, labels) == pytest.approx(3, rel=0.05)
    confidence, right = softmax(logits, axis=1).max(axis=1), logits.argmax(axis=1) == labels
    # Drawn from their own probabilities they are calibrated, up to the noise of bins.
    assert calibration_error(confidence, right) < 0.015
    assert calibration_error(softmax(3 * logits, axis=1).max(axis=1), right) > 0.1


def test_risk_by_coverage_by_hand():
    risks = risk_by_coverage(np.array([0.1, 0.9, 0.5]), np.array([False, True, False]))
    np.testing.assert_allclose(risks, [0, 1 / 2, 2 / 3])
    # A score that tells nothing apart leaves the risk as it is, in whatever order rows come.
    np.testing.assert_allclose(risk_by_coverage(np.zeros(4), np.array([True, True, True, False])), 1 / 4)
    mixed = np.array([False, True, True, False, True])
    np.testing.assert_allclose(
        risk_by_coverage(np.array([0.5, 0.5, 0.9, 0.5, 0.1]), mixed), [0, 1 / 3, 4 / 9, 1 / 2, 2 / 5]
    )


def test_conformal_sets_cover_as_often_as_they_say():
    rng = np.random.default_rng(1)
    count, alpha, draws = 49, 0.1, 1000
    logits = 1.5 * rng.standard_normal((draws, count + 1, 4))
    # The labels come from other probabilities than those that the model gives.
    truth = softmax(0.5 * logits, axis=2)
    labels = (truth.cumsum(axis=2) < rng.random((draws, count + 1, 1))).sum(axis=2)
    covered = []
    for each, label in zip(logits, labels, strict=True):
        threshold = conformal_threshold(misfit(each[:count])[np.arange(count), label[:count]], alpha)
        covered.append(conformal_sets(each[count:], threshold)[0, label[count]])
    # Between 1 - alpha and 1 - alpha + 1 / (n + 1), up to four standard errors of so many draws.
    error = 4 * np.sqrt(alpha * (1 - alpha) / draws)
    assert 1 - alpha - error < np.mean(covered) < 1 - alpha + 1 / (count + 1) + error
    assert conformal_threshold(np.arange(9.0), 0.1) == 8.0
    assert conformal_threshold(np.arange(8.0), 0.1) == np.inf


def test_controlled_risk_is_as_small_as_asked():
    # Losses of two settings: 0.4 and 0.05 in the mean; of 19 examples 19/20 of it, and 1/20 for the new one.
    losses = np.tile([[0.4, 0.05]], (19, 1))
    assert controlled(losses, 0.5) == 0
    assert controlled(losses, 0.1) == 1
    assert controlled(losses, 0.09) is None
    assert controlled(losses, 0.4301) == 0 and controlled(losses, 0.4299) == 1
    # Weights of a half leave the new example with more of a share.
    assert controlled(losses, 0.1, weights=np.full(19, 0.5)) is None
    rng = np.random.default_rng(2)
    settings, risks = np.linspace(0, 1, 201), []
    for _ in range(1000):
        scores = rng.beta(5, 2, 101)
        losses = (scores[:, None] > settings).astype(float)
        risks.append(losses[-1, controlled(losses[:-1], 0.1)])
    assert 0.1 - 2 / 101 - 0.04 < np.mean(risks) < 0.1 + 0.04
    with pytest.raises(UserError, match='losses must not rise'):
        controlled(losses[:, ::-1], 0.1)
    with pytest.raises(UserError, match=r'alpha is 0\.0; it must be above 0 and below 1'):
        calibration.conformal_threshold(losses[:, 0], 0.0)


def test_weights_of_one_are_no_weights_and_older_examples_count_less():
    scores = np.random.default_rng(3).standard_normal(40)
    for alpha in (0.05, 0.1, 0.3):
        assert weighted_threshold(scores, np.ones(40), alpha) == conformal_threshold(scores, alpha)
    # Of weights 1, 1/2, 1/4 and the new example's one, 11/4 in all: up to the second score lie 6/11.
    weights = np.array([1.0, 0.5, 0.25])
    assert weighted_threshold(np.array([1.0, 2.0, 3.0]), weights, 1 - 6 / 11) == 2.0
    assert weighted_threshold(np.array([1.0, 2.0, 3.0]), weights, 0.37) == 3.0
    assert weighted_threshold(np.array([1.0, 2.0, 3.0]), weights, 0.3) == np.inf


def test_coverage_under_drift_is_within_its_bound():
    rng, count, alpha, draws, step = np.random.default_rng(4), 100, 0.2, 1000, 0.02
    ages = np.arange(count, 0, -1)
    # Scores are uniform on an interval that moves by a fiftieth a row: two of age apart share 1 - 0.02 age of it.
    scores = rng.random((draws, count + 1)) + step * np.arange(count + 1)
    missed = {}
    for decay in (1.0, 0.9):
        weights = decay ** ages.astype(float)
        thresholds = np.array([weighted_threshold(each[:-1], weights, alpha) for each in scores])
        # Of less weight none would be finite, and nothing missed.
        assert np.isfinite(thresholds).all()
        missed[decay] = np.mean(scores[:, -1] > thresholds)
        apart = np.minimum(step * ages, 1)
        bound = alpha + np.sum(weights * apart) / (weights.sum() + 1)
        assert missed[decay] < bound + 4 * np.sqrt(0.25 / draws)
    # Without weights it is missed far more often than asked; with them within the bound of about 0.38.
    assert missed[1.0] > 0.5 and 0.2 < missed[0.9] < 0.38


def test_drift_may_cost_twice_the_distance_of_two_examples():
    # Old scores are uniform but for a share below all others, the new one's likewise but for a share above them.
    count, share, alpha = 200, 0.2, 0.5
    values, even = np.concatenate([[-1.0], np.arange(count) / count, [2.0]]), np.full(count, (1 - share) / count)
    old, new = np.concatenate([[share], even, [0]]), np.concatenate([[0], even, [share]])
    apart = np.abs(old - new).sum() / 2
    thresholds = [weighted_threshold(np.array([value]), np.ones(1), alpha) for value in values]
    missed = sum(chance * new[values > threshold].sum() for chance, threshold in zip(old, thresholds, strict=True))
    # One old example has half of the weight.
    assert alpha + 0.5 * apart < missed < alpha + 0.5 * 2 * apart


def test_controlled_risk_under_drift_is_within_its_bound():
    rng, count, alpha, draws, step = np.random.default_rng(5), 100, 0.2, 1000, 0.02
    ages = np.arange(count, 0, -1)
    # As above; a setting says where an example is missed, and one far above all of them misses none.
    scores = rng.random((draws, count + 1)) + step * np.arange(count + 1)
    settings = np.linspace(0, 1 + step * (count + 1), 301)
    losses = (scores[:, :, None] > settings).astype(float)
    risks = {}
    for decay in (1.0, 0.9):
        weights = decay ** ages.astype(float)
        columns = [controlled(each[:-1], alpha, weights=weights) for each in losses]
        assert None not in columns
        risks[decay] = np.mean(losses[np.arange(draws), -1, columns])
        bound = alpha + np.sum(weights * np.minimum(step * ages, 1)) / (weights.sum() + 1)
        assert risks[decay] < bound + 4 * np.sqrt(0.25 / draws)
    assert risks[1.0] > 0.5 and risks[0.9] < 0.38


def test_examples_of_groups_are_drawn_together():
    rng = np.random.default_rng(0)
    confidence = np.full(400, 0.6)
    groups = np.repeat(np.arange(8), 50)
    # Within a group all are right or all wrong: eight examples, not four hundred.
    right = np.repeat(rng.random(8) < 0.5, 50)
    alone, together = (calibration_interval(confidence, right, groups=each) for each in (None, groups))
    assert alone.value == together.value
    assert together.high - together.value > 4 * (alone.high - alone.value)


@pytest.mark.parametrize(
    ('rows', 'least'), [(2, 0.85), (4, 0.82), (8, 0.82), pytest.param(16, 0.85, marks=pytest.mark.slow)]
)
def test_intervals_of_few_rows_cover_the_mean(rows, least):
    """Losses in [0, 1], most of them small, as wrong answers of rows are."""
    drawn = np.random.default_rng(0).beta(1, 6, size=(60, rows))
    found = [bootstrapped(lambda each, row=row: float(np.mean(row[each])), rows, (0.0, 1.0)) for row in drawn]
    assert np.mean([one.low <= 1 / 7 <= one.high for one in found]) >= least
    assert all(0 <= one.low <= one.value <= one.high <= 1 for one in found)


def test_one_row_has_no_interval():
    assert bootstrapped(lambda each: 0.5, 1) == Estimate(0.5, None, None)
    alone = calibration_interval(np.full(4, 0.75), np.array([True, True, True, False]), groups=np.zeros(4, int))
    assert alone == Estimate(0.0, None, None)


def test_intervals_of_calibration_reach_down_by_the_bias_of_few_examples():
    """Of 100 examples an error of 0.05 is estimated twice as large."""
    rng, held = np.random.default_rng(0), []
    for _ in range(30):
        confidence = rng.uniform(0.5, 1, 100)
        found = calibration_interval(confidence, rng.random(100) < confidence - 0.05)
        held.append(found.low <= 0.05 <= found.high)
    assert np.mean(held) > 0.8
