"""Roles of columns: what is forecast, observed and known, and that nothing else is seen ahead."""

import dataclasses

import numpy as np
import pytest

from attnlab.data.series.baselines import Forecasted, RepeatLast, baselines
from attnlab.data.series.columns import Columns
from attnlab.data.series.dates import marks
from attnlab.data.series.drawn import DrawnSeries, Driven, Lorenz, Seasonal
from attnlab.data.series.windows import Windows, blank, scaled
from attnlab.errors import UserError

LORENZ = DrawnSeries(Lorenz(), rows=120)
ROLES = Columns(targets=('2',), known=('0',))


def test_columns_have_their_roles():
    series, plain = scaled(LORENZ, ROLES), scaled(LORENZ)
    np.testing.assert_array_equal(series.values, plain.values[:, [2, 1]])
    np.testing.assert_array_equal(series.known, plain.values[:, [0]])
    row = Windows(series, 'train', 8, 4)[3]
    assert row['tokens'].shape == (12, 3) and row['targets'].shape == (4, 1)
    np.testing.assert_array_equal(row['tokens'][:8, :2], series.values[3:11])
    np.testing.assert_array_equal(row['tokens'][:, 2], plain.values[3:15, 0])
    np.testing.assert_array_equal(row['targets'], series.values[11:15, :1])
    np.testing.assert_allclose(row['unit'], plain.deviation[2:], rtol=1e-6)
    assert ROLES.counts(LORENZ) == (1, 1, 1)
    assert Columns(known=('0',)).counts(LORENZ) == (2, 0, 1) and Columns(targets=('0',)).counts(LORENZ) == (1, 2, 0)


@dataclasses.dataclass(frozen=True)
class Poisoned(Lorenz):
    """Of which the first two columns are other ones from a row on."""

    row: int = 0

    def draw(self, rng, rows):
        drawn = super().draw(rng, rows)
        drawn[self.row :, 1:] = 1e6
        return drawn


def test_nothing_of_the_horizon_is_seen_but_what_is_known():
    """What is forecast and what is observed beyond the look-back changes no token."""
    rows = [Windows(scaled(DrawnSeries(of, rows=120), ROLES), 'test', 8, 4)[0] for of in (Lorenz(), Poisoned(row=96))]
    np.testing.assert_array_equal(rows[0]['tokens'], rows[1]['tokens'])
    assert (rows[0]['targets'] != rows[1]['targets']).all()
    assert (rows[0]['tokens'][8:, :2] == 0).all() and (rows[0]['tokens'][8:, 2] != 0).all()


def test_marks_of_time_follow_the_known_columns():
    hours, columns = DrawnSeries(Seasonal(), rows=200, copies=2), Columns(known=('1',), marks=True)
    assert columns.counts(hours) == (1, 0, 5)
    row = Windows(scaled(hours, columns), 'valid', 24, 3)[2]
    start = 140 - 24 + 2
    expected = marks(hours.dates(), 'hour')[start : start + 27]
    np.testing.assert_allclose(row['tokens'][:, 2:], expected, atol=1e-7)


def test_a_row_of_zeros_has_the_shapes_of_a_row():
    row = Windows(scaled(LORENZ, ROLES), 'test', 8, 4)[0]
    zeros = blank(1, 8, 4, observed=1, known=1)
    assert {name: np.shape(x) for name, x in row.items()} == {name: np.shape(x) for name, x in zeros.items()}


def test_baselines_forecast_the_targets_alone():
    windows = Windows(scaled(LORENZ, ROLES), 'test', 8, 4)
    for name, baseline in baselines(LORENZ, 8, 4, ROLES).items():
        assert Forecasted(windows, baseline)[0]['forecast'].shape == (4, 1), name
    last = Forecasted(windows, RepeatLast())[0]['forecast']
    np.testing.assert_array_equal(last, np.repeat(windows[0]['tokens'][7:8, :1], 4, axis=0))


def test_a_driven_series_is_known_as_well_as_its_driver():
    """Least squares of one step: the variance of what is not known, in units of the training rows."""
    series, of = DrawnSeries(Driven(), rows=20_000), Driven()
    for columns, expected in (
        (Columns(known=('1',)), of.noise**2),
        (Columns(targets=('0',)), of.noise**2 + of.gain**2),
    ):
        found = scaled(series, columns)
        windows = [[Windows(found, split, 2, 1)[i] for i in range(3000)] for split in ('train', 'test')]
        inputs, targets = (
            [np.stack([row[name].reshape(-1) for row in rows]).astype(np.float64) for rows in windows]
            for name in ('tokens', 'targets')
        )
        weight = np.linalg.lstsq(inputs[0], targets[0], rcond=None)[0]
        error = np.mean((inputs[1] @ weight - targets[1]) ** 2) * found.deviation[0] ** 2
        assert error == pytest.approx(expected, rel=0.08), columns


def test_the_baseline_that_reads_what_is_known_reaches_the_noise():
    """Of one step of the driven series, and of no other where nothing is known."""
    series, columns = DrawnSeries(Driven(), rows=8000), Columns(known=('1',))
    found = baselines(series, 4, 1, columns)
    assert 'ridge_known' not in baselines(series, 4, 1)
    windows = Windows(scaled(series, columns), 'test', 4, 1)
    unit = scaled(series, columns).deviation[0] ** 2
    errors = {}
    for name in ('ridge', 'ridge_known'):
        rows = [Forecasted(windows, found[name])[i] for i in range(len(windows))]
        errors[name] = np.mean([(row['forecast'] - row['targets']) ** 2 for row in rows]) * unit
    assert errors['ridge_known'] == pytest.approx(0.09, rel=0.08) and errors['ridge'] == pytest.approx(1.09, rel=0.08)


def test_mistakes_in_columns_are_named():
    with pytest.raises(UserError, match="has no column 'price'; "):
        scaled(LORENZ, Columns(known=('price',)))
    with pytest.raises(UserError, match="column '0' is named twice"):
        Columns(targets=('0',), known=('0',))
    with pytest.raises(UserError, match='or leave none to forecast'):
        Columns(known=('0', '1', '2')).counts(LORENZ)
    with pytest.raises(UserError, match='the series has no dates'):
        Columns(marks=True).counts(LORENZ)
    with pytest.raises(UserError, match=r'weight of Driven is 1\.5'):
        Driven(weight=1.5)
