"""Time series, and how their rows are divided into splits."""

import abc
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float

from attnlab.data.series.dates import Dates, every
from attnlab.errors import UserError, nearest
from attnlab.signature import checked_fields

Values = Float[np.ndarray, 'n v']
"""Rows in time, a column a variate."""

SPLITS = ('train', 'valid', 'test')


@checked_fields
@dataclasses.dataclass(frozen=True)
class Shares:
    """The first `int(train * n)` of n rows, the last `int(test * n)`, and those between for validation."""

    train: float = 0.7
    test: float = 0.2

    def counts(self, rows: int) -> tuple[int, int, int]:
        """Rows of every split. Raises `UserError` for shares that leave one empty."""
        train, test = int(self.train * rows), int(self.test * rows)
        if not (train > 0 and test > 0 and train + test < rows):
            raise UserError(f'shares of {self.train} and {self.test} leave a split of {rows} rows without any')
        return train, rows - train - test, test


@checked_fields
@dataclasses.dataclass(frozen=True)
class Counts:
    """Splits of fixed sizes, one after the other from the first row on; rows beyond them are not used."""

    train: int
    valid: int
    test: int

    def counts(self, rows: int) -> tuple[int, int, int]:
        """Rows of every split. Raises `UserError` for fewer rows than that, and for an empty split."""
        if min(self.train, self.valid, self.test) < 1 or self.train + self.valid + self.test > rows:
            raise UserError(
                f'splits of {self.train}, {self.valid} and {self.test} rows, of {rows}; each needs one at least'
            )
        return self.train, self.valid, self.test


class Series(abc.ABC):
    """A multivariate time series in a config: a frozen dataclass that reads nothing until `values` is called.

    Attributes:
      split: how its rows are divided, in order of time.
      season: steps of its period, for seasonal naive forecasts and the scale of MASE; 1 where it has none.
    """

    split: Shares | Counts
    season: int

    @property
    @abc.abstractmethod
    def variates(self) -> int:
        """Number of columns."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns; their indices where they have none."""
        return tuple(map(str, range(self.variates)))

    @property
    def told_names(self) -> tuple[str, ...] | None:
        """The names of the columns, if known without the file, which may have to be downloaded; else `None`."""
        return self.names

    def dates(self) -> Dates | None:
        """The dates of the rows; `None`: they have none."""
        return None

    @property
    def every(self) -> str | None:
        """How far rows are apart, a unit of `attnlab.data.series.dates.MARKS`; `None`: they have no dates."""
        found = self.dates()
        return None if found is None else every(found)

    @abc.abstractmethod
    def values(self) -> Values:
        """All rows in time, float64. Raises `UserError` where they cannot be read, or are not finite."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """A record of the source for run.json."""


@dataclasses.dataclass(frozen=True)
class Borders:
    """First row, and one beyond the last, of every split."""

    of: Mapping[str, tuple[int, int]]

    def __getitem__(self, split: str) -> tuple[int, int]:
        if split not in self.of:
            raise UserError(f'a series has no split {split!r}{nearest(split, self.of)}')
        return self.of[split]


def borders(series: Series, rows: int) -> Borders:
    """The borders of a series of `rows` rows."""
    ends = np.cumsum([0, *series.split.counts(rows)]).tolist()
    return Borders(MappingProxyType({split: (ends[i], ends[i + 1]) for i, split in enumerate(SPLITS)}))


def scale(train: Float[np.ndarray, '... v']) -> tuple[Float[np.ndarray, 'v'], Float[np.ndarray, 'v']]:
    """Mean and standard deviation, of the population, of every variate; of one that is constant its number and 1."""
    axes = tuple(range(train.ndim - 1))
    mean, deviation, first = train.mean(axis=axes), train.std(axis=axes), train[(0,) * len(axes)]
    # Rounding gives a constant a deviation of about 1e-16 of it.
    varies = (np.ptp(train, axis=axes) > 0) & (deviation > 0)
    return np.where(varies, mean, first), np.where(varies, deviation, 1.0)


def check_values(name: str, values: Values, variates: int | None = None) -> Values:
    """The values. Raises `UserError`, naming the place, for a number that is not finite, and for other columns."""
    if values.ndim != 2 or not values.size:
        raise UserError(f'{name} holds an array of shape {values.shape}; a series has rows in time and columns')
    if variates is not None and values.shape[1] != variates:
        raise UserError(f'{name} has {values.shape[1]} variates, not {variates}')
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        row, column = bad[0].tolist()
        raise UserError(
            f'{name} has {len(bad)} missing or infinite values, the first in row {row}, variate {column} (both from '
            '0); fill or drop them first'
        )
    return values
