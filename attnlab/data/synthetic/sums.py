"""The smallest sum that is not negative, of numbers whose signs may be chosen."""

import dataclasses
import itertools

import numpy as np

from attnlab.data.synthetic.problem import Example, Problem, require, require_length


@dataclasses.dataclass(frozen=True)
class SignedSums(Problem):
    """Of all sums of `terms` numbers with signs the smallest that is not negative is predicted after the last token.

        3 5 4 1 ?      label at ?: 1, which is 3 - 5 + 4 - 1

    After n numbers there are up to 2^n partial sums, which a chain of thought in tokens has to follow one by one.

    Attributes:
      terms: numbers.
      largest: of them; they are drawn uniformly from 1.

    Source: Gozeten et al., "Continuous Chain of Thought Enables Parallel Exploration and Reasoning", 2025,
    https://arxiv.org/abs/2505.23648.
    """

    terms: int = 4
    largest: int = 10

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
        require_length(self, length, length > self.terms, f'at least {self.terms + 1} tokens')

    def labels(self, length: int) -> int:
        return 1

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        return self.asked(rng.integers(1, self.largest + 1, self.terms))

    def asked(self, numbers: np.ndarray) -> Example:
        """The example of some numbers."""
        signs = np.array(list(itertools.product((1, -1), repeat=self.terms)))
        totals = signs @ numbers
        tokens = np.append(numbers - 1, self.largest)
        return Example(tokens, np.array([self.terms]), np.array([self.token(int(totals[totals >= 0].min()))]))
