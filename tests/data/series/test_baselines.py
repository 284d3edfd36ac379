"""Baselines of forecasts, against the numbers that the seasonal mixture has in closed form."""

import numpy as np
import pytest

from attnlab.data.series.baselines import Forecasted, RepeatLast, SeasonalNaive, baselines, fit
from attnlab.data.series.drawn import DrawnSeries, Seasonal
from attnlab.data.series.windows import Windows, scaled
from attnlab.errors import UserError
from attnlab.nn.series_windows import InstanceNorm, LastValue

WITHIN, CROSSING, ALL = slice(96, None), slice(96), slice(None)
"""Windows of the test split that lie in it whole, those whose look-back begins in the validation split, and both."""

NOTHING = np.zeros((1000, 192, 0), np.float32)
"""Known of so many windows."""


def mse(series, baseline, which=WITHIN):
    """Of a baseline on windows of the test split."""
    windows = Windows(scaled(series), 'test', 96, 96)
    rows = [windows[i] for i in range(len(windows))[which]]
    past, targets = (np.stack([row[name] for row in rows]) for name in ('tokens', 'targets'))
    return np.mean((baseline.forecast(past, 96, NOTHING[: len(past)]) - targets) ** 2)


@pytest.mark.parametrize(
    ('shift', 'which', 'expected'),
    [
        (0.0, WITHIN, {'repeat': 2.0209, None: 0.1306, LastValue(): 0.1392, InstanceNorm(): 0.1393}),
        (2.0, WITHIN, {'repeat': 2.0209, None: 17.361, LastValue(): 0.1392, InstanceNorm(): 0.1393}),
        (0.0, CROSSING, {'repeat': 2.2245, None: 0.1469, LastValue(): 0.1498}),
        (0.0, ALL, {'repeat': 2.0486, None: 0.1328, LastValue(): 0.1407}),
        (2.0, ALL, {'repeat': 2.0497, None: 16.743, LastValue(): 0.5275}),
    ],
)
def test_closed_form_numbers_of_the_seasonal_mixture(shift, which, expected):
    """Those of docs/series.md: evaluations take all windows, whose look-backs begin before the test split."""
    series = DrawnSeries(Seasonal(shift=shift))
    for norm, number in expected.items():
        baseline = RepeatLast() if norm == 'repeat' else fit(series, 96, 96, norm)
        assert mse(series, baseline, which) == pytest.approx(number, rel=1e-3), norm


def test_the_last_value_repeated_has_the_error_that_is_expected():
    """By the law of the mixture, of many draws: whichever windows of the test split are taken."""
    ahead = 2 * np.pi * np.arange(1, 97)
    moved = 1 - np.mean(np.cos(ahead / 24)) + (1 - np.mean(np.cos(ahead / 168))) / 4
    expected = (moved + 2 * 0.3**2) / (1 / 2 + 1 / 8 + 0.3**2)
    assert expected == pytest.approx(2.046, abs=1e-3)
    draws = DrawnSeries(copies=200)
    for which in (ALL, WITHIN):
        # The phases of a week that the test windows have are not those of whole weeks.
        assert mse(draws, RepeatLast(), which) == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('shift', 'which', 'expected'),
    [
        (0.0, ALL, [(2.061, 0.055), (0.137, 0.007), (0.149, 0.009)]),
        (0.0, WITHIN, [(2.062, 0.062), (0.138, 0.007), (0.149, 0.009)]),
        (2.0, ALL, [(2.058, 0.054), (16.0, 1.8), (0.551, 0.027)]),
        (2.0, WITHIN, [(2.062, 0.062), (16.6, 2.0), (0.149, 0.009)]),
    ],
)
def test_thirty_draws_of_the_seasonal_mixture(shift, which, expected):
    """Means and deviations of docs/series.md, to the digits that it has."""
    found = []
    for seed in range(30):
        series = DrawnSeries(Seasonal(shift=shift), seed=seed)
        every = RepeatLast(), fit(series, 96, 96), fit(series, 96, 96, LastValue())
        found.append([mse(series, baseline, which) for baseline in every])
    for mean, deviation, (about, spread) in zip(np.mean(found, 0), np.std(found, 0), expected, strict=True):
        assert mean == pytest.approx(about, rel=0.005) and deviation == pytest.approx(spread, rel=0.1)


def test_ridge_is_least_squares_of_what_it_is_given():
    """Of rows without noise that a linear map makes it finds the map, for every variate."""
    series = DrawnSeries(Seasonal(noise=0.0), rows=1000, copies=2)
    assert mse(series, fit(series, 96, 96, penalty=1e-9), ALL) < 1e-9


def test_a_map_that_subtracts_the_last_value_follows_a_constant():
    map = fit(DrawnSeries(), 24, 8, LastValue())
    past = scaled(DrawnSeries()).values[None, :24]
    np.testing.assert_allclose(
        map.forecast(past + 5, 8, NOTHING[:1]), map.forecast(past, 8, NOTHING[:1]) + 5, atol=1e-5
    )
    with pytest.raises(UserError, match='fitted for 8 steps, not 9'):
        map.forecast(past, 9, NOTHING[:1])


def test_naive_forecasts():
    past = np.arange(10.0)[None, :, None]
    np.testing.assert_array_equal(RepeatLast().forecast(past, 2, NOTHING[:1])[0, :, 0], [9, 9])
    np.testing.assert_array_equal(SeasonalNaive(3).forecast(past, 5, NOTHING[:1])[0, :, 0], [7, 8, 9, 7, 8])


def test_rows_hold_the_forecast():
    windows = Windows(scaled(DrawnSeries(rows=400)), 'test', 24, 8)
    row = Forecasted(windows, RepeatLast())[3]
    np.testing.assert_array_equal(row['forecast'], np.repeat(windows[3]['tokens'][-1:], 8, axis=0))
    assert len(Forecasted(windows, RepeatLast())) == len(windows)


def test_the_seasonal_forecast_needs_a_season_within_the_lookback():
    assert 'seasonal_naive' in baselines(DrawnSeries(rows=400), 24, 8)
    assert 'seasonal_naive' not in baselines(DrawnSeries(rows=400), 23, 8)
