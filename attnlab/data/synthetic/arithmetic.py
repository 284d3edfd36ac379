"""Parity and modular arithmetic, with one label at the end."""

import dataclasses

import numpy as np

from attnlab.data.synthetic.problem import Example, Problem, require, require_length

PLUS, MINUS, TIMES, EQUALS = 1, 2, 3, 4
NUMBERS = 5
"""The token of the number 0."""


@dataclasses.dataclass(frozen=True)
class Parity(Problem):
    """Whether the number of ones among the bits is odd, predicted at the last bit alone.

    Token 0 pads; 1 and 2 are the bits 0 and 1, in the label too. There are from `shortest` bits to as many as fit;
    with `shortest=None` always as many as fit. With a label after every bit the problem is the word problem of `Z2`.

    Attributes:
      shortest: the fewest bits; `None` for as many as fit.

    Source: the formal languages of Beck et al., "xLSTM: Extended Long Short-Term Memory", 2024,
    https://arxiv.org/abs/2405.04517, after Deletang et al., "Neural Networks and the Chomsky Hierarchy", 2022.
    """

    shortest: int | None = 3

    @property
    def vocab(self) -> int:
        return 3

    def check(self, length: int) -> None:
        require(self, 'shortest', self.shortest is None or self.shortest >= 1, 'a whole number of at least 1, or None')
        require_length(self, length, length >= (self.shortest or 1), f'at least {self.shortest or 1} tokens')

    def labels(self, length: int) -> int:
        return 1

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        size = length if self.shortest is None else int(rng.integers(self.shortest, length, endpoint=True))
        bits = rng.integers(2, size=size)
        return Example(1 + bits, np.array([size - 1]), np.array([1 + bits.sum() % 2]))

    def stretched(self) -> Problem:
        return dataclasses.replace(self, shortest=None)


@dataclasses.dataclass(frozen=True)
class ModularArithmetic(Problem):
    """An expression in numbers below `modulus` and the signs `+ - *`, whose value is predicted at the `=` after it.

        3 + 2 * 4 =      label, modulo 5: 1

    Products take precedence over sums. Token 0 pads, 1 to 3 are the signs, 4 is `=`, and `5 + n` the number `n`. There
    are from `shortest` numbers to as many as fit; with `shortest=None` always as many as fit.

    Attributes:
      modulus: how many numbers there are.
      shortest: the fewest numbers of an expression; `None` for as many as fit.

    Source: as for parity.
    """

    modulus: int = 5
    shortest: int | None = 2

    @property
    def vocab(self) -> int:
        return NUMBERS + self.modulus

    def check(self, length: int) -> None:
        require(self, 'modulus', self.modulus >= 2, 'a whole number of at least 2')
        require(self, 'shortest', self.shortest is None or self.shortest >= 1, 'a whole number of at least 1, or None')
        least = 2 * (self.shortest or 1)
        require_length(self, length, length >= least, f'at least {least} tokens')

    def labels(self, length: int) -> int:
        return 1

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        most = length // 2
        size = most if self.shortest is None else int(rng.integers(self.shortest, most, endpoint=True))
        numbers = rng.integers(self.modulus, size=size)
        signs = rng.integers(PLUS, EQUALS, size=size)
        signs[-1] = EQUALS
        tokens = np.stack([NUMBERS + numbers, signs], axis=1).reshape(-1)
        value = _value(numbers.tolist(), signs[:-1].tolist(), self.modulus)
        return Example(tokens, np.array([2 * size - 1]), np.array([NUMBERS + value]))

    def stretched(self) -> Problem:
        return dataclasses.replace(self, shortest=None)


def _value(numbers: list[int], signs: list[int], modulus: int) -> int:
    """The value of an expression: products are gathered term by term, and the terms summed."""
    terms = numbers[:1]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign == TIMES:
            terms[-1] = terms[-1] * number % modulus
        else:
            terms.append(number if sign == PLUS else -number)
    return sum(terms) % modulus
