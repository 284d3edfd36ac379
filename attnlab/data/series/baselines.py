"""Forecasts that need no training of a network: what a model has to beat."""

import abc
import dataclasses
import functools

import numpy as np
from jaxtyping import Float

from attnlab.data.pipeline import Row
from attnlab.data.series.columns import EVERY, Columns
from attnlab.data.series.series import Series
from attnlab.data.series.windows import Scaled, Windows, scaled
from attnlab.errors import UserError
from attnlab.nn.series_windows import InstanceNorm, LastValue, WindowNorm, level_and_scale

FORECAST = 'forecast'
"""The entry of a row that holds what a baseline forecasts."""

MOST = 100_000
"""Windows that ridge regression is fitted to at most, at equal distances."""

CHUNK = 4096
"""Windows that are written out at a time."""

Lookback = Float[np.ndarray, 'b t v']
Known = Float[np.ndarray, 'b r k']
"""The columns known ahead, over look-back and horizon; there may be none."""
Forecast = Float[np.ndarray, 'b s v']


class Baseline(abc.ABC):
    """Forecasts of `horizon` rows from look-backs, in scaled units."""

    @abc.abstractmethod
    def forecast(self, past: Lookback, horizon: int, known: Known) -> Forecast:
        """The forecasts; most leave out what is known."""


@dataclasses.dataclass(frozen=True)
class RepeatLast(Baseline):
    """The last row, again and again."""

    def forecast(self, past: Lookback, horizon: int, known: Known) -> Forecast:
        del known
        return np.repeat(past[:, -1:], horizon, axis=1)


@dataclasses.dataclass(frozen=True)
class SeasonalNaive(Baseline):
    """What was one season before, the last whole season again and again.

    Attributes:
      season: its steps; the look-back must be as long.
    """

    season: int

    def forecast(self, past: Lookback, horizon: int, known: Known) -> Forecast:
        del known
        return past[:, past.shape[1] - self.season + np.arange(horizon) % self.season]


@dataclasses.dataclass(frozen=True, eq=False)
class Ridge(Baseline):
    """A linear map from look-back to horizon, one for all variates, fitted in closed form by `fit`.

    Attributes:
      weight: `t + 1, s`; the last row is the intercept; with `ahead` the rows of what is known are before it.
      norm: subtracts the level of a window and divides by its scale, which the forecast is given back.
      ahead: whether it reads what is known besides, over look-back and horizon.
    """

    weight: Float[np.ndarray, 't s']
    norm: WindowNorm | None
    ahead: bool = False

    def forecast(self, past: Lookback, horizon: int, known: Known) -> Forecast:
        if horizon != self.weight.shape[1]:
            raise UserError(f'the map was fitted for {self.weight.shape[1]} steps, not {horizon}')
        window = past.astype(np.float64)
        level, scale = level_and_scale(self.norm, window)
        own = past.shape[1]
        found = ((window - level) / scale).swapaxes(1, 2) @ self.weight[:own] + self.weight[-1]
        if self.ahead:
            found = found + known.reshape(len(known), 1, -1) @ self.weight[own:-1]
        return (found.swapaxes(1, 2) * scale + level).astype(np.float32)


@functools.lru_cache(maxsize=8)
def fit(
    series: Series,
    lookback: int,
    horizon: int,
    norm: WindowNorm | None = None,
    penalty: float = 1e-3,
    columns: Columns = EVERY,
    ahead: bool = False,
) -> Ridge:
    """The map that minimises squared errors over training windows of all variates, plus `penalty` times its squares.

    With `ahead` it reads what is known besides. Errors are those of normalised windows; the intercept is not penalised.
    Of more than `MOST` windows some are taken, at equal distances. Raises `UserError` where training has none.
    """
    found = scaled(series, columns)
    train = found.split('train').astype(np.float64)
    known = found.known[slice(*found.borders['train'])][:, : None if ahead else 0].astype(np.float64)
    length = lookback + horizon
    starts = len(train) - length + 1
    if starts < 1:
        raise UserError(f'{len(train)} steps of training hold no window of {lookback} and {horizon}')
    step = -(-starts * train.shape[1] // MOST)
    size = lookback + length * known.shape[1]
    square = np.zeros((size + 1, size + 1))
    product = np.zeros((size + 1, horizon))
    view = np.lib.stride_tricks.sliding_window_view
    beside = np.moveaxis(view(known, length, axis=0), 1, 2)[::step]
    for variate in range(train.shape[1]):
        every = view(train[:, variate], length)[::step]
        for first in range(0, len(every), CHUNK):
            windows = every[first : first + CHUNK]
            level, scale = level_and_scale(norm, windows[:, :lookback, None])
            windows = (windows - level[..., 0]) / scale[..., 0]
            flat = beside[first : first + CHUNK].reshape(len(windows), -1)
            inputs = np.column_stack([windows[:, :lookback], flat, np.ones(len(windows))])
            square += inputs.T @ inputs
            product += inputs.T @ windows[:, lookback:]
    square[np.diag_indices(size)] += penalty
    return Ridge(np.linalg.lstsq(square, product, rcond=None)[0], norm, ahead)


def baselines(series: Series, lookback: int, horizon: int, columns: Columns = EVERY) -> dict[str, Baseline]:
    """All baselines by name; the seasonal one where there is a season and the look-back holds it, and those that are
    fitted where training has a window of that length.

    Each variate is forecast from its own past, and by `ridge_known` from what is known besides, where anything is; none
    reads what is observed.
    """
    found: dict[str, Baseline] = {'repeat_last': RepeatLast()}
    if 1 < series.season <= lookback:
        found['seasonal_naive'] = SeasonalNaive(series.season)
    if len(scaled(series, columns).split('train')) < lookback + horizon:
        return found
    found['ridge'] = fit(series, lookback, horizon, columns=columns)
    found['ridge_last_value'] = fit(series, lookback, horizon, LastValue(), columns=columns)
    found['ridge_instance_norm'] = fit(series, lookback, horizon, InstanceNorm(), columns=columns)
    if columns.counts(series)[2]:
        found['ridge_known'] = fit(series, lookback, horizon, columns=columns, ahead=True)
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Forecasted:
    """Windows with the forecast of a baseline, `forecast`, float32 `s v`."""

    windows: Windows
    baseline: Baseline

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Row:
        row = self.windows[index]
        past, known = divided(row['tokens'][None], self.windows.lookback, self.windows.series)
        return row | {FORECAST: self.baseline.forecast(past, len(row['targets']), known)[0]}


def divided(tokens: Float[np.ndarray, 'b r m'], lookback: int, series: Scaled) -> tuple[Lookback, Known]:
    """What baselines read of windows: the look-back of what is forecast, and what is known."""
    return tokens[:, :lookback, : series.targets], tokens[:, :, series.values.shape[1] :]
