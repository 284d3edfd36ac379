"""Scores of single inputs: numbers by hand, and constructed inputs whose order is known."""

import numpy as np
import pytest

from attnlab.analysis import scores
from attnlab.analysis.scores import Mahalanobis, VirtualLogit, auroc, false_positives

LOGITS = np.log(np.array([[0.7, 0.2, 0.1], [0.25, 0.25, 0.5]])) + 3.0


def test_scores_of_logits_by_hand():
    np.testing.assert_allclose(scores.max_probability(LOGITS), [0.7, 0.5])
    np.testing.assert_allclose(scores.max_logit(LOGITS), np.log([0.7, 0.5]) + 3)
    np.testing.assert_allclose(scores.energy(LOGITS), [3, 3])
    np.testing.assert_allclose(scores.energy(LOGITS, 1e-3), np.log([0.7, 0.5]) + 3, atol=1e-2)
    np.testing.assert_allclose(scores.negative_entropy(LOGITS)[1], 2 * 0.25 * np.log(0.25) + 0.5 * np.log(0.5))
    np.testing.assert_array_equal(scores.right(LOGITS, np.array([0, 1])), [True, False])


def test_mahalanobis_is_the_largest_log_density_of_a_class():
    rng = np.random.default_rng(0)
    spread = np.array([[2.0, 0.0], [1.0, 0.5]])
    labels = rng.integers(0, 2, 20_000)
    means = np.array([[0.0, 0.0], [10.0, -4.0]])
    fitted = Mahalanobis.fitted(means[labels] + rng.standard_normal((20_000, 2)) @ spread.T, labels)
    x = np.array([[0.0, 0.0], [10.0, -4.0], [3.0, 1.0]])
    away = np.linalg.solve(spread, (x[:, None] - means).reshape(-1, 2).T).T.reshape(3, 2, 2)
    np.testing.assert_allclose(fitted.score(x), np.max(-0.5 * np.sum(away**2, axis=2), axis=1), rtol=0.05, atol=0.01)


def test_the_virtual_logit_falls_with_what_no_principal_direction_has():
    rng = np.random.default_rng(1)
    plane = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    features = rng.standard_normal((500, 3)) @ plane[:3] + 0.01 * rng.standard_normal((500, 3)) @ plane[3:]
    weight = plane[:3].T @ rng.standard_normal((3, 3))
    bias = np.array([0.5, -1.0, 2.0])
    fitted = VirtualLogit.fitted(features, features @ weight + bias, weight, bias)
    np.testing.assert_allclose(fitted.origin @ weight, -bias, atol=1e-9)
    residual = np.linalg.norm((features - fitted.origin) @ fitted.rest, axis=1)
    np.testing.assert_allclose(fitted.alpha * residual.mean(), scores.max_logit(features @ weight + bias).mean())
    moved = features + plane[3]
    logits = moved @ weight + bias
    np.testing.assert_allclose(logits, features @ weight + bias, atol=1e-9)
    assert auroc(fitted.score(features, logits), fitted.score(moved, logits)) > 0.99
    assert auroc(scores.energy(logits), scores.energy(logits)) == pytest.approx(0.5)


def test_areas_and_rates_by_hand():
    inside, outside = np.array([3.0, 2.0, 1.0, 4.0]), np.array([2.0, 0.0])
    # Of eight pairs six and a half are in order.
    assert auroc(inside, outside) == 6.5 / 8
    assert false_positives(inside, outside, 0.75) == 0.5
    assert false_positives(inside, outside, 1.0) == 0.5
    assert false_positives(inside, outside, 0.5) == 0.0
