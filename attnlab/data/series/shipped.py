"""Recorded series that come along with matplotlib: nothing is downloaded."""

import dataclasses
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from attnlab.data.series.files import check_once, digest
from attnlab.data.series.series import Counts, Series, Shares, Values, check_values
from attnlab.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Shipped:
    """One recording.

    Attributes:
      file: its name among the sample data of matplotlib, numbers without a header.
      content: SHA-256 of the file.
      type: of its numbers, as numpy writes it.
      names: of the columns.
      unit: what numbers are multiplied by.
    """

    file: str
    content: str
    type: str
    names: tuple[str, ...]
    unit: float


SHIPPED: Mapping[str, Shipped] = MappingProxyType(
    {
        # The potential across the membrane of a nerve cell in millivolts, 6 seconds at 2 kHz.
        'membrane': Shipped(
            'membrane.dat',
            'ab795b429201a5bb575c6370d5e17090dfcfc317431aa9382f8e881366f43357',
            '<f4',
            ('potential',),
            100.0,
        ),
        # Four electrodes on a head, 10 seconds at 80 Hz, as it seems without their means and of deviation one.
        'eeg': Shipped(
            'eeg.dat',
            '28656316df0004acfba7a5d98ab35f7314933a918636ec80f09604ad128b4417',
            '<f8',
            ('PG3', 'PG5', 'PG7', 'PG9'),
            1.0,
        ),
    }
)
"""The recordings by name. Units and rates are those of matplotlib's examples, which draw these files."""


@dataclasses.dataclass(frozen=True)
class ShippedSeries(Series):
    """A recording that comes along with matplotlib.

    Attributes:
      name: one of `SHIPPED`.
      columns: names of the columns that are read, in this order; empty: all.
      season: steps of its period; 1 for none.
      split: how rows are divided.
    """

    name: str
    columns: tuple[str, ...] = ()
    season: int = 1
    split: Shares | Counts = Shares()

    def __post_init__(self) -> None:
        """Raises `UserError` for a name that is none, and for a column that it does not have."""
        if self.name not in SHIPPED:
            raise UserError(f'there is no recorded series {self.name!r}{nearest(self.name, SHIPPED)}')
        every = SHIPPED[self.name].names
        for column in self.columns:
            if column not in every:
                raise UserError(f'{self.name} has no column {column!r}{nearest(column, every)}')
        if self.columns:
            check_once(self.name, self.columns, every)

    @property
    def variates(self) -> int:
        return len(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the electrodes, or of what was measured."""
        return self.columns or SHIPPED[self.name].names

    def values(self) -> Values:
        shipped, path = SHIPPED[self.name], self.path()
        rows = np.fromfile(path, shipped.type).astype(np.float64).reshape(-1, len(shipped.names))
        return check_values(str(path), shipped.unit * rows[:, [shipped.names.index(name) for name in self.names]])

    def path(self) -> pathlib.Path:
        """The file. Raises `UserError` where matplotlib came without it, or with another one."""
        import matplotlib

        shipped = SHIPPED[self.name]
        path = pathlib.Path(matplotlib.get_data_path(), 'sample_data', shipped.file)
        if not path.is_file():
            raise UserError(f'{self.name} comes with matplotlib, and {path} is not there: install matplotlib from PyPI')
        if digest(path) != shipped.content:
            raise UserError(
                f'{path} of matplotlib {matplotlib.__version__} is not the recording that {self.name} was: choose '
                'another series'
            )
        return path

    def describe(self) -> dict[str, Any]:
        return {'source': 'matplotlib', 'name': self.name, 'columns': self.columns, 'content': digest(self.path())}
