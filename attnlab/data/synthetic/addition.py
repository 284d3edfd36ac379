"""Modular addition: the table of all sums, a fixed fraction of it for training and the rest for validation."""

import dataclasses
import functools

import numpy as np
from jaxtyping import Int

from attnlab.data.edition import Editioned
from attnlab.data.pipeline import Row
from attnlab.errors import UserError, nearest

SPLITS = ('train', 'test')
OPERANDS = 2


@dataclasses.dataclass(frozen=True)
class ModularAddition(Editioned):
    """Every sum `a + b` modulo `modulus`, in one of two splits: a fraction `share` of them is for training.

    Attributes:
      modulus: how many numbers there are.
      share: the fraction of the sums in `train`, rounded to a whole number of sums.
      seed: of the permutation that divides the splits.

    Source: Power et al., "Grokking", 2022, https://arxiv.org/abs/2201.02177; with 113 numbers and a share of 0.4,
    Prieto et al. 2025, https://arxiv.org/abs/2501.04697.

    Raises `UserError` for a modulus below 2, a split without sums, or a seed below 0.
    """

    modulus: int = 113
    share: float = 0.4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.modulus < 2:
            raise UserError(f'modulus of ModularAddition is {self.modulus}; it must be a whole number of at least 2')
        if not 0 < self.count('train') < self.modulus**2:
            raise UserError(f'share of ModularAddition is {self.share}; it leaves one of the splits without sums')
        if self.seed < 0:
            raise UserError(f'seed of ModularAddition is {self.seed}; it must be a whole number of at least 0')

    def count(self, split: str) -> int:
        """How many sums a split has. Raises `UserError` where there is no such split."""
        if split not in SPLITS:
            raise UserError(f'ModularAddition has no split {split!r}{nearest(split, SPLITS)}')
        train = round(self.share * self.modulus**2)
        return train if split == 'train' else self.modulus**2 - train

    def sums(self, split: str) -> 'Sums':
        """The sums of a split."""
        return Sums(self, split, self.count(split))


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sum `i` of a split: `tokens`, the operands, int32 `2`; `target`, int32; `weights`, float32, 1."""

    table: ModularAddition
    split: str
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.count:
            raise IndexError(f'sum {index} of {self.count}')
        order = _order(self.table.modulus, self.table.seed)
        place = order[index if self.split == 'train' else self.table.count('train') + index]
        operands = divmod(int(place), self.table.modulus)
        return {
            'tokens': np.array(operands, np.int32),
            'target': np.array(sum(operands) % self.table.modulus, np.int32),
            'weights': np.array(1, np.float32),
        }


@functools.lru_cache(maxsize=4)
def _order(modulus: int, seed: int) -> Int[np.ndarray, '_']:
    return np.random.default_rng(seed).permutation(modulus**2)
