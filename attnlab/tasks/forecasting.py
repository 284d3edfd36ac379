"""Forecasting: the rows after a window of a series."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from attnlab.data.series.baselines import FORECAST, Forecasted, baselines, divided
from attnlab.data.series.columns import Columns
from attnlab.data.series.drawn import DrawnSeries
from attnlab.data.series.series import Series
from attnlab.data.series.windows import Prompted, Windows, blank, scaled
from attnlab.errors import UserError
from attnlab.metrics import Average
from attnlab.models.predictor import Distributional, Predictor
from attnlab.signature import checked_fields
from attnlab.tasks.task import Batch, Slice, WithoutFiles, context
from attnlab.tasks.trivial import sampled_rows
from attnlab.typing import DropoutKey

LEVELS = 32
"""Quantiles that the continuous ranked probability score is computed from."""

COVERED = 0.8
"""The probability of the interval whose coverage is reported."""

Forecasts = Float[Array, 'b s v']


@checked_fields
@dataclasses.dataclass(frozen=True)
class Forecasting(WithoutFiles):
    """Forecast the `horizon` rows after a look-back of `length` rows, all variates or some of them.

    Errors are means over windows, steps and variates, in units of the training rows: of every variate less its mean
    there, divided by its standard deviation there. No window is left out.

    Attributes:
      data: the series.
      horizon: rows that are forecast at once; longer ones are forecast row after row of that many.
      columns: which are forecast, and which are read besides.
      prompt: rows of the beginning of the training split that are put before every look-back in a slice of its own, for
        models that read any number of rows; `None`: no such slice.
    """

    packs: ClassVar[bool] = False
    labels: ClassVar[str] = 'targets'
    place: ClassVar[str] = 'step ahead'
    places: ClassVar[str] = 'horizon'

    data: Series = DrawnSeries()
    horizon: int = 96
    columns: Columns = Columns()
    prompt: int | None = None

    def __post_init__(self) -> None:
        """Raises `UserError` for a prompt that is not whole segments of `horizon` rows."""
        if self.prompt is not None and (self.prompt < 1 or self.prompt % self.horizon):
            raise UserError(f'prompt is {self.prompt}; it must be a multiple of horizon, {self.horizon} rows a segment')

    @property
    def vocab(self) -> int:
        """Numbers that are forecast for every variate."""
        return self.horizon

    @property
    def evaluated_split(self) -> str:
        """The last rows in time."""
        return 'test'

    def source(self, split: str, length: int, tokens: int | None = None) -> Windows:
        """The windows of a split; with `tokens`, as many all over it as read `tokens` rows, at least one."""
        count = None if tokens is None else max(1, tokens // length)
        return Windows(scaled(self.data, self.columns), split, length, self.horizon, count)

    def slices(self, split: str, length: int, multiples: tuple[int, ...], count: int) -> dict[str, Slice]:
        """`count` windows all over a split: `1x`, by the model; `2x`, twice the horizon, by rolling; and the baselines.

        With a prompt `prompted` has windows with these rows before them.
        A baseline is a slice of its own, whose rows hold its forecasts (`attnlab.data.series.baselines`). Raises
        `UserError` for multiples where what is observed besides would have to be forecast too.
        """
        observed = self.columns.counts(self.data)[1]
        if observed and set(multiples) != {1}:
            raise UserError(
                f'multiples is {multiples}; {observed} columns are observed to the present alone, so that forecasts '
                'cannot be rolled: leave it at 1, or name them among the known'
            )
        series = scaled(self.data, self.columns)
        found: dict[str, Slice] = {
            f'{n}x': Slice(Windows(series, split, length, n * self.horizon, count), length) for n in multiples
        }
        windows = Windows(series, split, length, self.horizon, count)
        if self.prompt:
            found['prompted'] = Slice(Prompted(windows, self.prompt), length)
        for name, baseline in baselines(self.data, length, self.horizon, self.columns).items():
            found[name] = Slice(Forecasted(windows, baseline), length)
        return found

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """The errors of the baselines on windows all over a slice."""
        rows = sampled_rows(part.source)
        past, targets = (np.stack([row[name] for row in rows]) for name in ('tokens', 'targets'))
        # What is put before a look-back is no part of it.
        past = past[:, part.source.rows if isinstance(part.source, Prompted) else 0 :]
        past, known = divided(past, part.length, scaled(self.data, self.columns))
        found: dict[str, dict[str, float]] = {'mse': {}, 'mae': {}}
        for name, baseline in baselines(self.data, part.length, targets.shape[1], self.columns).items():
            apart = baseline.forecast(past, targets.shape[1], known) - targets
            found['mse'][name], found['mae'][name] = float(np.mean(apart**2)), float(np.mean(np.abs(apart)))
        return found | {'loss': found['mse']}

    def example(self, length: int) -> dict[str, np.ndarray]:
        """A row of zeros."""
        variates, observed, known = self.columns.counts(self.data)
        return blank(variates, length, self.horizon, observed, known)

    def describe(self) -> dict[str, Any]:
        """Where the data are from."""
        return self.data.describe()

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """The loss, and errors of the forecasts (see `errors`); of distributions their score and coverage besides.

        The loss is that of the head; forecasts that are given or rolled have none.
        """
        if FORECAST in batch:
            return errors(batch[FORECAST], batch)
        if batch['targets'].shape[1] != self.horizon:
            return errors(rolled(model, batch, self.horizon, dropout_key), batch)
        targets = jnp.swapaxes(batch['targets'], 1, 2)
        weights = _weights(batch, targets[..., 0])
        hidden, _ = model.hidden(batch['tokens'], context(batch, dropout_key, weights))
        found = {'loss': Average.of(model.losses(hidden, targets, dropout_key), weights)}
        found |= errors(jnp.swapaxes(model.logits(hidden), 1, 2), batch)
        # Training steps only need the loss; quantiles are many times the numbers of a forecast.
        if dropout_key is None and isinstance(model, Distributional) and model.distributions:
            found |= scores(model, hidden, targets, batch)
        return found


def rolled(model: Predictor, batch: Batch, horizon: int, dropout_key: DropoutKey | None) -> Forecasts:
    """Forecasts of several horizons: each is appended to the look-back for the next, whose first rows are dropped.

    What is known ahead moves along.
    """
    tokens, targets = batch['tokens'], batch['targets']
    steps, variates = targets.shape[1:]
    known = tokens[:, :, variates:]
    lookback = tokens.shape[1] - (steps if known.shape[2] else 0)
    past = tokens[:, :lookback, :variates]
    found: list[Forecasts] = []
    while (done := past.shape[1] - lookback) < steps:
        window = past[:, done:]
        if known.shape[2]:
            unseen = jnp.zeros((len(window), horizon, variates), window.dtype)
            there = known[:, done : done + lookback + horizon]
            window = jnp.concatenate([jnp.concatenate([window, unseen], axis=1), there], axis=2)
        hidden, _ = model.hidden(window, context(batch, dropout_key))
        found.append(jnp.swapaxes(model.logits(hidden), 1, 2).astype(past.dtype))
        past = jnp.concatenate([past, found[-1]], axis=1)
    return jnp.concatenate(found, axis=1)[:, :steps]


def errors(forecasts: Forecasts, batch: Batch) -> dict[str, Average]:
    """Mean squared and absolute errors, in units of the training rows and of the data; MASE; and both by step.

    MASE is the absolute error over that of the seasonal naive forecast, one season ahead, on the training rows, by
    variate. Hyndman and Koehler 2006, https://doi.org/10.1016/j.ijforecast.2006.03.001.
    """
    apart = (forecasts - batch['targets']).astype(jnp.float32)
    weights = _weights(batch, apart)
    unit, naive = (batch[name][:, None] for name in ('unit', 'naive_error'))
    squares, sizes = jnp.square(apart), jnp.abs(apart)
    known = (naive > 0).astype(jnp.float32)
    by_step = {
        f'position_{name}': Average(jnp.sum(values * weights, (0, 2)), jnp.sum(weights, (0, 2)))
        for name, values in (('mse', squares), ('mae', sizes))
    }
    return {
        'mse': Average.of(squares, weights),
        'mae': Average.of(sizes, weights),
        'mase': Average.of(sizes / jnp.where(naive > 0, naive, 1.0), weights * known),
        'mse_original': Average.of(squares * jnp.square(unit), weights),
        'mae_original': Average.of(sizes * unit, weights),
        **by_step,
    }


def scores(
    model: Distributional, hidden: Float[Array, 'b v d'], targets: Float[Array, 'b v s'], batch: Batch
) -> dict[str, Average]:
    """CRPS, twice the mean pinball loss over even levels, and the share of targets in the middle 80 % interval.

    `CRPS = 2 int_0^1 (y - q(u)) (u - 1[y < q(u)]) du`; for a forecast without spread it is the absolute error.
    Gneiting and Raftery 2007, https://doi.org/10.1198/016214506000001437.
    """
    even = (2 * np.arange(LEVELS) + 1) / (2 * LEVELS)
    tails = np.array([(1 - COVERED) / 2, (1 + COVERED) / 2])
    levels = jnp.asarray(np.concatenate([even, tails]), jnp.float32)
    quantiles = model.quantiles(hidden, levels)
    apart = targets[..., None, :] - quantiles[..., :LEVELS, :]
    below = (apart < 0).astype(jnp.float32)
    pinball = apart * (levels[:LEVELS].reshape(1, 1, -1, 1) - below)
    low, high = quantiles[..., LEVELS, :], quantiles[..., LEVELS + 1, :]
    inside = ((targets >= low) & (targets <= high)).astype(jnp.float32)
    weights = _weights(batch, targets)
    return {
        'crps': Average.of(2 * jnp.mean(pinball, axis=-2), weights),
        'coverage_80': Average.of(inside, weights),
        'width_80': Average.of(high - low, weights),
    }


def _weights(batch: Batch, like: Array) -> Array:
    weights = batch['weights'].reshape(-1, *(1,) * (like.ndim - 1))
    return jnp.broadcast_to(weights, like.shape)
