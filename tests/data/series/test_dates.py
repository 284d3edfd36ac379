"""Dates and marks of time."""

import datetime

import numpy as np
import pytest

from attnlab.data.series.dates import MARKS, Clock, every, marks, read_dates
from attnlab.errors import UserError


def test_marks_are_those_of_the_published_loaders():
    """Of a Friday, the first of July, at 13:45:30, the 183rd day of a leap year and in its 26th week."""
    dates = read_dates(['2016-07-01 13:45:30'])
    of_day = [4 / 6 - 0.5, 0 / 30 - 0.5, 182 / 365 - 0.5]
    clock = [30 / 59 - 0.5, 45 / 59 - 0.5, 13 / 23 - 0.5]
    expected = {
        'second': clock + of_day,
        'minute': clock[1:] + of_day,
        'hour': clock[2:] + of_day,
        'day': of_day,
        'week': [0 / 30 - 0.5, 25 / 52 - 0.5],
        'month': [6 / 11 - 0.5],
        'year': [],
    }
    assert expected.keys() == MARKS.keys()
    for unit, values in expected.items():
        np.testing.assert_allclose(marks(dates, unit)[0], values, atol=1e-12, err_msg=unit)


def test_marks_lie_within_a_half_and_reach_it():
    dates = Clock('2019-12-30', minutes=15).dates(2 * 366 * 96)
    for unit in ('minute', 'hour', 'day', 'month'):
        found = marks(dates, unit)
        np.testing.assert_allclose(found.min(axis=0), -0.5)
        # Rows a quarter of an hour apart reach minute 45 alone.
        highest = [45 / 59 - 0.5 if name == 'minute' else 0.5 for name in MARKS[unit]]
        np.testing.assert_allclose(found.max(axis=0), highest)
    # The 30th of December 2019 lies in the first week of 2020, which has 53.
    weeks = marks(dates, 'week')[:, 1]
    assert weeks[0] == weeks.min() == -0.5 and weeks.max() == 0.5


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('2016-07-01 13:00:00', '2016-07-01T13:00'),
        ('2016-07-01T13:00:00+02:00', '2016-07-01T13:00'),
        ('1990/1/1 0:00', '1990-01-01'),
        ('2012/03/04', '2012-03-04'),
        ('20120304', '2012-03-04'),
    ],
)
def test_dates_are_read(text, expected):
    assert read_dates([text])[0] == np.datetime64(expected)


@pytest.mark.parametrize(
    ('minutes', 'unit'),
    [(1, 'minute'), (15, 'minute'), (60, 'hour'), (24 * 60, 'day'), (7 * 24 * 60, 'week'), (31 * 24 * 60, 'month')],
)
def test_how_far_rows_are_apart(minutes, unit):
    assert every(Clock(minutes=minutes).dates(5)) == unit


def test_mistakes_in_dates_are_named():
    with pytest.raises(UserError, match=r"'07.01.2016', in row 1 \(from 0\), is no date; one is 2016"):
        read_dates(['2016-07-01', '07.01.2016'])
    with pytest.raises(UserError, match='rows ascend in time'):
        every(read_dates(['2016-07-02', '2016-07-01']))
    with pytest.raises(UserError, match='one date alone'):
        every(read_dates(['2016-07-02']))
    assert read_dates(['2016-07-01'])[0].astype(datetime.datetime) == datetime.datetime(2016, 7, 1)
