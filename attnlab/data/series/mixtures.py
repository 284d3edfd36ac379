"""Drawn mixtures of sources that are to be separated, by index, and what separates them without training."""

import abc
import dataclasses
from typing import Any

import numpy as np
import scipy.signal
from jaxtyping import Float

from attnlab.data.edition import Editioned
from attnlab.data.pipeline import Row
from attnlab.data.synthetic.problem import SPLITS
from attnlab.errors import UserError, nearest
from attnlab.signature import checked_fields

ESTIMATES = 'estimates'
"""The entry of a row that holds what a baseline makes of the mixture."""

Signals = Float[np.ndarray, 'n t']


@checked_fields
@dataclasses.dataclass(frozen=True)
class Tones(Editioned):
    """Sources that are harmonic tones, whose loudness noise modulates.

        s_t = exp(depth z_t) sum_{h<=harmonics} a_h sin(2 pi h f t + p_h)

    `a_h` is drawn uniformly in 0.5 to 1, over h, and `p_h` uniformly; `z` is normal noise of variance one, averaged by
    a Hann window of `pace` samples. Fundamentals `f` are drawn uniformly by their logarithm, the ratio of any two at
    least `apart`. Powers are drawn uniformly in dB, up to `level` above and below one.

    Attributes:
      low, high: bounds of the fundamental, in cycles a sample.
      harmonics: how many there are of it, itself the first.
      apart: the least ratio of two fundamentals of a mixture.
      depth: of the modulation, in nepers.
      pace: samples of its window.
      level: of the powers, in dB.
    """

    low: float = 0.01
    high: float = 0.05
    harmonics: int = 5
    apart: float = 1.15
    depth: float = 0.5
    pace: int = 200
    level: float = 2.5

    def __post_init__(self) -> None:
        """Raises `UserError` for fundamentals out of order, harmonics beyond half a cycle, and what is below zero."""
        if not 0 < self.low < self.high or self.high * self.harmonics >= 0.5:
            raise UserError(
                f'low and high of Tones are {self.low} and {self.high} cycles a sample, with {self.harmonics} '
                'harmonics; low must be above 0 and below high, and the last harmonic of high below 0.5'
            )
        if self.apart < 1 or self.depth < 0 or self.level < 0:
            raise UserError(
                f'apart, depth and level of Tones are {self.apart}, {self.depth} and {self.level}; they must be at '
                'least 1, 0 and 0'
            )

    def draw(self, rng: np.random.Generator, sources: int, length: int) -> Signals:
        """Draws the sources of a mixture. Raises `UserError` where there is no room for fundamentals so far apart."""
        gap = np.log(self.apart)
        free = np.log(self.high / self.low) - (sources - 1) * gap
        if free < 0:
            raise UserError(
                f'{sources} fundamentals from {self.low} to {self.high} cannot be {self.apart} times apart; choose '
                'fewer sources, or apart closer to 1'
            )
        logs = np.log(self.low) + np.sort(rng.uniform(0, free, sources)) + gap * np.arange(sources)
        return np.stack([self._tone(rng, np.exp(one), length) for one in rng.permutation(logs)])

    def _tone(self, rng: np.random.Generator, fundamental: float, length: int) -> Float[np.ndarray, 't']:
        order = np.arange(1, self.harmonics + 1)
        sizes = rng.uniform(0.5, 1.0, self.harmonics) / order
        phases = rng.uniform(0, 2 * np.pi, self.harmonics)
        waves = np.sin(2 * np.pi * fundamental * np.outer(np.arange(length), order) + phases) @ sizes
        window = np.hanning(self.pace + 2)[1:-1]
        noise = np.convolve(rng.standard_normal(length + self.pace - 1), window, 'valid')
        tone = waves * np.exp(self.depth * noise / np.linalg.norm(window))
        tone = tone - tone.mean()
        return tone / tone.std() * 10 ** (rng.uniform(-self.level, self.level) / 20)


