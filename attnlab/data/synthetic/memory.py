"""Remembering a signal: its value some time ago, or all of it at its end."""

import dataclasses

import numpy as np
from jaxtyping import Float

from attnlab.data.synthetic.problem import Example, Problem, require, require_length


@dataclasses.dataclass(frozen=True)
class Delay(Problem):
    """A signal that is band-limited noise, whose value `lag` tokens before is predicted at every token that has one.

        u_1 u_2 u_3 ...      label at t: u_{t - lag}

    The signal has variance one and no power above `band` of the highest frequency (`band_noise`). No error is the
    answer; predicting zero, the baseline `zero`, has an error of one.

    Attributes:
      lag: tokens to look back.
      band: share of the frequencies that the signal has, above 0 and at most 1, which is white noise.

    Source: the delay task of Gu et al., "How to Train Your HiPPO: State Space Models with Generalized Orthogonal Basis
    Projections", 2023, https://arxiv.org/abs/2206.12037, after Voelker, Kajic and Eliasmith 2019.
    """

    lag: int = 100
    band: float = 0.25

    @property
    def vocab(self) -> int:
        return 1

    @property
    def features(self) -> int:
        return 1

    def check(self, length: int) -> None:
        require(self, 'lag', self.lag >= 1, 'a whole number of at least 1')
        require(self, 'band', 0 < self.band <= 1, 'a number above 0 and at most 1')
        require_length(self, length, length > self.lag, f'more than {self.lag} tokens')

    def labels(self, length: int) -> int:
        return length - self.lag

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        signal = band_noise(rng, length, self.band)[:, None]
        return Example(signal, np.arange(self.lag, length), signal[: length - self.lag])

    def baselines(self, example: Example) -> dict[str, np.ndarray]:
        return {'zero': np.mean(example.targets**2, axis=1)}


@dataclasses.dataclass(frozen=True)
class Recollection(Problem):
    """A signal as that of `Delay`, of which `points` values are predicted at its last token.

        u_1 u_2 ... u_n      label at n: values at equal distances, the first and the last among them

    Attributes:
      points: how many values.
      band: share of the frequencies that the signal has.

    Source: function reconstruction of Gu et al., "HiPPO: Recurrent Memory with Optimal Polynomial Projections", 2020,
    https://arxiv.org/abs/2008.07669.
    """

    points: int = 8
    band: float = 0.25

    @property
    def vocab(self) -> int:
        return self.points

    @property
    def features(self) -> int:
        return 1

    def check(self, length: int) -> None:
        require(self, 'points', self.points >= 1, 'a whole number of at least 1')
        require(self, 'band', 0 < self.band <= 1, 'a number above 0 and at most 1')
        require_length(self, length, length >= self.points, f'at least {self.points} tokens')

    def labels(self, length: int) -> int:
        return 1

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        signal = band_noise(rng, length, self.band)
        return Example(signal[:, None], np.array([length - 1]), signal[self.places(length)][None])

    def places(self, length: int) -> np.ndarray:
        """The tokens whose values are predicted."""
        return np.linspace(0, length - 1, self.points).round().astype(int)

    def baselines(self, example: Example) -> dict[str, np.ndarray]:
        return {'zero': np.mean(example.targets**2, axis=1)}


def band_noise(rng: np.random.Generator, length: int, band: float) -> Float[np.ndarray, ' t']:
    """Normal noise of variance one with no power above `band` of the highest frequency, float32.

    It is the first half of a period, so that its end does not tell of its beginning.
    """
    kept = _frequencies(length, band)
    waves = np.zeros(length + 1, complex)
    waves[kept] = rng.standard_normal((2, len(kept))).T @ np.array([1, 1j])
    return (np.fft.irfft(waves, 2 * length)[:length] * 2 * length / np.sqrt(4 * len(kept))).astype(np.float32)


def band_covariance(length: int, band: float) -> Float[np.ndarray, ' t']:
    """The covariance of such noise with itself so many tokens before."""
    kept = _frequencies(length, band)
    return np.cos(np.pi * np.arange(length)[:, None] * kept[None] / length).mean(axis=1)


def _frequencies(length: int, band: float) -> np.ndarray:
    """Those kept, of a period of twice the length; neither a constant nor the highest, which have no phase."""
    return np.arange(1, max(1, round(band * (length - 1))) + 1)
