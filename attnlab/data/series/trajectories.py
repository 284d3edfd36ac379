"""Stretches of a series, each row with the one after it."""

import dataclasses

import numpy as np

from attnlab.data.pipeline import Row, place_of
from attnlab.data.series.series import Values
from attnlab.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectories:
    """All stretches of `length` rows of a split, one row apart, or some of them. One holds:

    - `tokens`: float32 `t v`, the rows;
    - `targets`: float32 `t v`, the row after each;
    - `weights`: float32, 1.

    Attributes:
      rows: of the split.
      length: rows read.
      count: so many stretches, at equal distances; `None`: all.
    """

    rows: Values
    length: int
    count: int | None = None

    def __post_init__(self) -> None:
        """Raises `UserError` for a length below 1, and where no stretch fits."""
        if not 1 <= self.length < len(self.rows):
            raise UserError(
                f'config.length is {self.length}; it must be at least 1, and below the {len(self.rows)} rows of the '
                'split'
            )

    def __len__(self) -> int:
        return self._every if self.count is None else min(self._every, self.count)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f'stretch {index} of {len(self)}')
        first = place_of(index, self._every, len(self))
        stretch = self.rows[first : first + self.length + 1].astype(np.float32)
        return {'tokens': stretch[:-1], 'targets': stretch[1:], 'weights': np.float32(1)}

    @property
    def _every(self) -> int:
        return len(self.rows) - self.length
