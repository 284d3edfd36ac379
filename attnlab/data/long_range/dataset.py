"""The interface of data sets of long sequences with one label each."""

import abc
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from attnlab.data.pipeline import Source
from attnlab.errors import UserError, nearest

Example = dict[str, Any]
"""`x` (and `second`, of a pair of documents), unpadded arrays of one number per position; `label`, int32, a scalar; and
scalars that measure difficulty, such as `depth`."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """The properties of a data set's examples.

    Attributes:
      classes: number of labels.
      length: positions of the longest example, as published.
      vocab: number of token ids, including 0 for padding; `None` where positions hold real numbers.
      offset: added to the numbers of an example to make them token ids.
      channels: numbers a position where they are real; an example then has them on a last axis, unless it is one.
      mean: of the numbers of an example where they are real.
      deviation: standard deviation of these; the model sees `(x - mean) / deviation`.
      highest: of these where they are levels of pixels, from 0; `None`: they have no such range, or it is not known.
      documents: 2 where an example is a pair of documents.
      dense: whether examples have `targets`, a class a position, and a label that says nothing.
      difficulties: the scalars by which examples are sliced, with the ascending lower bounds of slices; an example
        always
        has the scalar `length`, its number of positions.
    """

    classes: int
    length: int
    vocab: int | None = None
    offset: int = 0
    channels: int = 1
    mean: float = 0.0
    deviation: float = 1.0
    highest: float | None = None
    documents: int = 1
    dense: bool = False
    difficulties: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


class Dataset(abc.ABC):
    """A data set in a config: a frozen dataclass that reads nothing until `rows` is called."""

    @property
    @abc.abstractmethod
    def kind(self) -> Kind:
        """The properties of the examples."""

    @property
    @abc.abstractmethod
    def splits(self) -> Mapping[str, int | None]:
        """The number of examples of each split, if known without loading; includes `train` and `test`."""

    @abc.abstractmethod
    def rows(self, split: str) -> Source:
        """The examples of a split. Raises `UserError` for an unknown split, and for missing data."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """A record of the source and its splits for run.json."""

    def same_rows(self, split: str, other: str) -> bool:
        """Whether two splits are the same examples, as where there are none for validation."""
        return split == other


def known_split(source: Dataset, *splits: str) -> None:
    """Raises `UserError` for an unknown split."""
    for split in splits:
        if split not in source.splits:
            raise UserError(f'{type(source).__name__} has no split {split!r}{nearest(split, source.splits)}')


VALID = ('valid', 'val', 'validation')
"""What others call the split for validation."""


def named_splits(names: Iterable[str], place: str) -> dict[str, str]:
    """The name of each split among names.

    Raises `UserError`, naming `place`, for a name of no split, and for two names of one split.
    """
    found: dict[str, str] = {}
    for name in sorted(names):
        split = 'valid' if name in VALID else name
        if split not in ('train', 'valid', 'test') or split in found:
            raise UserError(f'{place} are {sorted(names)}; they must be train, test and one of {", ".join(VALID)}')
        found[split] = name
    return found


PARTS = {'train': 0.8, 'valid': 0.1, 'test': 0.1}
"""The splits of data that come without any, and their shares."""


def divided(count: int) -> dict[str, Int[np.ndarray, 'n']]:
    """The indices of each split of data without splits, in a random order drawn from the number of examples alone."""
    order = np.random.default_rng(count).permutation(count)
    valid, test = (round(count * PARTS[split]) for split in ('valid', 'test'))
    return {'valid': order[:valid], 'test': order[valid : valid + test], 'train': order[valid + test :]}


def digest_of(example: Mapping[str, Any]) -> bytes:
    """SHA-256 over names, types and contents of an example, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(example):
        value = np.asarray(example[name])
        digest.update(f'{name}\0{value.dtype.newbyteorder("<")}\0'.encode())
        digest.update(value.astype(value.dtype.newbyteorder('<'), copy=False).tobytes())
    return digest.digest()
