"""Drawn series whose law is known: seasons, level shifts, regimes, chaotic maps and flows, autoregressions."""

import abc
import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float

from attnlab.data.edition import Editioned
from attnlab.data.series.dates import Clock, Dates
from attnlab.data.series.series import Counts, Series, Shares, Values, check_values
from attnlab.errors import UserError


class Process(Editioned, abc.ABC):
    """A distribution of series: a frozen dataclass.

    Attributes:
      season: steps of its period; 1 without one.
      clock: the dates of its rows; `None`: it has none.
    """

    season: int = 1
    clock: Clock | None = None

    @property
    def variates(self) -> int:
        """Columns that one draw has."""
        return 1

    @abc.abstractmethod
    def draw(self, rng: np.random.Generator, rows: int) -> Float[np.ndarray, 'n v']:
        """Draws a series."""


@dataclasses.dataclass(frozen=True)
class Seasonal(Process):
    """A day and a week: `sin(2 pi t / 24) + 0.5 sin(2 pi t / 168 + 1) + noise e_t + trend t`, and a shift of level.

    With 4,000 rows, look-back and horizon of 96, mean squared errors over all windows of the test split, scaled, are:
    last value repeated 2.049, linear map in closed form 0.1328, the same of differences to the last value 0.1407; on
    windows that lie in the test rows whole 2.021, 0.1306 and 0.1392. With a shift of 2 these last are 2.021, 17.36 and
    0.1392.

    Attributes:
      noise: its standard deviation.
      trend: rise by step.
      shift: added to the last fifth of the rows, which are the test rows.
    """

    noise: float = 0.3
    trend: float = 0.0
    shift: float = 0.0

    season = 24
    clock = Clock()

    def draw(self, rng: np.random.Generator, rows: int) -> Float[np.ndarray, 'n v']:
        t = np.arange(rows)
        x = np.sin(2 * np.pi * t / 24) + 0.5 * np.sin(2 * np.pi * t / 168 + 1)
        x = x + self.noise * rng.standard_normal(rows) + self.trend * t
        x[rows - int(0.2 * rows) :] += self.shift
        return x[:, None]


@dataclasses.dataclass(frozen=True)
class Autoregression(Process):
    """`x_t = sum_i w_i x_{t-i} + noise e_t` with known coefficients `w_1, w_2, ...`, after 200 rows that are dropped.

    Raises `UserError` for coefficients whose series grow without bound.
    """

    coefficients: tuple[float, ...] = (0.2, 0.3, -0.5)
    noise: float = 1.0

    def __post_init__(self) -> None:
        if not stationary(self.coefficients):
            raise UserError(f'coefficients of Autoregression are {self.coefficients}; their series grow without bound')

    def draw(self, rng: np.random.Generator, rows: int) -> Float[np.ndarray, 'n v']:
        weights, before = np.array(self.coefficients[::-1]), len(self.coefficients)
        x = np.zeros(before + BURN_IN + rows)
        noise = self.noise * rng.standard_normal(len(x))
        for t in range(before, len(x)):
            x[t] = weights @ x[t - before : t] + noise[t]
        return x[-rows:, None]


@dataclasses.dataclass(frozen=True)
class Driven(Process):
    """A series that another one drives, in the two columns: `x_t = weight x_{t-1} + gain u_t + noise e_t`, white u.

    Of the next step, whoever knows u there has errors of `noise^2` at least, and of `noise^2 + gain^2` who does not.
    """

    weight: float = 0.5
    gain: float = 1.0
    noise: float = 0.3

    def __post_init__(self) -> None:
        """Raises `UserError` for weights from 1 on."""
        if abs(self.weight) >= 1:
            raise UserError(f'weight of Driven is {self.weight}; use a number within -1 to 1')

    @property
    def variates(self) -> int:
        return 2

    def draw(self, rng: np.random.Generator, rows: int) -> Float[np.ndarray, 'n v']:
        driver, noise = rng.standard_normal((2, BURN_IN + rows))
        x = np.zeros(BURN_IN + rows)
        for t in range(1, len(x)):
            x[t] = self.weight * x[t - 1] + self.gain * driver[t] + self.noise * noise[t]
        return np.stack([x, driver], axis=1)[-rows:]


