"""A data set whose training has many examples of its first classes, and few of its last."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnlab.data.long_range.dataset import Dataset, Kind
from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.rows import Chosen
from attnlab.data.pipeline import Source
from attnlab.errors import UserError


@dataclasses.dataclass(frozen=True)
class LongTailed(Dataset):
    """Of `n_k` training examples of class k of K, `n_k ratio^(-k / (K - 1))` are kept, rounded, and at least one.

    The other splits are as they are. All labels are read for it, once. Cui et al. 2019,
    https://arxiv.org/abs/1901.05555.

    Attributes:
      data: the data set.
      ratio: how many times more examples the first class keeps than the last.
      seed: of the choice.

    Raises `UserError` for a ratio below 1.
    """

    data: Dataset = Digits()
    ratio: float = 50.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.ratio < 1:
            raise UserError(f'ratio of LongTailed is {self.ratio}; it must be at least 1')

    @property
    def kind(self) -> Kind:
        return self.data.kind

    @property
    def splits(self) -> Mapping[str, int | None]:
        return {**self.data.splits, 'train': None}

    def rows(self, split: str) -> Source:
        rows = self.data.rows(split)
        return rows if split != 'train' else Chosen(rows, _kept(self))

    def describe(self) -> dict[str, Any]:
        return {**self.data.describe(), 'ratio': self.ratio, 'chosen': self.seed}

    def same_rows(self, split: str, other: str) -> bool:
        return self.data.same_rows(split, other)


@functools.lru_cache(maxsize=4)
def _kept(of: LongTailed) -> tuple[int, ...]:
    rows, classes = of.data.rows('train'), of.data.kind.classes
    labels = np.array([rows[index]['label'] for index in range(len(rows))])
    rng = np.random.default_rng(of.seed)
    found: list[int] = []
    for label in range(classes):
        there = rng.permutation(np.flatnonzero(labels == label))
        count = max(1, round(len(there) * of.ratio ** (-label / max(1, classes - 1))))
        found += there[:count].tolist()
    return tuple(sorted(found))
