"""Statistics against hand-computed values; heads of tables of studies that are matched and of such that are not."""

import math

import numpy as np
import pytest
from rich.console import Console

from attnlab.compare.intervals import Interval, area, best, bootstrap, mean, top_quarter
from attnlab.compare.measures import MEASURES
from attnlab.compare.report.comparison import Comparison, Point, StudyResult, compare, print_comparison
from attnlab.configuration import config_of
from attnlab.errors import UserError
from attnlab.sweep.study import TrialState, create_study
from tests.sweep import tiny

VALUES = np.array([5.0, 1.0, 4.0, 2.0, 3.0, 9.0, 8.0, 7.0])
RATES = np.array([1e-3, 1e-2, 1e-3, 1e-1, 1e-2, 1e-1, 1e-1, 1e-1])


def test_statistics():
    assert best(RATES, VALUES) == 1.0
    assert top_quarter(RATES, VALUES) == 1.5
    assert top_quarter(RATES[:3], VALUES[:3]) == 1.0
    # Means of 4.5, 2 and 6.5 at rates a decade apart: trapezoids of 3.25 and 4.25, of equal width.
    assert area(RATES, VALUES) == pytest.approx(3.75, rel=1e-12)
    assert area(RATES[:1], VALUES[:1]) == 5.0


def test_a_bootstrap_interval_is_that_of_the_mean_and_repeats():
    """For the mean of n draws of variance v the interval is about the mean plus or minus 1.96 sqrt(v / n)."""
    values = np.random.default_rng(0).normal(size=400)
    found = bootstrap(mean, list(values), list(values))
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.value == pytest.approx(half, rel=0.15)
    assert found.value - found.low == pytest.approx(half, rel=0.15)
    assert bootstrap(mean, list(values), list(values)) == found
    assert bootstrap(best, [1.0], [2.0]) == Interval(2.0, 2.0, 2.0)


def test_failed_trials_count_as_the_worst_whatever_the_goal():
    points = (Point(1e-3, 0, 'done', 0.5), Point(1e-2, 1, 'failed', None), Point(1e-1, 0, 'pruned', 0.9))
    least = StudyResult('a', 1.0, 1.0, points, 'min', (0.5, 0.7)).statistics
    assert least['best'].value == 0.5 and least['area'].value == pytest.approx((0.7 + 0.9) / 2)
    assert least['confirmed'].value == pytest.approx(0.6)
    most = StudyResult('a', 1.0, 1.0, points, 'max', ()).statistics
    assert most['best'].value == 0.9 and most['area'].value == pytest.approx((0.5 + 0.7) / 2)
    assert most['best'].low <= most['best'].value <= most['best'].high
    assert StudyResult('a', 1.0, 1.0, (Point(1.0, 0, 'failed', None),), 'min', ()).statistics == {}


@pytest.fixture
def study(tmp_path):
    """Makes a study whose trials are all told their rate as value."""

    def made(name, **changes):
        config = tiny.get_config('trials=3')
        with config.unlocked():
            for key, value in changes.items():
                config[key] = value
        opened = create_study(tmp_path / name, config)
        while (claim := opened.claim()) is not None:
            opened.tell(claim, TrialState.COMPLETE, claim.drawn['rate'])
            claim.release()
        return opened

    return made


def wider(steps=24):
    config = tiny.base(steps)
    with config.unlocked():
        config.model.dim = 16
    return config


def test_rows_that_are_not_matched_are_said_so_and_refused_when_strict(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(MEASURES, 'train_flops', lambda setup: 1e3)
    study('one'), study('two'), study('wide', base=wider()), study('more', seeds=(0, 1, 2))
    other = tiny.get_config('trials=3').space.unlock()
    other.rate.high = 1.0
    study('space', space=other)
    fair = compare([tmp_path / 'one', tmp_path / 'two'], 'params', 0.01)
    assert not fair.reasons and fair.head.startswith('matched by params within 1.0%')
    print_comparison(fair, Console(width=200), strict=True)
    printed = capsys.readouterr().out
    assert 'matched by params' in printed and 'two' in printed
    assert fair.rows[0].statistics['best'].value == min(point.rate for point in fair.rows[0].points)
    for name, reason in (
        ('wide', 'params differs by more than 1.0%'),
        ('more', 'more has another sweep than one: seeds'),
        ('space', 'space has another sweep than one: space.rate.high: 0.01 there, 1.0 here'),
    ):
        unfair = compare([tmp_path / 'one', tmp_path / name], 'params', 0.01)
        assert unfair.head.startswith('NOT MATCHED') and reason in unfair.head, unfair.head
        print_comparison(unfair, Console(width=200))
        assert 'NOT MATCHED' in capsys.readouterr().out
        with pytest.raises(UserError, match='the studies are not matched'):
            print_comparison(unfair, Console(), strict=True)
    with pytest.raises(UserError, match='called the same'):
        compare([tmp_path / 'one', tmp_path / 'one'], 'params', 0.01)


def test_an_unfinished_study_is_said_to_be_one(tmp_path, monkeypatch):
    monkeypatch.setitem(MEASURES, 'train_flops', lambda setup: 1e3)
    create_study(tmp_path / 'begun', config_of(tiny.LANGUAGE.parent / 'sweeps' / 'language.py', 'zoo=mingru'))
    found = compare([tmp_path / 'begun'], 'params', 0.01)
    assert isinstance(found, Comparison) and 'begun is not finished' in found.head
