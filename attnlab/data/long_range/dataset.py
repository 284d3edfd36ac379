"""What a data set of long sequences with one label each is to those who use it."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

from attnlab.data.pipeline import Source
from attnlab.errors import UserError, nearest

Example = dict[str, Any]
"""`x` (and `second`, of a pair of documents), an array of one number a place, unpadded; `label`, int32, a scalar; and
scalars that say how hard it is, such as `depth`."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the examples of a data set are like.

    Attributes:
      classes: how many labels there are.
      length: places of the longest example, as published.
      vocab: how many token ids there are, 0 for padding among them; `None` where places hold real numbers.
      offset: what is added to the numbers of an example to make token ids of them.
      mean: of the numbers of an example where they are real.
      deviation: standard deviation of these; the model sees `(x - mean) / deviation`.
      documents: 2 where an example is a pair of documents.
      difficulties: by which scalars examples fall into slices, and where these begin, ascending; an example always has
        the scalar `length`, how many places it takes.
    """

    classes: int
    length: int
    vocab: int | None = None
    offset: int = 0
    mean: float = 0.0
    deviation: float = 1.0
    documents: int = 1
    difficulties: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


class Dataset(abc.ABC):
    """A data set as a config names it: a frozen dataclass that touches nothing until it is asked for rows."""

    @property
    @abc.abstractmethod
    def kind(self) -> Kind:
        """What the examples are like."""

    @property
    @abc.abstractmethod
    def splits(self) -> Mapping[str, int | None]:
        """How many examples each split has, where that is known without loading; `train` and `test` are among them."""

    @abc.abstractmethod
    def rows(self, split: str) -> Source:
        """The examples of a split. Raises `UserError` for an unknown one, and for data that are not there."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a run records of the source: where it is from and how it was split, ready for JSON."""


def known_split(source: Dataset, split: str) -> None:
    """Raises `UserError` where a source has no such split."""
    if split not in source.splits:
        raise UserError(f'{type(source).__name__} has no split {split!r}{nearest(split, source.splits)}')
