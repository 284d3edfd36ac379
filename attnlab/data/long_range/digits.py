"""Handwritten digits as sequences of pixels, with no network: the images that come with scikit-learn."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnlab.data.long_range.dataset import Dataset, Example, Kind, digest_of, known_split
from attnlab.errors import UserError, optional

SIDE = 8
"""Pixels of a side, as they are."""

COUNTS = {'train': 1437, 'valid': 180, 'test': 180}


@dataclasses.dataclass(frozen=True)
class Digits(Dataset):
    """1,797 images of 8 x 8 pixels with grey levels from 0 to 16, row by row, in a fixed random order.

    The test part of Alpaydin and Kaynak 1998, as scikit-learn has it; needs the extra `offline`.

    Attributes:
      side: pixels of a side, a multiple of 8: every pixel is repeated so often in both directions.
    """

    side: int = SIDE

    def __post_init__(self) -> None:
        """Raises `UserError` for another side."""
        if self.side < SIDE or self.side % SIDE:
            raise UserError(f'side of Digits is {self.side}; it must be a multiple of {SIDE}')

    @property
    def kind(self) -> Kind:
        return Kind(classes=10, length=self.side**2, mean=4.884, deviation=6.017, highest=16.0)

    @property
    def splits(self) -> Mapping[str, int]:
        return COUNTS

    def rows(self, split: str) -> list[Example]:
        known_split(self, split)
        images, labels = _digits()
        first = sum(list(COUNTS.values())[: list(COUNTS).index(split)])
        order = np.random.default_rng(0).permutation(len(images))[first : first + COUNTS[split]]
        block = np.ones((self.side // SIDE, self.side // SIDE), np.uint8)
        return [{'x': np.kron(images[i], block).reshape(-1), 'label': np.int32(labels[i])} for i in order]

    def describe(self) -> dict[str, Any]:
        return {'source': 'digits of scikit-learn', 'side': self.side, 'content': _content(self)}


@functools.lru_cache(maxsize=2)
def _content(of: Digits) -> str:
    """SHA-256 over the examples of all splits."""
    examples = (digest_of(row) for split in of.splits for row in of.rows(split))
    return hashlib.sha256(b''.join(examples)).hexdigest()


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = optional('sklearn.datasets', 'Digits').load_digits(return_X_y=True)
    return images.astype(np.uint8).reshape(-1, SIDE, SIDE), labels
