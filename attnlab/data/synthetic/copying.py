"""Copying: predict a sequence that occurred earlier."""

import dataclasses

import numpy as np

from attnlab.data.synthetic.problem import Example, Problem, fitting, require, require_length

NOISE = 0


@dataclasses.dataclass(frozen=True)
class SelectiveCopying(Problem):
    """Data tokens at random positions in noise, then as many markers; at marker `i` the `i`-th data token is predicted.

        0 c 0 0 a 0 b 0 M M M      labels at the markers: c a b

    Token 0 is noise, `vocab - 1` the marker, and those between are data. Selective, since positions vary: a
    time-invariant recurrence that solves plain copying cannot solve it.

    Attributes:
      vocab: number of tokens, noise and marker included.
      data: number of tokens to be copied.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
    https://arxiv.org/abs/2312.00752, after Jing et al., "Gated Orthogonal Recurrent Units", 2019.
    """

    vocab: int = 16
    data: int = 16

    def check(self, length: int) -> None:
        _check(self, length)

    def labels(self, length: int) -> int:
        return self.data

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        copied = rng.integers(1, self.vocab - 1, size=self.data)
        return _marked(self, length, np.sort(rng.choice(length - self.data, self.data, replace=False)), copied)

    def variants(self, length: int) -> dict[str, Problem]:
        counts = (max(1, self.data // 2), self.data, 2 * self.data, 4 * self.data)
        return fitting(length, {f'data={n}': dataclasses.replace(self, data=n) for n in dict.fromkeys(counts)})


@dataclasses.dataclass(frozen=True)
class DelayedCopying(Problem):
    """Data tokens first, then noise, then as many markers; at marker `i` the `i`-th data token is predicted.

        c a b 0 0 0 0 M M M      labels at the markers: c a b

    Tokens are those of `SelectiveCopying`; but every data token is as far from its marker as any other, so that a
    recurrence that treats all tokens alike can be a solution.

    Attributes:
      vocab: number of tokens, noise and marker included.
      data: number of tokens to be copied.

    Source: Arjovsky, Shah and Bengio, "Unitary Evolution Recurrent Neural Networks", 2016,
    https://arxiv.org/abs/1511.06464, section 5.1, after Hochreiter and Schmidhuber 1997; with a marker for every token.
    """

    vocab: int = 16
    data: int = 16

    def check(self, length: int) -> None:
        _check(self, length)

    def labels(self, length: int) -> int:
        return self.data

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        return _marked(self, length, np.arange(self.data), rng.integers(1, self.vocab - 1, size=self.data))


def _check(problem: SelectiveCopying | DelayedCopying, length: int) -> None:
    require(problem, 'vocab', problem.vocab >= 3, 'a whole number of at least 3')
    require(problem, 'data', problem.data >= 1, 'a whole number of at least 1')
    least = 2 * problem.data
    require_length(problem, length, length >= least, f'at least {least} tokens for data and markers')


def _marked(problem: SelectiveCopying | DelayedCopying, length: int, places: np.ndarray, copied: np.ndarray) -> Example:
    """What is copied at its places in noise, then the markers, whose labels it is."""
    before = length - problem.data
    tokens = np.full(length, NOISE)
    tokens[places], tokens[before:] = copied, problem.vocab - 1
    return Example(tokens, np.arange(before, length), copied)


@dataclasses.dataclass(frozen=True)
class Copying(Problem):
    """A random string between marks, then a copy, whose letters and end are each predicted from the letters before.

        $ c a b | c a b      labels from | on: c a b .

    Tokens are the letters from 0, then `$`, `|` and `.`. The string has from `shortest` letters to as many as fit
    twice; with `shortest=None` always that many. Since every prediction is conditioned on the correct letters, a
    string is fully correct exactly when greedy decoding would produce it.

    Attributes:
      letters: number of letters.
      shortest: the fewest letters of a string; `None` for as many as fit.

    Source: Jelassi et al., "Repeat After Me: Transformers are Better than State Space Models at Copying", 2024,
    https://arxiv.org/abs/2402.01032.
    """

    letters: int = 26
    shortest: int | None = 5

    @property
    def vocab(self) -> int:
        return self.letters + 3

    def check(self, length: int) -> None:
        require(self, 'letters', self.letters >= 1, 'a whole number of at least 1')
        require(self, 'shortest', self.shortest is None or self.shortest >= 1, 'a whole number of at least 1, or None')
        least = 2 * (self.shortest or 1) + 2
        require_length(self, length, length >= least, f'at least {least} tokens for two strings and two marks')

    def labels(self, length: int) -> int:
        return (length - 2) // 2 + 1

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        longest = (length - 2) // 2
        size = longest if self.shortest is None else int(rng.integers(self.shortest, longest, endpoint=True))
        text = rng.integers(self.letters, size=size)
        start, middle, end = (np.array([self.letters + i]) for i in range(3))
        tokens = np.concatenate([start, text, middle, text])
        return Example(tokens, np.arange(size + 1, 2 * size + 2), np.concatenate([text, end]))

    def stretched(self) -> Problem:
        return dataclasses.replace(self, shortest=None)
