"""Images of a data set at another size."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnlab.data.long_range.dataset import Dataset, Example, Kind
from attnlab.data.pipeline import Source
from attnlab.errors import UserError
from attnlab.functional.grids import resampled


@dataclasses.dataclass(frozen=True)
class Resized(Dataset):
    """The same square images in `size` x `size` pixels, interpolated linearly; smaller ones are means of pixels.

    Numbers are float32, standardised as those of the data set are. See `attnlab.functional.grids.resampling`.

    Raises `UserError` for a data set of other things, and less than one pixel.

    Attributes:
      of: images with one label each.
      size: height and width in pixels.
    """

    of: Dataset
    size: int

    def __post_init__(self) -> None:
        kind, side = self.of.kind, math.isqrt(self.of.kind.length)
        if side**2 != kind.length or kind.vocab is not None or kind.documents != 1:
            raise UserError(f'{type(self.of).__name__} holds no square images of real numbers; they cannot be resized')
        if self.size < 1:
            raise UserError(f'size of Resized is {self.size}; it must be at least 1')

    @property
    def kind(self) -> Kind:
        return dataclasses.replace(self.of.kind, length=self.size**2)

    @property
    def splits(self) -> Mapping[str, int | None]:
        return self.of.splits

    def rows(self, split: str) -> 'ResizedRows':
        return ResizedRows(self.of.rows(split), math.isqrt(self.of.kind.length), self.size)

    def describe(self) -> dict[str, Any]:
        return self.of.describe() | {'resized': self.size}

    def same_rows(self, split: str, other: str) -> bool:
        return self.of.same_rows(split, other)


@dataclasses.dataclass(frozen=True)
class ResizedRows:
    """The examples of a split, resized as they are read.

    Attributes:
      rows: the examples.
      side: height and width of their images in pixels.
      size: those of the resized ones.
    """

    rows: Source
    side: int
    size: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        example = self.rows[index]
        pixels = example['x'].reshape(self.side**2, -1).astype(np.float32)
        found = resampled(pixels, (self.side, self.side), (self.size, self.size))
        # What is told of each pixel is of the image as it was.
        kept = {name: value for name, value in example.items() if name != 'targets'}
        return kept | {'x': found.reshape(-1, *example['x'].shape[1:])}