@dataclasses.dataclass(frozen=True)
class Regimes(Process):
    """Two autoregressions that take turns: at every step the other one takes over with probability `switch`.

    `x_t = level_r + w_r (x_{t-1} - level_r) + noise e_t` in regime r.
    """

    weights: tuple[float, float] = (0.95, -0.6)
    levels: tuple[float, float] = (0.0, 3.0)
    noise: float = 0.3
    switch: float = 0.01

    def __post_init__(self) -> None:
        """Raises `UserError` for weights from 1 on, and what is no probability."""
        if max(map(abs, self.weights)) >= 1 or not 0 <= self.switch <= 1:
            raise UserError(f'weights of Regimes are {self.weights}, switch {self.switch}; use numbers within -1 to 1')

    def draw(self, rng: np.random.Generator, rows: int) -> Float[np.ndarray, 'n v']:
        regime = np.cumsum(rng.random(rows) < self.switch) % 2
        noise = self.noise * rng.standard_normal(rows)
        x, last = np.zeros(rows), self.levels[0]
        for t in range(rows):
            level = self.levels[regime[t]]
            x[t] = last = level + self.weights[regime[t]] * (last - level) + noise[t]
        return x[:, None]


@dataclasses.dataclass(frozen=True)
class Henon(Process):
    """A chaotic map of the plane, `x' = 1 - a x^2 + y, y' = b x`, started near the origin; 200 rows are dropped.

    Henon 1976, https://doi.org/10.1007/BF01608556.
    """

    a: float = 1.4
    b: float = 0.3

    @property
    def variates(self) -> int:
        return 2

    def draw(self, rng: np.random.Generator, rows: int) -> Float[np.ndarray, 'n v']:
        points = np.zeros((BURN_IN + rows, 2))
        points[0] = rng.uniform(-0.1, 0.1, 2)
        with np.errstate(over='ignore', invalid='ignore'):
            for t in range(1, len(points)):
                x, y = points[t - 1]
                points[t] = 1 - self.a * x * x + y, self.b * x
        return points[-rows:]


@dataclasses.dataclass(frozen=True)
class Lorenz(Process):
    """A chaotic flow, `x' = s (y - x), y' = x (r - z) - y, z' = x y - b z`, every `step` by a Runge-Kutta step.

    Lorenz 1963, https://doi.org/10.1175/1520-0469(1963)020<0130:DNF>2.0.CO;2. 200 rows are dropped.
    """

    s: float = 10.0
    r: float = 28.0
    b: float = 8 / 3
    step: float = 0.02

    @property
    def variates(self) -> int:
        return 3

    def draw(self, rng: np.random.Generator, rows: int) -> Float[np.ndarray, 'n v']:
        points = np.zeros((BURN_IN + rows, 3))
        points[0] = np.array([1.0, 1.0, 20.0]) + rng.standard_normal(3)
        h = self.step
        with np.errstate(over='ignore', invalid='ignore'):
            for t in range(1, len(points)):
                p = points[t - 1]
                k1 = self._slope(p)
                k2 = self._slope(p + h / 2 * k1)
                k3 = self._slope(p + h / 2 * k2)
                points[t] = p + h / 6 * (k1 + 2 * k2 + 2 * k3 + self._slope(p + h * k3))
        return points[-rows:]

    def _slope(self, point: Float[np.ndarray, '3']) -> Float[np.ndarray, '3']:
        x, y, z = point
        return np.array([self.s * (y - x), x * (self.r - z) - y, x * y - self.b * z])


BURN_IN = 200
"""Rows that are drawn first and dropped."""


@dataclasses.dataclass(frozen=True)
class DrawnSeries(Series):
    """A series drawn from a process: a pure function of it, the number of rows and the seed.

    Attributes:
      of: the process.
      rows: how many are drawn.
      copies: independent draws side by side.
      seed: from 0 on.
      split: how rows are divided.
    """

    of: Process = Seasonal()
    rows: int = 4000
    copies: int = 1
    seed: int = 0
    split: Shares | Counts = Shares()

    def __post_init__(self) -> None:
        for name in ('rows', 'copies'):
            if getattr(self, name) < 1:
                raise UserError(f'{name} of DrawnSeries is {getattr(self, name)}; it must be at least 1')
        if self.seed < 0:
            raise UserError(f'seed of DrawnSeries is {self.seed}; it must be at least 0')

    @property
    def season(self) -> int:  # type: ignore[override]
        """The season of the process."""
        return self.of.season

    @property
    def variates(self) -> int:
        return self.copies * self.of.variates

    def dates(self) -> Dates | None:
        """By the clock of the process."""
        return None if self.of.clock is None else self.of.clock.dates(self.rows)

    def values(self) -> Values:
        rng = np.random.default_rng(self.seed)
        drawn = np.concatenate([self.of.draw(rng, self.rows) for _ in range(self.copies)], axis=1)
        return check_values(f'a draw of {self.of}', drawn)

    def describe(self) -> dict[str, Any]:
        counts = {'rows': self.rows, 'copies': self.copies, 'seed': self.seed}
        return {'source': 'drawn', 'of': self.of.name, **counts, 'content': self.of.content}


def stationary(coefficients: tuple[float, ...]) -> bool:
    """Whether the autoregression of these coefficients forgets its past: all roots lie within the unit circle."""
    return bool(np.all(np.abs(np.roots([1.0, *(-c for c in coefficients)])) < 1))
