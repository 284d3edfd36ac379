"""Windows of a series: a look-back and the horizon after it, scaled by the training rows alone."""

import dataclasses
import functools

import numpy as np
from jaxtyping import Float

from attnlab.data.pipeline import Row, place_of
from attnlab.data.series.columns import EVERY, Columns
from attnlab.data.series.dates import marks
from attnlab.data.series.series import SPLITS, Borders, Series, Values, borders, scale
from attnlab.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class Scaled:
    """A series in units of its training rows.

    Attributes:
      values: `(x - mean) / deviation`, float32: the columns that are forecast, then those that are observed.
      known: the columns that are known ahead, in the same units, then marks of time, as they are.
      targets: how many are forecast.
      mean: of every column of `values` over the training rows.
      deviation: of the population of these rows, 1 where they are constant.
      naive_error: mean absolute difference of the training rows to those one season before, scaled: the unit of MASE.
      borders: of the splits.
    """

    values: Float[np.ndarray, 'n v']
    known: Float[np.ndarray, 'n k']
    targets: int
    mean: Float[np.ndarray, 'v']
    deviation: Float[np.ndarray, 'v']
    naive_error: Float[np.ndarray, 'v']
    borders: Borders

    def split(self, split: str) -> Values:
        """The rows of a split, of what is forecast."""
        start, end = self.borders[split]
        return self.values[start:end, : self.targets]


@functools.lru_cache(maxsize=4)
def scaled(series: Series, columns: Columns = EVERY) -> Scaled:
    """The scaled values of a series; nothing but training rows determines the scale.

    Raises `UserError` for fewer training rows than a season, and for dates of other rows.
    """
    places, values = columns.places(series), series.values()
    found = borders(series, len(values))
    train = values[slice(*found['train'])]
    if not 1 <= series.season < len(train):
        raise UserError(f'season is {series.season}; it must be from 1 to the training rows, {len(train)}, less one')
    mean, deviation = scale(train)
    errors = np.abs(train[series.season :] - train[: -series.season]).mean(axis=0) / deviation
    scaled_values = ((values - mean) / deviation).astype(np.float32)
    known = scaled_values[:, list(places.known)]
    if places.marks is not None:
        dates = series.dates()
        if dates is None or len(dates) != len(values):
            raise UserError(f'the series has {0 if dates is None else len(dates)} dates for {len(values)} rows')
        known = np.concatenate([known, marks(dates, places.marks).astype(np.float32)], axis=1)
    kept = [*places.targets, *places.observed]
    return Scaled(
        scaled_values if kept == list(range(len(mean))) else scaled_values[:, kept],
        known,
        len(places.targets),
        mean[kept],
        deviation[kept],
        errors[kept],
        found,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """All windows of a split, one step apart, of which none is left out; or some of them.

    Targets lie in the split; look-backs of the later splits begin before it, so that its first row is a target too: a
    split of n rows has `n - horizon + 1` windows, the training split `n - lookback - horizon + 1`. A row holds:

    - `tokens`: float32 `t v`, the look-back, in units of the training rows, what is observed behind what is forecast;
      where something is known ahead, it is in the last columns, and the rows of the horizon follow, zero elsewhere;
    - `targets`: float32 `s v`, the horizon;
    - `unit`, `naive_error`: float32 `v`, of `Scaled`: what makes errors those in the units of the data, and MASE;
    - `weights`: float32, 1.

    Attributes:
      series: scaled.
      split: its name.
      lookback: rows read.
      horizon: rows forecast.
      count: so many windows, at equal distances; `None`: all.
    """

    series: Scaled
    split: str
    lookback: int
    horizon: int
    count: int | None = None

    def __post_init__(self) -> None:
        """Raises `UserError` for a look-back or horizon below 1, and where no window fits."""
        if self.lookback < 1 or self.horizon < 1:
            raise UserError(f'look-back and horizon are {self.lookback} and {self.horizon}; they must be at least 1')
        start, end = self._rows()
        if end - start < self.lookback + self.horizon:
            before = self.series.borders[self.split][0] - start
            read = f', and {before} before it are read' if before else ''
            raise UserError(
                f'the {self.split} split has {end - start - before} rows{read}; look-back {self.lookback} and horizon '
                f'{self.horizon} need as many as both together'
            )

    def __len__(self) -> int:
        return self._every if self.count is None else min(self._every, self.count)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f'window {index} of {len(self)}')
        start = self._rows()[0] + place_of(index, self._every, len(self))
        middle = start + self.lookback
        series, end = self.series, middle + self.horizon
        tokens = series.values[start:middle]
        if series.known.shape[1]:
            unseen = np.zeros((self.horizon, tokens.shape[1]), np.float32)
            tokens = np.concatenate([np.concatenate([tokens, unseen]), series.known[start:end]], axis=1)
        return {
            'tokens': tokens,
            'targets': series.values[middle:end, : series.targets],
            'unit': series.deviation[: series.targets].astype(np.float32),
            'naive_error': series.naive_error[: series.targets].astype(np.float32),
            'weights': np.float32(1),
        }

    @property
    def _every(self) -> int:
        start, end = self._rows()
        return end - start - self.lookback - self.horizon + 1

    def _rows(self) -> tuple[int, int]:
        """The rows that windows lie in, which begin a look-back before a later split."""
        start, end = self.series.borders[self.split]
        return (start if self.split == SPLITS[0] else max(0, start - self.lookback)), end


@dataclasses.dataclass(frozen=True, eq=False)
class Prompted:
    """Windows with the first rows of the training split put before every look-back, as a context to read.

    The paper puts the first rows of a series before its look-back: Liu et al. 2024, https://arxiv.org/abs/2402.02370.

    Attributes:
      windows: of columns of which none is known ahead.
      rows: how many are put before.
    """

    windows: Windows
    rows: int

    def __post_init__(self) -> None:
        """Raises `UserError` for more rows than the training split has, and where something is known ahead."""
        start, end = self.windows.series.borders[SPLITS[0]]
        if self.rows > end - start or self.windows.series.known.shape[1]:
            raise UserError(
                f'prompt is {self.rows} rows of {end - start} of the training split, of a series with '
                f'{self.windows.series.known.shape[1]} columns known ahead; it must be fewer, and nothing known'
            )

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Row:
        row, start = self.windows[index], self.windows.series.borders[SPLITS[0]][0]
        before = self.windows.series.values[start : start + self.rows]
        return row | {'tokens': np.concatenate([before, row['tokens']])}


def blank(variates: int, lookback: int, horizon: int, observed: int = 0, known: int = 0) -> Row:
    """A row of zeros, of so many columns that are forecast, observed and known."""
    rows = lookback + (horizon if known else 0)
    sizes = {'tokens': (rows, variates + observed + known), 'targets': (horizon, variates), 'unit': (variates,)}
    zeros = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    return zeros | {'naive_error': np.zeros(variates, np.float32), 'weights': np.float32(0)}
