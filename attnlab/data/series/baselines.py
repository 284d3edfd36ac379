"""Forecasts that need no training of a network: what a model has to beat."""

import abc
import dataclasses
import functools

import numpy as np
from jaxtyping import Float

from attnlab.data.pipeline import Row, Source
from attnlab.data.series.series import Series
from attnlab.data.series.windows import scaled
from attnlab.errors import UserError
from attnlab.nn.windows import InstanceNorm, LastValue, WindowNorm, level_and_scale

FORECAST = 'forecast'
"""The entry of a row that holds what a baseline forecasts."""

MOST = 100_000
"""Windows that ridge regression is fitted to at most, at equal distances."""

Lookback = Float[np.ndarray, 'b t v']
Forecast = Float[np.ndarray, 'b s v']


class Baseline(abc.ABC):
    """Forecasts of `horizon` rows from look-backs, in scaled units."""

    @abc.abstractmethod
    def forecast(self, past: Lookback, horizon: int) -> Forecast:
        """The forecasts."""


@dataclasses.dataclass(frozen=True)
class RepeatLast(Baseline):
    """The last row, again and again."""

    def forecast(self, past: Lookback, horizon: int) -> Forecast:
        return np.repeat(past[:, -1:], horizon, axis=1)


@dataclasses.dataclass(frozen=True)
class SeasonalNaive(Baseline):
    """What was one season before, the last whole season again and again.

    Attributes:
      season: its steps; the look-back must be as long.
    """

    season: int

    def forecast(self, past: Lookback, horizon: int) -> Forecast:
        return past[:, past.shape[1] - self.season + np.arange(horizon) % self.season]


@dataclasses.dataclass(frozen=True, eq=False)
class Ridge(Baseline):
    """A linear map from look-back to horizon, one for all variates, fitted in closed form by `fit`.

    Attributes:
      weight: `t + 1, s`; the last row is the intercept.
      norm: subtracts the level of a window and divides by its scale, which the forecast is given back.
    """

    weight: Float[np.ndarray, 't s']
    norm: WindowNorm | None

    def forecast(self, past: Lookback, horizon: int) -> Forecast:
        if horizon != self.weight.shape[1]:
            raise UserError(f'the map was fitted for {self.weight.shape[1]} steps, not {horizon}')
        window = past.astype(np.float64)
        level, scale = level_and_scale(self.norm, window)
        found = ((window - level) / scale).swapaxes(1, 2) @ self.weight[:-1] + self.weight[-1]
        return (found.swapaxes(1, 2) * scale + level).astype(np.float32)


@functools.lru_cache(maxsize=8)
def fit(series: Series, lookback: int, horizon: int, norm: WindowNorm | None = None, penalty: float = 1e-3) -> Ridge:
    """The map that minimises squared errors over training windows of all variates, plus `penalty` times its squares.

    Errors are those of normalised windows; the intercept is not penalised. Of more than `MOST` windows some are taken,
    at equal distances.
    """
    train = scaled(series).split('train').astype(np.float64)
    starts = len(train) - lookback - horizon + 1
    step = -(-starts * train.shape[1] // MOST)
    square = np.zeros((lookback + 1, lookback + 1))
    product = np.zeros((lookback + 1, horizon))
    for variate in range(train.shape[1]):
        windows = np.lib.stride_tricks.sliding_window_view(train[:, variate], lookback + horizon)[::step]
        level, scale = level_and_scale(norm, windows[:, :lookback, None])
        windows = (windows - level[..., 0]) / scale[..., 0]
        inputs = np.column_stack([windows[:, :lookback], np.ones(len(windows))])
        square += inputs.T @ inputs
        product += inputs.T @ windows[:, lookback:]
    square[np.diag_indices(lookback)] += penalty
    return Ridge(np.linalg.lstsq(square, product, rcond=None)[0], norm)


def baselines(series: Series, lookback: int, horizon: int) -> dict[str, Baseline]:
    """All baselines by name; the seasonal one where there is a season and the look-back holds it."""
    found: dict[str, Baseline] = {'repeat_last': RepeatLast()}
    if 1 < series.season <= lookback:
        found['seasonal_naive'] = SeasonalNaive(series.season)
    found['ridge'] = fit(series, lookback, horizon)
    found['ridge_last_value'] = fit(series, lookback, horizon, LastValue())
    found['ridge_instance_norm'] = fit(series, lookback, horizon, InstanceNorm())
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Forecasted:
    """Windows with the forecast of a baseline, `forecast`, float32 `s v`."""

    windows: Source
    baseline: Baseline

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Row:
        row = self.windows[index]
        return row | {FORECAST: self.baseline.forecast(row['tokens'][None], len(row['targets']))[0]}
