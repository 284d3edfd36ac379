"""Very many classes, few of them frequent: points near a prototype of each."""

import dataclasses
import functools
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int

from attnlab.data.edition import Editioned
from attnlab.data.pipeline import Row
from attnlab.data.synthetic.problem import SPLITS
from attnlab.errors import UserError, nearest

AT_ONCE = 128
"""Points whose probabilities of all classes are held at once."""


@dataclasses.dataclass(frozen=True)
class ZipfPrototypes(Editioned):
    """`x = m_c + noise e` for a class c drawn with probability proportional to `(c + 1)^-exponent`.

    Prototypes m and noise e are standard normal in `dim` dimensions; classes are numbered by frequency, the most
    frequent first. What is best to say of x is known: `p(c | x)` is the softmax of
    `x . m_c / noise^2 - |m_c|^2 / (2 noise^2) - exponent log(c + 1)`, a linear head with a bias.

    Attributes:
      classes: their number.
      dim: see above.
      exponent: see above; 1 is Zipf's law.
      noise: see above.
      seed: of prototypes and examples.

    Raises `UserError` for fewer than two classes or no dimension, for an exponent or a seed below 0, and for a noise
    that is not positive.
    """

    edition: ClassVar[int] = 2

    classes: int = 50_000
    dim: int = 16
    exponent: float = 1.0
    noise: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (('classes', 2), ('dim', 1), ('exponent', 0), ('seed', 0)):
            if getattr(self, name) < least:
                raise UserError(f'{name} of ZipfPrototypes is {getattr(self, name)}; it must be at least {least}')
        if self.noise <= 0:
            raise UserError(f'noise of ZipfPrototypes is {self.noise}; it must be positive')

    def frequencies(self) -> Float[np.ndarray, ' o']:
        """The probability of every class."""
        return _frequencies(self)[0]

    def prototypes(self) -> Float[np.ndarray, 'o d']:
        """The prototype of every class, float32."""
        return _prototypes(self)

    def rows(self, split: str, count: int) -> 'ZipfRows':
        """Examples of a split. Raises `UserError` where there is no such split."""
        if split not in SPLITS:
            raise UserError(f'ZipfPrototypes has no split {split!r}{nearest(split, SPLITS)}')
        return ZipfRows(self, split, count)

    def posterior(self, x: Float[np.ndarray, 'n d'], labels: Int[np.ndarray, ' n']) -> tuple[np.ndarray, np.ndarray]:
        """Of every point `-log p(label | x)` in nats, and whether the label is the likeliest: the best there is."""
        means, logarithms = self.prototypes(), np.log(self.frequencies()).astype(np.float32)
        bias = logarithms - np.sum(np.square(means), axis=1) / (2 * self.noise**2)
        losses, right = [], []
        for first in range(0, len(x), AT_ONCE):
            scores = x[first : first + AT_ONCE] @ means.T / np.float32(self.noise**2) + bias
            own = np.take_along_axis(scores, labels[first : first + AT_ONCE, None], axis=1)[:, 0]
            most = scores.max(axis=1)
            losses.append(most + np.log(np.sum(np.exp(scores - most[:, None]), axis=1)) - own)
            right.append(own >= most)
        return np.concatenate(losses), np.concatenate(right)


@dataclasses.dataclass(frozen=True)
class ZipfRows:
    """Example `i`: `tokens`, float32 `1 d`; `label`, int32, and `weights`, float32, 1: scalars."""

    of: ZipfPrototypes
    split: str
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.count:
            raise IndexError(f'example {index} of {self.count}')
        rng = np.random.default_rng((self.of.seed, SPLITS[self.split], int(index)))
        label = min(int(np.searchsorted(_frequencies(self.of)[1], rng.uniform())), self.of.classes - 1)
        x = self.of.prototypes()[label] + self.of.noise * rng.standard_normal(self.of.dim)
        return {'tokens': x.astype(np.float32)[None], 'label': np.int32(label), 'weights': np.float32(1)}


@functools.lru_cache(maxsize=4)
def _frequencies(of: ZipfPrototypes) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities, and their sums up to each class."""
    weights = (np.arange(of.classes) + 1.0) ** -of.exponent
    chances = weights / weights.sum()
    return chances, np.cumsum(chances)


@functools.lru_cache(maxsize=4)
def _prototypes(of: ZipfPrototypes) -> np.ndarray:
    # A fourth number tells them from examples: fewer than three are filled up with zeros, those of training example 0.
    return np.random.default_rng((of.seed, 0, 0, 1)).standard_normal((of.classes, of.dim)).astype(np.float32)
