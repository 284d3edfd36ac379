"""Drawn windows of a series in one of several regimes: which one is the label."""

import dataclasses

import numpy as np

from attnlab.data.long_range.dataset import Example, Kind
from attnlab.data.long_range.drawn import Distribution
from attnlab.data.series.drawn import Autoregression
from attnlab.errors import UserError
from attnlab.signature import checked_fields


@checked_fields
@dataclasses.dataclass(frozen=True)
class RegimeWindows(Distribution):
    """Windows of autoregressions that swing at different paces: `x_t = 2 r cos(w) x_{t-1} - r^2 x_{t-2} + e_t`.

    Every regime has an angle `w` of its own, and each is as likely; the label is which. A window is less its mean and
    divided by its standard deviation, so that level and size do not tell.

    Attributes:
      angles: in radians a step, one a regime, each once.
      radius: r, below 1: how long swings last.
      steps: of a window.
    """

    angles: tuple[float, ...] = (0.4, 0.6, 0.8, 1.0)
    radius: float = 0.7
    steps: int = 96

    def __post_init__(self) -> None:
        """Raises `UserError` for fewer than two angles or steps, the same angle twice, and a radius from 1 on."""
        if self.steps < 2:
            raise UserError(f'steps of RegimeWindows is {self.steps}; a window needs two or more, to be scaled by')
        if len(set(self.angles)) != len(self.angles) or len(self.angles) < 2 or not 0 < self.radius < 1:
            raise UserError(
                f'angles and radius of RegimeWindows are {self.angles} and {self.radius}; use at least two angles, '
                'each once, and a radius above 0 and below 1'
            )

    @property
    def kind(self) -> Kind:
        return Kind(classes=len(self.angles), length=self.steps)

    def law(self, label: int) -> Autoregression:
        """The law of a regime."""
        return Autoregression((2 * self.radius * float(np.cos(self.angles[label])), -(self.radius**2)))

    def draw(self, stream: np.random.SeedSequence) -> Example:
        """Draws a window; `label` is the index of its angle."""
        rng = np.random.default_rng(stream)
        label = int(rng.integers(len(self.angles)))
        window = self.law(label).draw(rng, self.steps)[:, 0]
        return {'x': ((window - window.mean()) / window.std()).astype(np.float32), 'label': np.int32(label)}
