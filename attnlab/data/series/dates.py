"""Dates of the rows of a series, and the marks of time that models are given of them."""

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import numpy as np
from jaxtyping import Float, Shaped

from attnlab.errors import UserError
from attnlab.signature import checked_fields

Dates = Shaped[np.ndarray, 'n']
"""`datetime64[s]`, as the clock on the wall shows them."""

DAY = 24 * 60 * 60
FORMATS = ('%Y/%m/%d %H:%M', '%Y/%m/%d %H:%M:%S', '%Y/%m/%d', '%Y%m%d')
"""Besides those of ISO 8601."""

OF_DAYS = ('weekday', 'day', 'yearday')
MARKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        'second': ('second', 'minute', 'hour', *OF_DAYS),
        'minute': ('minute', 'hour', *OF_DAYS),
        'hour': ('hour', *OF_DAYS),
        'day': OF_DAYS,
        'week': ('day', 'week'),
        'month': ('month',),
        'year': (),
    }
)
"""The marks of a series by how far its rows are apart, in the order of the published loaders."""

LARGEST = MappingProxyType(
    {'second': 59, 'minute': 59, 'hour': 23, 'weekday': 6, 'day': 30, 'yearday': 365, 'week': 52, 'month': 11}
)
"""The largest of each mark, counted from 0."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class Clock:
    """Dates by rule: the first row is at `start`, in ISO 8601, and rows are `minutes` apart."""

    start: str = '2018-01-01'
    minutes: int = 60

    def dates(self, rows: int) -> Dates:
        """The dates of `rows` rows."""
        return read_dates([self.start])[0] + np.arange(rows) * np.timedelta64(self.minutes * 60, 's')


def read_dates(cells: Iterable[str]) -> Dates:
    """Dates of texts, in ISO 8601 or with slashes, year first; a zone is left out. Raises `UserError` for others."""
    return np.array([_date(cell, row) for row, cell in enumerate(cells)], 'datetime64[s]')


def is_date(cell: str) -> bool:
    """Whether `read_dates` reads a text."""
    try:
        read_dates([cell])
    except UserError:
        return False
    return True


def every(dates: Dates) -> str:
    """The largest unit of `MARKS` that is no longer than the median time between rows.

    Raises `UserError` for a single date, and where time stands still or runs backwards.
    """
    if len(dates) < 2:
        raise UserError('one date alone does not say how far rows are apart')
    seconds = float(np.median(np.diff(dates).astype(np.int64)))
    if seconds <= 0:
        raise UserError(f'dates run from {dates[0]} to {dates[-1]}, {seconds:g} seconds apart; rows ascend in time')
    units = {'year': 365 * DAY, 'month': 28 * DAY, 'week': 7 * DAY, 'day': DAY, 'hour': 3600, 'minute': 60}
    return next((name for name, least in units.items() if seconds >= least), 'second')


def check_order(name: str, dates: Dates) -> None:
    """Raises `UserError`, naming the place, where more rows are earlier than the row above them than are later."""
    steps = np.diff(dates).astype(np.int64)
    back, forth = int((steps < 0).sum()), int((steps > 0).sum())
    if back > forth:
        raise UserError(
            f'{name} has dates from {dates[0]} to {dates[-1]}, {back} rows earlier than the row above them and {forth} '
            'later; sort them, oldest first'
        )


def marks(dates: Dates, unit: str) -> Float[np.ndarray, 'n m']:
    """The marks of `MARKS[unit]`, each counted from 0, divided by its largest value, less 0.5: from -0.5 to 0.5.

    Those of hourly rows are `hour / 23`, `weekday / 6` from Monday on, `day / 30` and `yearday / 365`, less 0.5, as in
    Zhou et al. 2021, https://arxiv.org/abs/2012.07436, and what followed it.
    """
    days, months, years = (dates.astype(f'datetime64[{one}]') for one in 'DMY')
    of_day = (dates - days).astype(np.int64)
    found = {
        'second': of_day % 60,
        'minute': of_day // 60 % 60,
        'hour': of_day // 3600,
        # The first day of numpy's count was a Thursday.
        'weekday': (days.astype(np.int64) + 3) % 7,
        'day': (days - months.astype('datetime64[D]')).astype(np.int64),
        'yearday': (days - years.astype('datetime64[D]')).astype(np.int64),
        'month': months.astype(np.int64) % 12,
    }
    if 'week' in MARKS[unit]:
        found['week'] = np.array([day.isocalendar().week - 1 for day in days.tolist()], np.int64)
    columns = [found[name] / LARGEST[name] - 0.5 for name in MARKS[unit]]
    return np.stack(columns, axis=1) if columns else np.zeros((len(dates), 0))


def _date(cell: str, row: int) -> datetime.datetime:
    for read in (datetime.datetime.fromisoformat, *(_reader(form) for form in FORMATS)):
        try:
            return read(cell).replace(tzinfo=None)
        except ValueError:
            continue
    raise UserError(f'{cell!r}, in row {row} (from 0), is no date; one is 2016-07-01 13:00:00 or 2016/07/01 13:00')


def _reader(form: str) -> Callable[[str], datetime.datetime]:
    return lambda cell: datetime.datetime.strptime(cell, form)
