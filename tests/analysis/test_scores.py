"""Scores of single inputs: numbers by hand, and constructed inputs whose order is known."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis import scores
from attnlab.analysis.scores import (
    ConjNorm,
    Mahalanobis,
    RelativeUncertainty,
    VirtualLogit,
    agreement,
    auroc,
    false_positives,
    max_probability,
    mean_logits,
)
from attnlab.models.heads.evidential import EvidentialHead

LOGITS = np.log(np.array([[0.7, 0.2, 0.1], [0.25, 0.25, 0.5]])) + 3.0


def test_scores_of_logits_by_hand():
    np.testing.assert_allclose(scores.max_probability(LOGITS), [0.7, 0.5])
    np.testing.assert_allclose(scores.max_logit(LOGITS), np.log([0.7, 0.5]) + 3)
    np.testing.assert_allclose(scores.energy(LOGITS), [3, 3])
    np.testing.assert_allclose(scores.negative_entropy(LOGITS)[1], 2 * 0.25 * np.log(0.25) + 0.5 * np.log(0.5))
    np.testing.assert_array_equal(scores.right(LOGITS, np.array([0, 1])), [True, False])


def test_the_energy_of_an_evidential_head_is_the_logarithm_of_all_its_evidence():
    head = EvidentialHead(3, 1, classes=4, rngs=nnx.Rngs(0))
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((5, 3)) * [[0.1], [1], [10], [100], [0]], jnp.float32)
    rows = np.asarray(head.linear(hidden), np.float64)
    strengths = np.sum(1 + np.logaddexp(0, rows), axis=1)
    found = scores.energy(np.asarray(head.logits(hidden), np.float64))
    np.testing.assert_allclose(found, np.log(strengths), rtol=1e-5)
    # What is said to be without evidence is what looks least like what was learnt.
    np.testing.assert_allclose(head.vacuity(hidden), 4 * np.exp(-found), rtol=1e-5)


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
    # Far from zero a residual from anywhere but the origin is another.
    away = features + 3 * plane[0]
    residual = np.linalg.norm((away - fitted.origin) @ fitted.rest, axis=1)
    expected = scores.energy(away @ weight + bias) - fitted.alpha * residual
    np.testing.assert_allclose(fitted.score(away, away @ weight + bias), expected)
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


def test_relative_uncertainty_tells_what_is_confused():
    # Right answers are sure, or torn between the first class and the second; wrong ones between the second and third.
    logits = np.log(np.array([[0.98, 0.01, 0.01], [0.49, 0.49, 0.02], [0.02, 0.49, 0.49]]))
    right = np.array([True, True, False])
    found = RelativeUncertainty.fitted(logits, right)
    p = np.exp(logits)
    expected = np.maximum(np.outer(p[2], p[2]) - (np.outer(p[0], p[0]) + np.outer(p[1], p[1])) / 2, 0) * (1 - np.eye(3))
    np.testing.assert_allclose(found.matrix, expected / np.linalg.norm(expected))
    np.testing.assert_allclose(found.score(logits), [-each @ found.matrix @ each for each in p])
    # As torn, the largest probabilities are the same, and only this score says which to trust.
    assert found.score(logits)[1] > found.score(logits)[2] and max_probability(logits)[1] == max_probability(logits)[2]
    with pytest.raises(ValueError, match='all right or all wrong'):
        RelativeUncertainty.fitted(logits, np.ones(3, bool))


def test_conjnorm_of_two_is_a_sum_of_gaussians_and_the_power_is_chosen():
    rng = np.random.default_rng(0)
    features = np.concatenate([rng.standard_normal((50, 3)) + 4, rng.standard_normal((50, 3)) - 4])
    labels = np.repeat([0, 1], 50)
    found = ConjNorm.fitted(features, labels, (2.0,))
    scale = np.sqrt((features**2).sum(1).mean())
    squares = [((features - features[labels == label].mean(0)) ** 2).sum(1) / scale**2 for label in (0, 1)]
    np.testing.assert_allclose(found.score(features), np.log(sum(np.exp(-each / 2) for each in squares)), rtol=1e-6)
    chosen = ConjNorm.fitted(features, labels)
    assert chosen.power in (1.5, 2.0, 2.5, 3.0)
    # A divergence is nothing at its mean and more elsewhere, whatever the power.
    for power in (1.5, 3.0):
        one = ConjNorm(np.array([[1.0, -2.0]]), 1.0, power)
        found_scores = one.score(np.array([[1.0, -2.0], [1.1, -2.0], [-1.0, 2.0]]))
        np.testing.assert_allclose(found_scores[0], 0, atol=1e-12)
        assert 0 > found_scores[1] > found_scores[2]


def test_agreement_by_hand():
    members = np.log(np.array([[[0.9, 0.1], [0.5, 0.5]], [[0.1, 0.9], [0.5, 0.5]]]))
    entropy = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1))
    np.testing.assert_allclose(agreement(members), [entropy - np.log(2), 0], atol=1e-12)
    np.testing.assert_allclose(np.exp(mean_logits(members)), 0.5)


def test_classes_of_one_example_each_have_the_distances_of_the_features():
    features = np.random.default_rng(0).standard_normal((2, 4))
    fitted = Mahalanobis.fitted(features, np.arange(2))
    distance = np.sum((features[0] - features[1]) ** 2)
    found = fitted.score(np.stack([features[0], 2 * features[1] - features[0]]))
    np.testing.assert_allclose(found * scores.RIDGE, [0, -0.5 * distance], rtol=1e-6, atol=1e-6)
