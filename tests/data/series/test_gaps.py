"""Windows with gaps: what is missing of them, what models see of it, and what fills them without training."""

import dataclasses

import numpy as np
import pytest

from attnlab.data.pipeline import Varied
from attnlab.data.series.drawn import DrawnSeries
from attnlab.data.series.gaps import FILLINGS, Filled, Gapped, Gaps, Grating, Interpolation, WindowMean, row
from attnlab.data.series.windows import scaled
from attnlab.errors import UserError

SERIES = scaled(DrawnSeries(rows=400, copies=2))
WINDOWS = Gapped(SERIES, 'test', 24, Gaps())
NAN = np.nan


def test_the_share_that_is_missing_is_that_drawn():
    rng = np.random.default_rng(0)
    for span in (1, 8):
        shares = np.array([1 - Gaps(0.2, 0.4, span).draw(rng, 480, 50).mean() for _ in range(40)])
        assert abs(shares.mean() - 0.3) < 0.03 and 0.15 < shares.min() < 0.25 and 0.35 < shares.max() < 0.45
    lost = ~Gaps(0.3, 0.3, 8).draw(rng, 4800, 1)[:, 0]
    runs = np.diff(np.flatnonzero(np.diff(np.concatenate([[0], lost, [0]]))))[::2]
    assert (runs[1:-1] % 8 == 0).all() and len(set(runs[1:-1])) > 1


def test_a_row_shows_no_value_that_is_missing():
    """Poison where nothing is there reaches the targets alone."""
    assert isinstance(WINDOWS, Varied)
    window = WINDOWS[3]['targets']
    there = WINDOWS[3]['missing'] == 0
    assert 0.02 < 1 - there.mean() < 0.8
    poisoned = np.where(there, window, np.float32(1e6))
    found = row(poisoned, there, SERIES.deviation)
    np.testing.assert_array_equal(found['tokens'], WINDOWS[3]['tokens'])
    values, mask = np.split(found['tokens'], 2, axis=1)
    np.testing.assert_array_equal(mask, there)
    np.testing.assert_array_equal(values[there], window[there])
    for variate in range(2):
        known = there[:, variate]
        np.testing.assert_allclose(values[~known, variate], window[known, variate].mean(), rtol=1e-5)
    for filling in FILLINGS.values():
        np.testing.assert_array_equal(filling.fill(poisoned, there), filling.fill(window, there))


def test_gaps_are_the_same_every_time_and_others_in_training():
    np.testing.assert_array_equal(WINDOWS[5]['missing'], WINDOWS[5]['missing'])
    again = [WINDOWS.varied(5, np.random.default_rng(seed)) for seed in (0, 1)]
    np.testing.assert_array_equal(again[0]['targets'], WINDOWS[5]['targets'])
    assert (again[0]['missing'] != again[1]['missing']).any()
    assert (WINDOWS[5]['missing'] != dataclasses.replace(WINDOWS, seed=1)[5]['missing']).any()


def test_windows_are_all_of_a_split_and_the_last_ends_with_it():
    assert len(WINDOWS) == 80 - 24 + 1
    apart = dataclasses.replace(WINDOWS, stride=24)
    assert [apart.first(index) for index in range(len(apart))] == [0, 24, 48, 56]
    np.testing.assert_array_equal(apart[3]['targets'], SERIES.split('test')[-24:])
    with pytest.raises(IndexError, match='window 4 of 4'):
        apart[4]
    with pytest.raises(UserError, match='the valid split has 40 rows; windows of 41 do not fit'):
        Gapped(SERIES, 'valid', 41, Gaps())


def test_gratings_together_leave_no_step_out():
    drawn = [Grating(place, 3, 4).draw(np.random.default_rng(0), 26, 2) for place in range(3)]
    np.testing.assert_array_equal(np.sum(~np.array(drawn), axis=0), np.ones((26, 2)))
    np.testing.assert_array_equal(np.flatnonzero(~drawn[1][:, 0]), [*range(4, 8), *range(16, 20)])


def test_baselines_fill_by_hand():
    window = np.array([[1.0], [NAN], [NAN], [4.0], [0.0], [NAN]])
    there = np.isfinite(window)
    clean = np.where(there, window, 7.0)
    np.testing.assert_allclose(Interpolation().fill(clean, there)[:, 0], [1, 2, 3, 4, 0, 0])
    np.testing.assert_allclose(WindowMean().fill(clean, there)[:, 0], [1, 5 / 3, 5 / 3, 4, 0, 5 / 3], rtol=1e-6)
    nothing = np.zeros_like(there)
    for filling in FILLINGS.values():
        np.testing.assert_array_equal(filling.fill(clean, nothing), np.zeros_like(clean))
    assert Filled(WINDOWS, Interpolation())[0]['filled'].shape == (24, 2)


@pytest.mark.parametrize('shares', [(0.0, 0.5), (0.5, 0.2), (0.5, 1.0)])
def test_shares_out_of_order_are_named(shares):
    with pytest.raises(UserError, match=r'low and high of Gaps are .*; use 0 < low <= high < 1'):
        Gaps(*shares)
