"""Synthetic problems, and their examples by index."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from attnlab.data.edition import Editioned
from attnlab.data.pipeline import Row
from attnlab.errors import UserError, nearest

SPLITS: Mapping[str, int] = {'train': 0, 'valid': 1, 'test': 2}
"""The splits, with the number that makes their random streams distinct."""

ENDLESS = 2**31 - 1
"""Examples of a training stream that is endless for practical purposes."""

BASELINE = 'baseline/'
"""Prefix of the row entries that hold errors of known predictors."""


class Example(NamedTuple):
    """One example, unpadded.

    Attributes:
      tokens: int `t`, or float `t m` where a problem has real-valued inputs.
      at: the positions in `tokens` after which something is predicted, int, `n`.
      targets: what is predicted there: int `n`, or float `n o`.
    """

    tokens: np.ndarray
    at: np.ndarray
    targets: np.ndarray


class Problem(Editioned, abc.ABC):
    """A distribution of sequences of tokens, or of numbers, with what is predicted in them."""

    @property
    @abc.abstractmethod
    def vocab(self) -> int:
        """Number of tokens, or of the outputs of a problem with real-valued inputs."""

    @property
    def features(self) -> int | None:
        """Numbers per input token; `None` where tokens are integers."""
        return None

    @abc.abstractmethod
    def check(self, length: int) -> None:
        """Raises `UserError`, naming the field, for invalid fields, or if no example has at most `length` tokens."""

    @abc.abstractmethod
    def labels(self, length: int) -> int:
        """The most labels that an example of at most `length` tokens has."""

    @abc.abstractmethod
    def generate(self, rng: np.random.Generator, length: int) -> Example:
        """Draws an example of at most `length` tokens."""

    def draw(self, rng: np.random.Generator, length: int, split: str) -> Example:
        """Draws an example of a split; of most problems any may be in any, since two are hardly ever the same."""
        del split
        return self.generate(rng, length)

    def variants(self, length: int) -> dict[str, 'Problem']:
        """The same problem at other difficulties, by name, those that fit `length` tokens."""
        del length
        return {}

    def stretched(self) -> 'Problem':
        """The problem for evaluation beyond the training length: its examples fill the length."""
        return self

    def baselines(self, example: Example) -> dict[str, np.ndarray]:
        """The error at each label, `n`, of predictors that need no training, by name."""
        del example
        return {}


@dataclasses.dataclass(frozen=True)
class Examples:
    """Example `i` of a split: a pure function of the problem, the length, the seed, the split and `i`.

    A row holds, for `t = length` and `n = problem.labels(length)`, an example padded at its end:

    - `tokens`: int32 `t`, or float32 `t m`;
    - `segments`, `positions`: int32 `t`; the segment is 1, and 0 for padding;
    - `at`: int32 `n`, the position of each label: the prediction is made at that token, not shifted;
    - `targets`: int32 `n`, or float32 `n o`, what is predicted there;
    - `weights`: float32 `n`, 1 for a label and 0 for padding;
    - `baseline/NAME`: float32 `n`, with `baselines`: the errors of predictors that need no training.

    Each example has its own random stream, determined by seed, split and index, so that examples of different splits
    never share a stream.

    Attributes:
      problem: the distribution of examples.
      length: tokens a row.
      seed: from 0 to 2^32 - 1.
      split: 'train', 'valid' or 'test'.
      count: the number of examples.
      baselines: whether rows hold the baselines.

    Raises:
      UserError: for an unknown split, a seed out of range, and where the problem has no examples of this length.
    """

    problem: Problem
    length: int
    seed: int = 0
    split: str = 'train'
    count: int = ENDLESS
    baselines: bool = False

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise UserError(f'{type(self.problem).__name__} has no split {self.split!r}{nearest(self.split, SPLITS)}')
        if not 0 <= self.seed < 2**32:
            raise UserError(f'seed of the examples is {self.seed}; it must be from 0 to 2^32 - 1')
        self.problem.check(self.length)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.count:
            raise IndexError(f'example {index} of {self.count}')
        stream = np.random.SeedSequence(self.seed, spawn_key=(SPLITS[self.split], int(index)))
        example = self.problem.draw(np.random.default_rng(stream), self.length, self.split)
        used, labels = len(example.tokens), len(example.at)
        blank, unlabelled = self.length - used, self.problem.labels(self.length) - labels
        row = {
            'tokens': _padded(example.tokens, blank, np.int32 if self.problem.features is None else np.float32),
            'segments': _padded(np.ones(used), blank, np.int32),
            'positions': _padded(np.arange(used), blank, np.int32),
            'at': _padded(example.at, unlabelled, np.int32),
            'targets': _padded(example.targets, unlabelled, np.int32 if example.targets.ndim == 1 else np.float32),
            'weights': _padded(np.ones(labels), unlabelled, np.float32),
        }
        if self.baselines:
            for name, errors in self.problem.baselines(example).items():
                row[f'{BASELINE}{name}'] = _padded(errors, unlabelled, np.float32)
        return row


def require(problem: Problem, field: str, right: bool, wanted: str) -> None:
    """Raises `UserError` unless `right`, naming a field of the problem, its value, and the requirement."""
    if not right:
        raise UserError(f'{field} of {type(problem).__name__} is {getattr(problem, field)!r}; it must be {wanted}')


def require_length(problem: Problem, length: int, right: bool, wanted: str) -> None:
    """Raises `UserError` unless `right`, naming the length and the problem's requirement."""
    if not right:
        raise UserError(f'length is {length}; {type(problem).__name__} needs {wanted}')


def fitting(length: int, variants: Mapping[str, Problem]) -> dict[str, Problem]:
    """The variants that fit `length` tokens."""
    return {name: variant for name, variant in variants.items() if _fits(variant, length)}


def _fits(problem: Problem, length: int) -> bool:
    try:
        problem.check(length)
    except UserError:
        return False
    return True


def _padded(values: np.ndarray, missing: int, dtype: Any) -> np.ndarray:
    padded = np.zeros((len(values) + missing, *values.shape[1:]), dtype)
    padded[: len(values)] = values
    return padded
