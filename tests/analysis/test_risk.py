"""Risks that are controlled: losses by hand, and promises kept by simulation, of rows and not of predictions."""

import dataclasses

import numpy as np
import pytest

from attnlab.analysis.calibration import conformal_threshold, misfit
from attnlab.analysis.outputs import Outputs
from attnlab.analysis.risk import LOSSES, check_level, controlled_risk, recent_risk
from attnlab.commands.uncertainty import RISKS
from attnlab.errors import UserError


def made(p, labels, groups=None):
    """Outputs with these probabilities."""
    logits = np.log(np.asarray(p, np.float64))
    return Outputs(np.zeros((len(logits), 1)), logits, np.asarray(labels), groups=groups)


def test_losses_by_hand():
    assert tuple(LOSSES) == RISKS
    # The label has 0.7, 0.2 and 0.1; the first is right.
    known = made([[0.7, 0.2, 0.1]] * 3, [0, 1, 2])
    tested = made([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1]], [2, 0], groups=np.array([1, 1]))
    # 3/4 R + 1/4: one of three may be missed at a level of a half, none at a quarter, two at three quarters.
    for level, setting, size in ((0.75, 0.3, 0.5), (0.5, 0.8, 1.5 + 0.5), (0.25, 0.9, 3.0)):
        found = controlled_risk(known, tested, 'missed', level)
        np.testing.assert_allclose(found.setting, setting, atol=1e-12)
        assert found.used == size
    assert found.risk.value == 0
    # Sets of a misfit up to 0.8 hold the first two classes: of the tested row one label of two is missing.
    assert controlled_risk(known, tested, 'missed', 0.5).risk.value == 0.5
    # Wrong are two of the three, all as sure: with a level of a half none may be given, with 0.8 all.
    found = controlled_risk(known, tested, 'wrong', 0.5)
    np.testing.assert_allclose(found.setting, 0.7)
    assert (found.used, found.risk.value) == (0.0, 0.0)
    found = controlled_risk(known, tested, 'wrong', 0.8)
    assert (found.setting, found.used, found.risk.value) == (-np.inf, 1.0, 0.5)


def test_sets_that_may_lack_a_label_are_those_of_split_conformal_prediction():
    rng = np.random.default_rng(0)
    p, labels = rng.dirichlet(np.ones(5), 60), rng.integers(0, 5, 60)
    threshold = conformal_threshold(misfit(np.log(p))[np.arange(60), labels], 0.2)
    assert controlled_risk(made(p, labels), made(p, labels), 'missed', 0.2).setting == threshold


def rows(rng, count, known=0.0):
    """Rows of six predictions that are all easy or all hard, by the row; the later ones are harder by `known`."""
    groups = np.repeat(np.arange(count), 6)
    hard = (rng.random(count) + known * np.arange(count) / count)[groups]
    labels = rng.integers(0, 4, len(groups))
    logits = rng.standard_normal((len(groups), 4))
    logits[np.arange(len(groups)), labels] += 4 * (1 - hard)
    return Outputs(np.zeros((len(groups), 1)), logits, labels, groups=groups)


@pytest.mark.parametrize('name', LOSSES)
def test_a_new_row_loses_no_more_than_is_promised(name):
    rng, level, draws = np.random.default_rng(1), 0.15, 300
    found = [controlled_risk(rows(rng, 20), rows(rng, 4), name, level) for _ in range(draws)]
    risk = np.mean([each.risk.value for each in found])
    error = np.std([each.risk.value for each in found]) / np.sqrt(draws)
    # As much as is promised, and little less: losses are one at most, and the new row counts as one of 21.
    assert level - 2 / 21 - 3 * error < risk < level + 3 * error


def test_recent_rows_promise_more_where_rows_drift():
    rng = np.random.default_rng(2)
    drawn = [rows(rng, 200, known=1.5) for _ in range(6)]
    even, fresh = (
        np.mean([recent_risk(each, 'wrong', 0.15, decay).risk.value for each in drawn]) for decay in (1.0, 0.9)
    )
    assert fresh < even - 0.02 and fresh < 0.2
    # Without drift and without weights it is the exchangeable form, row by row.
    still = [recent_risk(rows(rng, 200), 'wrong', 0.15, 1.0).risk.value for _ in range(6)]
    assert np.mean(still) < 0.15 + 0.03
    assert recent_risk(drawn[0], 'missed', 0.15, 0.9).setting is None
    # A row is chosen for by all before it that choose, the last one too, whether rows have numbers or not.
    bare = dataclasses.replace(drawn[0], groups=None)
    numbered = dataclasses.replace(bare, groups=np.arange(len(bare.labels)))
    assert recent_risk(numbered, 'missed', 0.15, 0.9) == recent_risk(bare, 'missed', 0.15, 0.9)


def test_what_cannot_be_promised_is_refused():
    with pytest.raises(
        UserError, match=r'--risk_level is 0\.1; 8 rows that choose promise 0\.111 at best: give --rows=18'
    ):
        check_level(0.1, 8)
    check_level(0.1, 9)
    with pytest.raises(UserError, match=r'--risk_level is 1\.0; it must be above 0 and below 1'):
        check_level(1.0, 8)
    with pytest.raises(UserError, match=r'--decay is 0\.5; rows so weighted promise a risk of 0\.5 at best'):
        check_level(0.1, 100, 0.5)
    check_level(0.1, 100, 0.95)
    with pytest.raises(UserError, match=r'--decay is 1\.5; it must be above 0 and at most 1'):
        recent_risk(rows(np.random.default_rng(0), 4), 'wrong', 0.3, 1.5)
