"""Windows of a series: a look-back and the horizon after it, scaled by the training rows alone."""

import dataclasses
import functools

import numpy as np
from jaxtyping import Float

from attnlab.data.pipeline import Row
from attnlab.data.series.series import SPLITS, Borders, Series, Values, borders
from attnlab.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class Scaled:
    """A series in units of its training rows.

    Attributes:
      values: `(x - mean) / deviation`, float32.
      mean: of every variate over the training rows.
      deviation: of the population of these rows, 1 where they are constant.
      naive_error: mean absolute difference of the training rows to those one season before, scaled: the unit of MASE.
      borders: of the splits.
    """

    values: Float[np.ndarray, 'n v']
    mean: Float[np.ndarray, 'v']
    deviation: Float[np.ndarray, 'v']
    naive_error: Float[np.ndarray, 'v']
    borders: Borders

    def split(self, split: str) -> Values:
        """The rows of a split."""
        start, end = self.borders[split]
        return self.values[start:end]


@functools.lru_cache(maxsize=4)
def scaled(series: Series) -> Scaled:
    """The scaled values of a series; nothing but training rows determines the scale.

    Raises `UserError` for fewer training rows than a season.
    """
    values = series.values()
    found = borders(series, len(values))
    train = values[slice(*found['train'])]
    if not 1 <= series.season < len(train):
        raise UserError(f'season is {series.season}; it must be from 1 to the training rows, {len(train)}, less one')
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    deviation = np.where(deviation > 0, deviation, 1.0)
    errors = np.abs(train[series.season :] - train[: -series.season]).mean(axis=0) / deviation
    return Scaled(((values - mean) / deviation).astype(np.float32), mean, deviation, errors, found)


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """All windows of a split, one step apart; none is left out.

    Targets lie in the split; look-backs of the later splits begin before it, so that its first row is a target too: a
    split of n rows has `n - horizon + 1` windows, the training split `n - lookback - horizon + 1`. A row holds:

    - `tokens`: float32 `t v`, the look-back, in units of the training rows;
    - `targets`: float32 `s v`, the horizon;
    - `unit`, `naive_error`: float32 `v`, of `Scaled`: what makes errors those in the units of the data, and MASE;
    - `weights`: float32, 1.

    Attributes:
      series: scaled.
      split: its name.
      lookback: rows read.
      horizon: rows forecast.
      count: the first of the windows; `None`: all.
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
            raise UserError(
                f'the {self.split} split has {end - start} rows; look-back {self.lookback} and horizon {self.horizon} '
                'need as many as both together'
            )

    def __len__(self) -> int:
        start, end = self._rows()
        windows = end - start - self.lookback - self.horizon + 1
        return windows if self.count is None else min(windows, self.count)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f'window {index} of {len(self)}')
        start = self._rows()[0] + index
        middle = start + self.lookback
        return {
            'tokens': self.series.values[start:middle],
            'targets': self.series.values[middle : middle + self.horizon],
            'unit': self.series.deviation.astype(np.float32),
            'naive_error': self.series.naive_error.astype(np.float32),
            'weights': np.float32(1),
        }

    def _rows(self) -> tuple[int, int]:
        """The rows that windows lie in, which begin a look-back before a later split."""
        start, end = self.series.borders[self.split]
        return (start if self.split == SPLITS[0] else max(0, start - self.lookback)), end


def blank(variates: int, lookback: int, horizon: int) -> Row:
    """A row of zeros."""
    sizes = {'tokens': (lookback, variates), 'targets': (horizon, variates), 'unit': (variates,)}
    zeros = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    return zeros | {'naive_error': np.zeros(variates, np.float32), 'weights': np.float32(0)}
