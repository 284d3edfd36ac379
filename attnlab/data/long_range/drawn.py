"""Data sets whose examples are drawn: each is a pure function of the seed, the split and its index."""

import abc
import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnlab.data.edition import Editioned
from attnlab.data.long_range.dataset import Dataset, Example, Kind, digest_of, known_split
from attnlab.data.synthetic.problem import SPLITS
from attnlab.errors import UserError


class Distribution(Editioned, abc.ABC):
    """A distribution of labelled examples of one kind."""

    @property
    @abc.abstractmethod
    def kind(self) -> Kind:
        """The properties of the examples."""

    @abc.abstractmethod
    def draw(self, stream: np.random.SeedSequence) -> Example:
        """Draws an example from a random stream."""


def example(of: Distribution, seed: int, split: str, index: int) -> Example:
    """Example `index` of a split, drawn independently of all others."""
    return of.draw(np.random.SeedSequence(seed, spawn_key=(SPLITS[split], index)))


@dataclasses.dataclass(frozen=True)
class Drawn(Dataset):
    """Examples drawn on access, without preparation.

    Attributes:
      of: the distribution they are drawn from.
      seed: from 0 to 2^32 - 1.
      train: number of training examples.
      held_out: number of examples of each of the other two splits.
    """

    of: Distribution
    seed: int = 0
    train: int = 96_000
    held_out: int = 2_000

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise UserError(f'seed of Drawn is {self.seed}; it must be from 0 to 2^32 - 1')

    @property
    def kind(self) -> Kind:
        return self.of.kind

    @property
    def splits(self) -> Mapping[str, int]:
        return {split: self.train if split == 'train' else self.held_out for split in SPLITS}

    def rows(self, split: str) -> 'DrawnRows':
        known_split(self, split)
        return DrawnRows(self.of, self.seed, split, self.splits[split])

    def describe(self) -> dict[str, Any]:
        return {'source': 'drawn', 'of': self.of.name, 'seed': self.seed, 'content': self._content()}

    def _content(self) -> str:
        """SHA-256 over the edition and one example, since all of them may take hours.

        Not over the name, which is another when a distribution gains a field, though its examples stay.
        """
        first = digest_of(example(self.of, self.seed, 'train', 0))
        return hashlib.sha256(f'{type(self.of).__name__}\0{self.of.edition}\0'.encode() + first).hexdigest()


@dataclasses.dataclass(frozen=True)
class DrawnRows:
    """The examples of one split, by index."""

    of: Distribution
    seed: int
    split: str
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self.count:
            raise IndexError(f'example {index} of {self.count}')
        return example(self.of, self.seed, self.split, int(index))
