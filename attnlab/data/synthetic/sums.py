"""The smallest sum that is not negative, of numbers whose signs may be chosen."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from attnlab.data.synthetic.problem import SPLITS, Example, Problem, require, require_length


@dataclasses.dataclass(frozen=True)
class SignedSums(Problem):
    """Of all sums of `terms` numbers with signs the smallest that is not negative is predicted after the last token.

        3 5 4 1 ?      label at ?: 1, which is 3 - 5 + 4 - 1

    After n numbers there are up to 2^n partial sums, which a chain of thought in tokens has to follow one by one.

    Inputs are few, so that the same numbers, in any order, are of one split, drawn from them: eight tenths are for
    training, and a tenth each for validation and testing.

    Attributes:
      terms: numbers.
      largest: of them; they are drawn uniformly from 1.

    Source: Gozeten et al., "Continuous Chain of Thought Enables Parallel Exploration and Reasoning", 2025,
    https://arxiv.org/abs/2505.23648, and `permutation_train_val_split` of https://github.com/alperengozeten/CoT2, which
    has the numbers from 1 to 9, eight tenths of them for training and the rest for validation.
    """

    edition: ClassVar[int] = 2

    terms: int = 4
    largest: int = 9

    @property
    def vocab(self) -> int:
        """Numbers, the token that asks, and sums from the least to the largest."""
        return self.largest + 1 + self.sums

    @property
    def sums(self) -> int:
        """How many sums there are from the least to the largest, those that cannot be reached included."""
        return 2 * self.terms * self.largest + 1

    def token(self, total: int) -> int:
        """The token of a sum."""
        return self.largest + 1 + total + self.terms * self.largest

    def check(self, length: int) -> None:
        require(self, 'terms', 2 <= self.terms <= 12, 'a whole number from 2 to 12')
        require(self, 'largest', self.largest >= 1, 'a whole number of at least 1')
        inputs = functools.partial(itertools.combinations_with_replacement, range(1, self.largest + 1), self.terms)
        every = all(any(split_of(numbers) == split for numbers in inputs()) for split in SPLITS)
        require(self, 'largest', every, f'larger: of {self.terms} numbers so small a split has none')
        require_length(self, length, length > self.terms, f'at least {self.terms + 1} tokens')

    def labels(self, length: int) -> int:
        return 1

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        return self.asked(self._numbers(rng))

    def draw(self, rng: np.random.Generator, length: int, split: str) -> Example:
        while split_of(numbers := self._numbers(rng)) != split:
            pass
        return self.asked(numbers)

    def asked(self, numbers: np.ndarray) -> Example:
        """The example of some numbers."""
        signs = np.array(list(itertools.product((1, -1), repeat=self.terms)))
        totals = signs @ numbers
        tokens = np.append(numbers - 1, self.largest)
        return Example(tokens, np.array([self.terms]), np.array([self.token(int(totals[totals >= 0].min()))]))

    def _numbers(self, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(1, self.largest + 1, self.terms)


def split_of(numbers: Sequence[int] | np.ndarray) -> str:
    """The split of some numbers, in whatever order."""
    place = np.random.default_rng(sorted(numbers)).random()
    return 'train' if place < 0.8 else 'valid' if place < 0.9 else 'test'
