"""Mixtures of linear experts that are known, to be found again from samples."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from attnlab.errors import UserError
from attnlab.nn.experts import Gate, SoftmaxGate, TemperedGate
from attnlab.signature import checked_fields


@checked_fields
@dataclasses.dataclass(frozen=True)
class PlantedExperts:
    """`p(y | x) = sum_e pi_e(x) N(y; A_e x + b_e, noise^2)` for points x of the plane, `pi` the gate's affinities.

    The rows of the gate's matrix lie at equal angles on a circle, `size` from the origin, so that no expert is rarely
    chosen; a row beyond those of the experts is zero. `A` and `b` are drawn, normal with standard deviation `spread`.
    Points are standard normal.

    Attributes:
      gate: one with one row per expert, and at most one more, for a temperature.
      experts: their number.
      size: of the rows of the gate's matrix.
      spread: see above.
      noise: see above.
      seed: of the draw.

    Raises `UserError` for a gate with other rows, and for a size, a spread or a noise that is not positive.
    """

    gate: Gate = SoftmaxGate()
    experts: int = 4
    size: float = 2.0
    spread: float = 2.0
    noise: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.gate, TemperedGate) and self.gate.rows(self.experts) != self.experts:
            raise UserError(f'gate of PlantedExperts is {self.gate}; it must have one row an expert')
        for name in ('size', 'spread', 'noise'):
            if getattr(self, name) <= 0:
                raise UserError(f'{name} of PlantedExperts is {getattr(self, name)}; it must be positive')

    def router(self) -> Float[np.ndarray, 'r 2']:
        """The gate's matrix."""
        first = self._rng(0).uniform(0, 2 * math.pi)
        angles = first + 2 * math.pi * np.arange(self.experts) / self.experts
        rows = self.size * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        return np.concatenate([rows, np.zeros((self.gate.rows(self.experts) - self.experts, 2))])

    def maps(self) -> Float[np.ndarray, 'e 3']:
        """`A` and, last, `b` of every expert."""
        return self.spread * self._rng(1).standard_normal((self.experts, 3))

    def shares(self, x: Float[np.ndarray, 'n 2']) -> Float[np.ndarray, 'n e']:
        """`pi` at points."""
        scores = self.gate.scores(jnp.asarray(x), jnp.asarray(self.router(), x.dtype))
        return np.asarray(self.gate.affinities(scores), np.float64)

    def draw(
        self, rng: np.random.Generator, count: int
    ) -> tuple[Float[np.ndarray, 'n 2'], Float[np.ndarray, ' n'], Int[np.ndarray, ' n']]:
        """Points, their values, and the experts that gave them."""
        x = rng.standard_normal((count, 2)).astype(np.float32)
        ends = np.cumsum(self.shares(x), axis=1)
        chosen = np.sum(rng.uniform(size=(count, 1)) > ends / ends[:, -1:], axis=1)
        maps = self.maps()[chosen]
        y = np.sum(maps[:, :2] * x, axis=1) + maps[:, 2] + self.noise * rng.standard_normal(count)
        return x, y.astype(np.float32), chosen

    def losses(self, x: Float[np.ndarray, 'n 2'], y: Float[np.ndarray, ' n']) -> Float[np.ndarray, ' n']:
        """`-log p(y | x)`, in nats: no model of the mixture has less on average."""
        maps = self.maps()
        apart = (y[:, None] - x @ maps[:, :2].T - maps[:, 2]) / self.noise
        logarithms = np.log(self.shares(x)) - np.square(apart) / 2 - math.log(self.noise * math.sqrt(2 * math.pi))
        most = logarithms.max(axis=1, keepdims=True)
        return -(most[:, 0] + np.log(np.sum(np.exp(logarithms - most), axis=1)))

    def error(self, maps: Float[np.ndarray, 'm 3'], shares: Float[np.ndarray, ' m']) -> float:
        """How far fitted experts are from planted ones: `sum_i shares_i min_e |maps_i - (A, b)_e| / sum_i shares_i`.

        `shares` say how much each is asked. It is the error of the experts that were fitted, each against the planted
        one that is nearest: one with no fitted expert near it does not count here, but in `misplaced`.
        """
        apart = np.linalg.norm(maps[:, None] - self.maps()[None], axis=-1)
        return float(np.sum(shares * apart.min(axis=1)) / np.sum(shares))

    def misplaced(
        self, maps: Float[np.ndarray, 'm 3'], shares: Float[np.ndarray, ' m'], x: Float[np.ndarray, 'n 2']
    ) -> float:
        """How much of the mixture other experts have than should: `sum_e |sum_{i nearest to e} shares_i - pi_e|`.

        Shares sum to one, and `pi_e` is the mean of `pi_e(x)` over points. It is 0 where the fitted experts nearest to
        each planted one are asked as often as that, and 2 less twice `pi_e` where all are nearest to one. Masses of
        cells and distances within them are the two parts of Voronoi losses (Nguyen, Nguyen and Ho 2023,
        https://arxiv.org/abs/2305.03288).
        """
        nearest = self._nearest(maps)
        masses = np.bincount(nearest, weights=shares / np.sum(shares), minlength=self.experts)
        return float(np.sum(np.abs(masses - self.shares(x).mean(axis=0))))

    def misrouted(
        self, router: Float[np.ndarray, 'r 2'], maps: Float[np.ndarray, 'm 3'], shares: Float[np.ndarray, ' m']
    ) -> float:
        """How far the gate's numbers are from those planted: `sum_i shares_i |(a_i - c) - a_e(i)| + |log T|`.

        `a_i` is the row of expert i, `e(i)` the planted expert nearest to it by `maps`, shares sum to one, and T is the
        temperature of a `TemperedGate`, whose planted one is 1. The vector c brings the weighted mean of the
        differences to zero: a softmax of `W x` does not see what is added to all rows.
        """
        apart = router[: len(maps)] - self.router()[self._nearest(maps)]
        weights = shares / np.sum(shares)
        apart = apart - weights @ apart
        temperatures = np.abs(router[len(maps) :, 0])
        return float(weights @ np.linalg.norm(apart, axis=1) + np.sum(temperatures))

    def _nearest(self, maps: Float[np.ndarray, 'm 3']) -> Int[np.ndarray, ' m']:
        return np.linalg.norm(maps[:, None] - self.maps()[None], axis=-1).argmin(axis=1)

    def _rng(self, place: int) -> np.random.Generator:
        # Three numbers: the points of samples are drawn from two, a seed and a split.
        return np.random.default_rng((self.seed, place, self.experts))
