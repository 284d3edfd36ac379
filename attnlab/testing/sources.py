"""Corpora for tests: tiny, made on the spot, and pure functions of their seed."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float64

from attnlab.data.text.corpus import Corpus, Document

SPLITS = ('train', 'valid')


@dataclasses.dataclass(frozen=True)
class Markov(Corpus):
    """Documents drawn from one random first-order chain of letters, whose entropy no model can beat on average.

    Document `i` of a split is a pure function of `(seed, split, i)`; the chain depends on `seed`.

    Attributes:
      seed: of everything that is drawn.
      letters: size of the alphabet, at most 26.
      count: documents a split.
      length: bytes a document.
      cache: as in `Corpus`; `None`: no caching.
    """

    seed: int = 0
    letters: int = 8
    count: int = 16
    length: int = 256
    cache: str | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        return SPLITS

    @functools.cached_property
    def transitions(self) -> Float64[np.ndarray, 'n n']:
        """Row `i`: the probabilities of the letters that may follow letter `i`."""
        weights = np.random.default_rng(self.seed).exponential(size=(self.letters, self.letters))
        return weights / weights.sum(axis=1, keepdims=True)

    @property
    def entropy(self) -> float:
        """Bits per byte of the chain in its stationary state: the lowest possible loss."""
        stationary = np.linalg.matrix_power(self.transitions, 1024)[0]
        rows = -(self.transitions * np.log2(self.transitions)).sum(axis=1)
        return float(stationary @ rows)

    def documents(self, split: str) -> Iterator[Document]:
        thresholds = self.transitions.cumsum(axis=1)
        for index in range(self.count):
            draws = np.random.default_rng((self.seed, SPLITS.index(split), index)).random(self.length)
            letters = [int(draws[0] * self.letters)]
            for draw in draws[1:]:
                letters.append(min(int(np.searchsorted(thresholds[letters[-1]], draw, side='right')), self.letters - 1))
            yield Document(f'{split}/{index}', bytes(ord('a') + letter for letter in letters))

    def describe(self) -> dict[str, Any]:
        sizes = {'letters': self.letters, 'count': self.count, 'length': self.length}
        return {'source': 'markov', 'seed': self.seed, **sizes}
