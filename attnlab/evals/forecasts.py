"""Forecasts shown: some windows over what came, with their intervals, and how much they move at every frequency."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.context import Context
from attnlab.data.pipeline import spread
from attnlab.data.series.baselines import baselines, divided
from attnlab.data.series.windows import Windows, scaled
from attnlab.errors import UserError
from attnlab.figures import Panel, forecast_panels, spectrum_curves, write_csv
from attnlab.models.predictor import Distributional
from attnlab.tables import Column, Table, digits
from attnlab.tasks.forecasting import COVERED, Forecasting
from attnlab.train.setup import Cadence, Setup

MODEL, TRUTH = 'model', 'truth'
"""What the forecasts of the model and the rows that came are called, beside those of baselines."""

SMALLEST = 1e-12
"""Added to powers, of which a constant has none."""

Lookback = Float[np.ndarray, 'n t v']
Rows = Float[np.ndarray, 'n s v']
Power = Float[np.ndarray, 'f']


@dataclasses.dataclass(frozen=True)
class ShownForecasts:
    """The results of `Forecasts`, in units of the training rows.

    Attributes:
      past: look-backs of what is forecast, `n t v`.
      forecasts: `n s v` by name, `truth` among them.
      interval: the ends of the middle 80 %, each `n s v`; `None` for a model that predicts numbers.
      spectra: mean power by name, over frequencies of 1, 2, ... cycles a horizon, of more windows than are shown.
      columns: names of what is forecast.
    """

    past: Lookback
    forecasts: Mapping[str, Rows]
    interval: tuple[Rows, Rows] | None
    spectra: Mapping[str, Power]
    columns: tuple[str, ...]

    @property
    def numbers(self) -> dict[str, float]:
        """`spectral_distance` of every forecast to what came, in dB.

        The root mean square over frequencies of `10 log10` of the ratio of the powers. Gray and Markel 1976,
        https://doi.org/10.1109/TASSP.1976.1162849. None of what has no power at all, as a constant, nor of one step.
        """
        truth = self.spectra[TRUTH]
        found = {
            name: 10 * np.log10((power + SMALLEST) / (truth + SMALLEST))
            for name, power in self.spectra.items()
            if name != TRUTH and power.any()
        }
        return {f'{name}/spectral_distance': float(np.sqrt(np.mean(apart**2))) for name, apart in found.items()}

    def draw(self, folder: pathlib.Path) -> None:
        """Writes windows and spectra, `forecasts` and `spectra`, each a figure and the numbers in it as CSV.

        A panel is a window of one variate: the first window has the first, the second the second, and so on. Steps of
        the look-back are 0 and below.
        """
        panels: list[Panel] = []
        lines: list[tuple[Any, ...]] = []
        for number in range(len(self.past)):
            place = number % self.past.shape[2]
            past, column = self.past[number, :, place], self.columns[place]
            forecasts = {name: rows[number, :, place] for name, rows in self.forecasts.items()}
            ends = tuple(one[number, :, place] for one in self.interval or ())
            panels.append((f'window {number + 1}, {column}', past, forecasts, ends))
            rest = [''] * (len(forecasts) + len(ends) - 1)
            at = range(1 - len(past), 1)
            lines += [(number + 1, column, step, value, *rest) for step, value in zip(at, past.tolist(), strict=True)]
            ahead = np.stack([*forecasts.values(), *ends], axis=1).tolist()
            lines += [(number + 1, column, step, *values) for step, values in enumerate(ahead, 1)]
        forecast_panels(panels, folder / 'forecasts.png', truth=TRUTH, interval=f'{COVERED:.0%}')
        names = (*self.forecasts, *(('low', 'high') if self.interval else ()))
        write_csv(folder / 'forecasts.csv', ('window', 'variate', 'step', *names), lines)
        count, horizon = len(self.spectra[TRUTH]), self.forecasts[TRUTH].shape[1]
        if count:
            frequencies = np.arange(1, count + 1) / horizon
            spectrum_curves(frequencies, self.spectra, folder / 'spectra.png', truth=TRUTH)
            powers = np.stack([frequencies, *self.spectra.values()], axis=1).tolist()
            write_csv(folder / 'spectra.csv', ('cycles_per_step', *self.spectra), powers)

    def table(self, title: str) -> Table:
        """One row a forecast."""
        rows = [(name.partition('/')[0].replace('_', ' '), value) for name, value in self.numbers.items()]
        columns = (Column('forecast'), Column('spectral distance, dB', digits('.2f'), True))
        return Table('forecasts', columns, rows, f'{title}: how far its power is from that of what came')


@dataclasses.dataclass(frozen=True)
class Forecasts:
    """Shows windows of a split, at equal distances, with the forecasts of the model and of baselines.

    Spectra are means over windows and variates of `|FFT(w (y - mean y))|^2` with a Hann window `w` over the horizon: a
    forecast that is a mean over what may come has little power where that cannot be told.

    Attributes:
      cadence: when to run during training.
      split: which split of the task.
      shown: windows that are drawn.
      measured: windows that spectra are means of, no fewer than are drawn.
      name: the prefix of its numbers.
    """

    cadence: Cadence
    split: str = 'test'
    shown: int = 4
    measured: int = 256
    name: str = 'forecasts'

    def __post_init__(self) -> None:
        """Raises `UserError` for no windows, and for fewer that are measured than shown."""
        if not 0 < self.shown <= self.measured:
            raise UserError(
                f'Forecasts has shown {self.shown} and measured {self.measured}; at least one window is shown, and '
                'no more than are measured'
            )

    def load_data(self, setup: Setup) -> None:
        """Draws the first window. Raises `UserError` for a task of another kind."""
        if not isinstance(setup.task, Forecasting):
            raise UserError(f'Forecasts shows what Forecasting asks for; the task is {type(setup.task).__name__}')
        self._windows(setup, setup.task)[0]

    def evaluate(self, setup: Setup, variables: nnx.State) -> ShownForecasts:
        """Returns the windows with their forecasts, and the spectra."""
        task = setup.task
        assert isinstance(task, Forecasting)
        windows = self._windows(setup, task)
        count = min(self.measured, len(windows))
        rows = [windows[place] for place in spread(len(windows), count)]
        tokens, truth = (np.stack([row[name] for row in rows]) for name in ('tokens', 'targets'))
        found = forecasts(setup, variables, tokens)
        past, known = divided(tokens, setup.length, windows.series)
        every = {TRUTH: truth, MODEL: found[0]} | {
            name: one.forecast(past, task.horizon, known)
            for name, one in baselines(task.data, setup.length, task.horizon, task.columns).items()
        }
        shown = spread(count, min(self.shown, count))
        interval = (found[1][shown], found[2][shown]) if len(found) == 3 else None
        places = task.columns.places(task.data).targets
        return ShownForecasts(
            past[shown],
            {name: rows[shown] for name, rows in every.items()},
            interval,
            {name: power(rows) for name, rows in every.items()},
            tuple(task.data.names[place] for place in places),
        )

    def _windows(self, setup: Setup, task: Forecasting) -> Windows:
        return Windows(scaled(task.data, task.columns), self.split, setup.length, task.horizon)


def power(rows: Rows) -> Power:
    """The mean power of rows less their mean, at 1, 2, ... cycles in all of them."""
    window = np.hanning(rows.shape[1] + 2)[1:-1].reshape(1, -1, 1)
    apart = rows.astype(np.float64) - rows.mean(axis=1, keepdims=True, dtype=np.float64)
    return np.mean(np.abs(np.fft.rfft(window * apart, axis=1)[:, 1:]) ** 2, axis=(0, 2))


def forecasts(setup: Setup, variables: nnx.State, tokens: Float[np.ndarray, 'n r m']) -> tuple[Rows, ...]:
    """The forecasts of windows, and where the model predicts distributions the ends of the middle 80 %."""
    size, program = setup.rows_of_part, setup.program(_program)
    found: list[list[Rows]] = []
    for first in range(0, len(tokens), size):
        batch = tokens[first : first + size]
        filled = np.concatenate([batch, np.repeat(batch[-1:], size - len(batch), axis=0)])
        found.append([np.asarray(one)[: len(batch)] for one in program(variables, filled)])
    return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))


def _program(setup: Setup) -> Callable[[nnx.State, np.ndarray], tuple[Array, ...]]:
    """The forecasts of a batch, the same in every process."""

    def made(variables: nnx.State, tokens: Float[Array, 'b r m']) -> tuple[Array, ...]:
        model = nnx.merge(setup.graphdef, variables)
        hidden, _ = model.hidden(tokens, Context.full(*tokens.shape[:2]))
        found = [model.logits(hidden)]
        if isinstance(model, Distributional) and model.distributions:
            levels = jnp.asarray([(1 - COVERED) / 2, (1 + COVERED) / 2], jnp.float32)
            quantiles = model.quantiles(hidden, levels)
            found += [quantiles[..., end, :] for end in (0, 1)]
        return tuple(jnp.swapaxes(one, 1, 2).astype(jnp.float32) for one in found)

    return setup.jit(made, out_shardings=setup.whole)
