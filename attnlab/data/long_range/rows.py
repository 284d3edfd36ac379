"""Examples as rows of a fixed length, with documents and padding marked."""

import dataclasses

import numpy as np

from attnlab.data.long_range.dataset import Example, Kind
from attnlab.data.pipeline import Row, Source


@dataclasses.dataclass(frozen=True)
class Padded:
    """The examples of a source, truncated or padded to `length` positions.

    A row holds, for `t = length`:

    - `tokens`: int32 `t`, ids; or float32 `t channels`, standardised numbers, 0 in padding;
    - `segments`, `positions`: int32 `t`; the segment is 1, and 0 for padding;
    - `label`: int32, and `weights`: float32, 1: scalars.

    The documents of a pair have half of the row each, with segments 1 and 2, and positions from 0.

    Attributes:
      rows: the examples.
      kind: their properties.
      length: positions per row.
    """

    rows: Source
    kind: Kind
    length: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return padded(self.rows[index], self.kind, self.length)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A subset of a source's examples.

    Attributes:
      rows: all of them.
      indices: those chosen.
    """

    rows: Source
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Example:
        return self.rows[self.indices[index]]


def padded(example: Example, kind: Kind, length: int) -> Row:
    """The row of one example."""
    places = length // kind.documents
    names = ('x', 'second')[: kind.documents]
    parts = [_document(example[name], kind, places, number) for number, name in enumerate(names, start=1)]
    row = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return row | {'label': np.int32(example['label']), 'weights': np.float32(1)}


def blank(kind: Kind, length: int) -> Row:
    """A row of zeros."""
    row = padded({name: np.zeros(0, np.uint8) for name in ('x', 'second')} | {'label': np.int32(0)}, kind, length)
    return {name: np.zeros_like(value) for name, value in row.items()}


def _document(x: np.ndarray, kind: Kind, length: int, number: int) -> Row:
    x = x[:length]
    segments = np.zeros(length, np.int32)
    segments[: len(x)] = number
    tokens = np.zeros(length, np.int32) if kind.vocab else np.zeros((length, kind.channels), np.float32)
    if kind.vocab:
        tokens[: len(x)] = x.astype(np.int32) + kind.offset
    else:
        numbers = x.reshape(len(x), kind.channels).astype(np.float32)
        tokens[: len(x)] = (numbers - np.float32(kind.mean)) / np.float32(kind.deviation)
    # Padding is at no place of a document, so that none is beyond the longest that a model can be told.
    positions = np.where(segments, np.arange(length), 0).astype(np.int32)
    return {'tokens': tokens, 'segments': segments, 'positions': positions}
