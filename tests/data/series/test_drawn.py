"""Drawn series follow their laws."""

import numpy as np
import pytest

from attnlab.data.series.drawn import Autoregression, DrawnSeries, Driven, Henon, Lorenz, Regimes, Seasonal
from attnlab.errors import UserError


@pytest.mark.parametrize('process', [Seasonal(), Autoregression(), Driven(), Regimes(), Henon(), Lorenz()], ids=repr)
def test_a_draw_is_a_function_of_the_seed(process):
    series = DrawnSeries(process, rows=50, copies=2)
    values = series.values()
    assert values.shape == (50, series.variates) == (50, 2 * process.variates)
    np.testing.assert_array_equal(values, series.values())
    assert (values != DrawnSeries(process, rows=50, copies=2, seed=1).values()).any()
    assert (values[:, : process.variates] != values[:, process.variates :]).any()


def test_an_autoregression_has_its_coefficients():
    x = DrawnSeries(Autoregression(), rows=20_000).values()[:, 0]
    lags = np.column_stack([x[3 - lag : len(x) - lag] for lag in (1, 2, 3)])
    found = np.linalg.lstsq(lags, x[3:], rcond=None)[0]
    np.testing.assert_allclose(found, (0.2, 0.3, -0.5), atol=0.02)
    with pytest.raises(UserError, match='grow without bound'):
        Autoregression((1.1,))


def test_the_chaotic_map_is_that_of_henon():
    x, y = DrawnSeries(Henon(), rows=300).values().T
    np.testing.assert_allclose(x[1:], 1 - 1.4 * x[:-1] ** 2 + y[:-1], atol=1e-12)
    np.testing.assert_allclose(y[1:], 0.3 * x[:-1], atol=1e-12)
    with pytest.raises(UserError, match='missing or infinite values'):
        DrawnSeries(Henon(a=3.0)).values()


def test_the_flow_is_that_of_lorenz():
    fine = DrawnSeries(Lorenz(step=0.001), rows=2000).values()
    x, y, z = fine[1:-1].T
    slope = (fine[2:] - fine[:-2]) / 0.002
    expected = np.column_stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])
    np.testing.assert_allclose(slope, expected, atol=0.05)


def test_regimes_differ_in_level():
    values = DrawnSeries(Regimes(noise=0.0), rows=3000).values()
    assert (np.abs(values - 3.0) < 1e-3).mean() > 0.2 and (np.abs(values) < 0.1).mean() > 0.1
