"""Windows of a series with gaps, which are to be filled, and what fills them without training."""

import abc
import dataclasses

import numpy as np
from jaxtyping import Bool, Float

from attnlab.data.pipeline import Row, place_of
from attnlab.data.series.windows import Scaled
from attnlab.data.synthetic.problem import SPLITS
from attnlab.errors import UserError
from attnlab.signature import checked_fields

FILLED = 'filled'
"""The entry of a row that holds what a baseline fills the window with."""

Window = Float[np.ndarray, 't v']
Present = Bool[np.ndarray, 't v']
"""Which values of a window are there."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class Gaps:
    """Which values of a window are missing: every variate loses a share of its steps, drawn anew for every window.

    The share is uniform from `low` to `high`, one for all variates of a window; of runs of `span` steps, whose borders
    are drawn too, each is missing with that probability.

    Attributes:
      low: the least share, above 0.
      high: the greatest, below 1.
      span: steps of a run.
    """

    low: float = 0.125
    high: float = 0.5
    span: int = 1

    def __post_init__(self) -> None:
        """Raises `UserError` for shares out of order."""
        if not 0 < self.low <= self.high < 1:
            raise UserError(f'low and high of Gaps are {self.low} and {self.high}; use 0 < low <= high < 1')

    def draw(self, rng: np.random.Generator, steps: int, variates: int) -> Present:
        """Draws which values are there."""
        share = rng.uniform(self.low, self.high)
        lost = rng.random((steps // self.span + 2, variates)) < share
        first = int(rng.integers(self.span))
        return ~np.repeat(lost, self.span, axis=0)[first : first + steps]


@dataclasses.dataclass(frozen=True)
class Grating:
    """Every `count`-th run of `span` steps is missing, of all variates, from run `place` on.

    The gratings of all places together leave no step out. As those of Chen et al. 2023,
    https://arxiv.org/abs/2307.00754.
    """

    place: int
    count: int
    span: int

    def draw(self, rng: np.random.Generator, steps: int, variates: int) -> Present:
        """Which values are there; nothing is drawn."""
        del rng
        there = np.arange(steps) // self.span % self.count != self.place
        return np.repeat(there[:, None], variates, axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class Gapped:
    """Windows of a split, `stride` apart, with gaps. All rows of a window lie in the split. A row holds:

    - `tokens`: float32 `t 2v`, the values, where they are missing the mean of those of the window and variate that are
      there (0 without any), and behind them which are there, as 1 and 0;
    - `targets`: float32 `t v`, the whole window;
    - `missing`: float32 `t v`, 1 where a value is;
    - `unit`: float32 `v`, of `Scaled`;
    - `weights`: float32, 1.

    Gaps are a function of the seed, the split and the window; training reads others every time.

    Attributes:
      series: scaled, of which every column is read.
      split: its name.
      steps: of a window.
      gaps: what is missing.
      seed: of the gaps.
      stride: from one window to the next; the last ends with the split.
      count: so many windows, at equal distances; `None`: all.
    """

    series: Scaled
    split: str
    steps: int
    gaps: Gaps | Grating
    seed: int = 0
    stride: int = 1
    count: int | None = None

    def __post_init__(self) -> None:
        """Raises `UserError` where no window fits."""
        if len(self.values) < self.steps:
            raise UserError(f'the {self.split} split has {len(self.values)} rows; windows of {self.steps} do not fit')

    @property
    def values(self) -> Float[np.ndarray, 'n v']:
        """The rows of the split."""
        return self.series.split(self.split)

    def __len__(self) -> int:
        return self._every if self.count is None else min(self._every, self.count)

    def __getitem__(self, index: int) -> Row:
        stream = np.random.SeedSequence(self.seed, spawn_key=(SPLITS[self.split], self._place(int(index))))
        return self.varied(index, np.random.default_rng(stream))

    def varied(self, index: int, rng: np.random.Generator) -> Row:
        """Window `index` with gaps drawn from `rng`."""
        if not 0 <= index < len(self):
            raise IndexError(f'window {index} of {len(self)}')
        first = self.first(index)
        window = self.values[first : first + self.steps]
        return row(window, self.gaps.draw(rng, *window.shape), self.series.deviation)

    def first(self, index: int) -> int:
        """The first row of a window within its split."""
        return min(self._place(index) * self.stride, len(self.values) - self.steps)

    @property
    def _every(self) -> int:
        return -(-(len(self.values) - self.steps) // self.stride) + 1

    def _place(self, index: int) -> int:
        """Which of all windows one is."""
        return place_of(index, self._every, len(self))


def row(window: Window, there: Present, unit: Float[np.ndarray, 'v']) -> Row:
    """The row of a window of which some values are there."""
    counts = there.sum(axis=0)
    mean = np.where(there, window, 0).sum(axis=0) / np.maximum(counts, 1)
    filled = np.where(there, window, mean.astype(np.float32))
    return {
        'tokens': np.concatenate([filled, there], axis=1, dtype=np.float32),
        'targets': np.asarray(window, np.float32),
        'missing': (~there).astype(np.float32),
        'unit': unit.astype(np.float32),
        'weights': np.float32(1),
    }


class Filling(abc.ABC):
    """Fills gaps without training."""

    @abc.abstractmethod
    def fill(self, window: Window, there: Present) -> Window:
        """The window, with something in the place of what is missing, which is not read."""


@dataclasses.dataclass(frozen=True)
class WindowMean(Filling):
    """The mean of what is there of a variate; 0, the mean of the training rows, where nothing is."""

    def fill(self, window: Window, there: Present) -> Window:
        return row(window, there, np.ones(window.shape[1]))['tokens'][:, : window.shape[1]]


@dataclasses.dataclass(frozen=True)
class Interpolation(Filling):
    """Straight lines between what is there of a variate, beyond the ends its first and its last value."""

    def fill(self, window: Window, there: Present) -> Window:
        at = np.arange(len(window))
        found = np.zeros_like(window)
        for variate in range(window.shape[1]):
            known = there[:, variate]
            if known.any():
                found[:, variate] = np.interp(at, at[known], window[known, variate])
        return found


FILLINGS = {'window_mean': WindowMean(), 'linear_interpolation': Interpolation()}
"""By name."""


@dataclasses.dataclass(frozen=True, eq=False)
class Filled:
    """Windows with gaps, and what a baseline fills them with, `filled`, float32 `t v`."""

    windows: Gapped
    filling: Filling

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Row:
        found = self.windows[index]
        return found | {FILLED: self.filling.fill(found['targets'], found['missing'] == 0)}


def blank(steps: int, variates: int) -> Row:
    """A row of zeros."""
    sizes = {'tokens': (steps, 2 * variates), 'targets': (steps, variates), 'missing': (steps, variates)}
    zeros = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    return zeros | {'unit': np.zeros(variates, np.float32), 'weights': np.float32(0)}
