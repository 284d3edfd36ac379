"""Splits, scaling and windows of series."""

import dataclasses

import numpy as np
import pytest

from attnlab.data.series.drawn import DrawnSeries, Seasonal
from attnlab.data.series.published import PUBLISHED
from attnlab.data.series.series import Counts, Series, Shares
from attnlab.data.series.windows import Windows, blank, scaled
from attnlab.errors import UserError


@dataclasses.dataclass(frozen=True)
class Given(Series):
    """Numbers that a test has made."""

    cells: tuple[tuple[float, ...], ...]
    split: Shares | Counts = Shares()
    season: int = 1

    @property
    def variates(self):
        return len(self.cells[0])

    def values(self):
        return np.array(self.cells)

    def describe(self):
        return {'source': 'given'}


@pytest.mark.parametrize(
    ('lookback', 'counts'), [(96, {'train': 8449, 'valid': 2785, 'test': 2785}), (336, {'train': 8209, 'test': 2785})]
)
def test_windows_of_etth1(lookback, counts):
    """A drawn file of its length, divided as it is: the counts of the released loaders."""
    series = scaled(DrawnSeries(rows=PUBLISHED['etth1'].rows, split=PUBLISHED['etth1'].split))
    assert {split: len(Windows(series, split, lookback, 96)) for split in counts} == counts


def test_splits_are_cut_as_in_the_released_loaders():
    assert Shares().counts(7588) == (5311, 760, 1517)
    assert PUBLISHED['pems04'].split.counts(16992) == (10195, 3398, 3399)
    for name in ('pems03', 'pems04', 'pems07', 'pems08'):
        rows = PUBLISHED[name].rows
        first, second = int(0.6 * rows), int((0.6 + 0.2) * rows)
        assert PUBLISHED[name].split.counts(rows) == (first, second - first, rows - second)


def test_the_first_target_is_the_first_row_of_a_split_and_the_last_its_last():
    series = scaled(DrawnSeries(rows=100, split=Counts(60, 20, 15)))
    for split, start, end in (('train', 0, 60), ('valid', 60, 80), ('test', 80, 95)):
        windows = Windows(series, split, lookback=8, horizon=4)
        first, last = windows[0], windows[len(windows) - 1]
        begins = start + (8 if split == 'train' else 0)
        np.testing.assert_array_equal(first['targets'], series.values[begins : begins + 4])
        np.testing.assert_array_equal(first['tokens'], series.values[begins - 8 : begins])
        np.testing.assert_array_equal(last['targets'], series.values[end - 4 : end])
        with pytest.raises(IndexError):
            windows[len(windows)]


def test_what_lies_behind_the_training_rows_does_not_reach_their_scale():
    clean = DrawnSeries(rows=100, copies=2).values()
    poisoned = clean.copy()
    poisoned[70:] = 1e30
    found, other = (scaled(Given(tuple(map(tuple, values)), season=3)) for values in (clean, poisoned))
    for name in ('mean', 'deviation', 'naive_error'):
        np.testing.assert_array_equal(getattr(found, name), getattr(other, name))
    np.testing.assert_array_equal(found.split('train'), other.split('train'))


def test_scale_is_that_of_the_population_of_the_training_rows():
    found = scaled(Given(((1.0, 5.0), (3.0, 5.0), (5.0, 5.0), (7.0, 5.0), (9.0, 5.0), (0.0, 5.0)), Counts(4, 1, 1)))
    np.testing.assert_allclose(found.mean, [4.0, 5.0])
    np.testing.assert_allclose(found.deviation, [5**0.5, 1.0])
    np.testing.assert_allclose(found.naive_error, [2 / 5**0.5, 0.0])
    np.testing.assert_allclose(found.values[:, 1], 0.0)


def test_what_is_constant_in_training_has_unit_one():
    """The standard deviation of 80 times 21.7 rounds to 3.6e-15, by which a later 22 would be 1e14."""
    cells = tuple((21.7, float(row)) for row in range(80)) + ((22.7, 80.0),) * 40
    found = scaled(Given(cells, Counts(80, 20, 20)))
    assert found.mean[0] == 21.7 and found.deviation[0] == 1.0 and found.naive_error[0] == 0.0
    np.testing.assert_array_equal(found.split('train')[:, 0], 0.0)
    np.testing.assert_allclose(found.split('test')[:, 0], 1.0, rtol=1e-6)
    assert found.mean[1] == np.arange(80.0).mean() and found.deviation[1] == np.arange(80.0).std()


def test_a_row_of_zeros_has_the_shapes_of_a_row():
    row = Windows(scaled(DrawnSeries(copies=3)), 'test', 8, 4)[0]
    zeros = blank(3, 8, 4)
    assert {name: (np.shape(x), x.dtype) for name, x in row.items()} == {
        name: (np.shape(x), x.dtype) for name, x in zeros.items()
    }


def test_mistakes_in_splits_are_named():
    series = scaled(DrawnSeries(rows=100))
    with pytest.raises(UserError, match="no split 'tset'; did you mean 'test'"):
        Windows(series, 'tset', 8, 4)
    with pytest.raises(UserError, match='the train split has 70 rows; look-back 60 and horizon 11 need'):
        Windows(series, 'train', 60, 11)
    with pytest.raises(UserError, match='splits of 80, 20 and 20 rows, of 100'):
        scaled(DrawnSeries(rows=100, split=Counts(80, 20, 20)))
    with pytest.raises(UserError, match='leave a split of 100 rows without any'):
        scaled(DrawnSeries(rows=100, split=Shares(0.8, 0.2)))
    with pytest.raises(UserError, match='season is 24; it must be from 1 to the training rows, 14'):
        scaled(DrawnSeries(rows=20))
    with pytest.raises(UserError, match=r'1 missing or infinite values, the first in row 3, variate 0'):
        DrawnSeries(Broken()).values()


@dataclasses.dataclass(frozen=True)
class Broken(Seasonal):
    """A process with a hole."""

    def draw(self, rng, rows):
        drawn = super().draw(rng, rows)
        drawn[3] = np.nan
        return drawn