@checked_fields
@dataclasses.dataclass(frozen=True)
class DrawnMixtures:
    """Mixtures of drawn sources: each is a pure function of the law, the seed, the split, its index and its length.

    Attributes:
      of: the law of the sources.
      sources: of a mixture.
      seed: from 0 to 2^32 - 1.
      train: number of training mixtures.
      held_out: number of mixtures of each of the other two splits.
    """

    of: Tones = Tones()
    sources: int = 2
    seed: int = 0
    train: int = 20_000
    held_out: int = 500

    def __post_init__(self) -> None:
        """Raises `UserError` for one source, and for more than six, whose orders would all have to be tried."""
        if not 2 <= self.sources <= 6:
            raise UserError(f'sources of DrawnMixtures is {self.sources}; it must be from 2 to 6')

    def rows(self, split: str, length: int, count: int | None = None) -> 'Mixtures':
        """The mixtures of a split; with `count`, the first of them. Raises `UserError` for an unknown split,
        and mixtures of one step.
        """
        if split not in SPLITS:
            raise UserError(f'DrawnMixtures has no split {split!r}{nearest(split, SPLITS)}')
        if length < 2:
            raise UserError(f'a mixture of {length} steps has no size to be scaled by; choose two or more')
        every = self.train if split == 'train' else self.held_out
        return Mixtures(self, split, length, every if count is None else min(every, count))

    def describe(self) -> dict[str, Any]:
        """A record of the source for run.json."""
        described = {'source': 'drawn', 'of': self.of.name, 'sources': self.sources, 'seed': self.seed}
        return described | {'content': self.of.content}


@dataclasses.dataclass(frozen=True)
class Mixtures:
    """The mixtures of one split. A row holds:

    - `tokens`: float32 `t 1`, the sum of the sources, its standard deviation one;
    - `sources`: float32 `n t`, in the same unit;
    - `weights`: float32, 1.
    """

    of: DrawnMixtures
    split: str
    length: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.count:
            raise IndexError(f'mixture {index} of {self.count}')
        stream = np.random.SeedSequence(self.of.seed, spawn_key=(SPLITS[self.split], int(index)))
        sources = self.of.of.draw(np.random.default_rng(stream), self.of.sources, self.length)
        mixture = sources.sum(axis=0)
        unit = mixture.std()
        return {
            'tokens': (mixture / unit).astype(np.float32)[:, None],
            'sources': (sources / unit).astype(np.float32),
            'weights': np.float32(1),
        }


class Baseline(abc.ABC):
    """Estimates of sources without training."""

    @abc.abstractmethod
    def separate(self, mixture: Float[np.ndarray, 't'], sources: Signals) -> Signals:
        """The estimates; oracles read the sources."""


@dataclasses.dataclass(frozen=True)
class Mixture(Baseline):
    """The mixture itself for every source: an improvement of 0 dB."""

    def separate(self, mixture: Float[np.ndarray, 't'], sources: Signals) -> Signals:
        return np.tile(mixture, (len(sources), 1))


@checked_fields
@dataclasses.dataclass(frozen=True)
class IdealMask(Baseline):
    """The ideal ratio mask, an oracle: every coefficient of the mixture times `|S_n| / sum_m |S_m|` of its own sources.

    Coefficients are those of a short-time Fourier transform with a Hann window of `window` samples, half of it apart.
    It knows the sources' sizes and takes the phase of the mixture: what masks of that transform reach at about best.

    Attributes:
      window: its samples; of shorter mixtures their length.
    """

    window: int = 256

    def separate(self, mixture: Float[np.ndarray, 't'], sources: Signals) -> Signals:
        size = min(self.window, len(mixture))
        every = scipy.signal.stft(np.concatenate([mixture[None], sources]), nperseg=size)[2]
        sizes = np.abs(every[1:])
        masks = sizes / np.maximum(sizes.sum(axis=0), 1e-12)
        return scipy.signal.istft(masks * every[:1], nperseg=size)[1][:, : len(mixture)].astype(np.float32)


BASELINES = {'mixture': Mixture(), 'ideal_mask': IdealMask()}
"""By name."""


@dataclasses.dataclass(frozen=True)
class Separated:
    """Mixtures with the estimates of a baseline, `estimates`, float32 `n t`."""

    rows: Mixtures
    baseline: Baseline

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row = self.rows[index]
        return row | {ESTIMATES: self.baseline.separate(row['tokens'][:, 0], row['sources'])}
