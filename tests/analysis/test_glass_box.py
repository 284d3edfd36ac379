"""What a model says of its own tokens: statistics by hand, rows it knows and rows it does not."""

import numpy as np
import pytest

from attnlab.analysis.glass_box import row_statistics, self_judged


def test_statistics_by_hand():
    p = np.array([[0.8, 0.1, 0.1], [0.4, 0.3, 0.3]])
    found = row_statistics(np.log(p) + 2.0)
    assert found['log-probability'] == pytest.approx(np.log([0.8, 0.4]).mean())
    assert found['negative entropy'] == pytest.approx(np.mean(np.sum(p * np.log(p), axis=1)))
    assert found['sure'] == 0.5 and found['variance'] == pytest.approx(p.var(axis=1).mean())


def test_a_model_that_knows_what_it_knows():
    rng = np.random.default_rng(0)
    logits, labels = [], []
    for sure in np.linspace(0.1, 4, 12):
        each = rng.standard_normal((400, 5)) * sure
        p = np.exp(each) / np.exp(each).sum(1, keepdims=True)
        logits.append(each)
        labels.append((p.cumsum(1) < rng.random((400, 1))).sum(1))
    found = self_judged(logits, labels)
    assert all(each.spearman > 0.9 for each in found.values())
    # Labels that have nothing to do with it: nothing to find; of one row alone nothing is said.
    shuffled = self_judged(logits, [rng.integers(0, 5, 400) for _ in logits])
    assert abs(shuffled['log-probability'].pearson) < 0.8
    assert np.isnan(self_judged(logits[:1], labels[:1])['sure'].pearson)
