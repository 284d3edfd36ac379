"""Drawn disturbances, and how well scores find them."""

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support, roc_auc_score

from attnlab.data.series.anomalies import Disturbances, detection
from attnlab.errors import UserError

VALUES = np.random.default_rng(0).standard_normal((1000, 2)).astype(np.float32)


def test_rows_are_disturbed_where_it_says_and_nowhere_else():
    found, which = Disturbances().draw(VALUES)
    changed = (found != VALUES).any(axis=1)
    assert not (changed & ~which).any() and changed[which].mean() > 0.95
    assert 12 <= which.sum() <= 12 * 8
    assert not ((found != VALUES).all(axis=1)).any()
    starts = np.flatnonzero(np.diff(which.astype(int)) == 1)
    assert len(starts) == 12 and np.diff(starts).min() >= 16
    again, other = (Disturbances(seed=seed).draw(VALUES)[0] for seed in (0, 1))
    np.testing.assert_array_equal(again, found)
    assert (other != found).any()


def test_detection_is_that_of_other_code():
    rng = np.random.default_rng(1)
    anomalous = rng.random(500) < 0.1
    scores = np.round(rng.standard_normal(500) + 1.5 * anomalous, 1)
    train = rng.standard_normal(1000)
    found = detection(train, scores, anomalous, 0.95)
    assert found['threshold'] == np.quantile(train, 0.95)
    precision, recall, f1, _ = precision_recall_fscore_support(anomalous, scores > found['threshold'], average='binary')
    assert (found['precision'], found['recall'], found['f1']) == pytest.approx((precision, recall, f1))
    assert found['auroc'] == pytest.approx(roc_auc_score(anomalous, scores))
    assert found['false_alarms'] == pytest.approx((scores[~anomalous] > found['threshold']).mean())


def test_a_stretch_is_not_found_by_one_of_its_rows():
    anomalous = np.array([False] * 10 + [True] * 10)
    scores = np.zeros(20)
    scores[12] = 1
    assert detection(np.zeros(5), scores, anomalous, 0.9)['recall'] == 0.1


def test_mistakes_are_named():
    with pytest.raises(UserError, match='Disturbances has every 20, span 8'):
        Disturbances(every=20)
    with pytest.raises(UserError, match='79 rows are fewer than a part of Disturbances, 80'):
        Disturbances().draw(VALUES[:79])
