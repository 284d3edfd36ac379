"""What the columns of a series are for: to be forecast, or to be read besides."""

import dataclasses

from attnlab.data.series.dates import MARKS
from attnlab.data.series.files import check_once
from attnlab.data.series.series import Series
from attnlab.errors import UserError, nearest
from attnlab.signature import checked_fields


@dataclasses.dataclass(frozen=True)
class Places:
    """The indices of the columns by their roles, and the unit of the marks of time; `None`: without."""

    targets: tuple[int, ...]
    observed: tuple[int, ...]
    known: tuple[int, ...]
    marks: str | None


@checked_fields
@dataclasses.dataclass(frozen=True)
class Columns:
    """Roles of the columns of a series: targets, what is known ahead, and the rest, which is observed to the present.

    Attributes:
      targets: names of the columns that are forecast; empty: all but the known.
      known: names of those that are known over the horizon too, such as plans and holidays.
      marks: whether the marks of time are known besides (`attnlab.data.series.dates.marks`).
    """

    targets: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    marks: bool = False

    def __post_init__(self) -> None:
        """Raises `UserError` for a column of two roles, or named twice."""
        named = (*self.targets, *self.known)
        twice = [name for name in named if named.count(name) > 1]
        if twice:
            raise UserError(f'column {twice[0]!r} is named twice among targets={self.targets}, known={self.known}')

    def counts(self, series: Series) -> tuple[int, int, int]:
        """How many columns are forecast, observed, and known, marks included; reads no rows of published series.

        Raises `UserError` where none is left to forecast, for names of no column, as far as they are known without a
        download (others are found by `places`), and for marks of a series without dates.
        """
        targets = len(self.targets) or series.variates - len(self.known)
        observed = series.variates - targets - len(self.known)
        if targets < 1 or observed < 0:
            raise UserError(
                f'{len(self.targets) or "all other"} targets and {len(self.known)} known columns are more than the '
                f'{series.variates} of the series, or leave none to forecast'
            )
        if (self.targets or self.known) and (told := series.told_names) is not None:
            _found(told, (*self.targets, *self.known))
        return targets, observed, len(self.known) + len(MARKS[self._unit(series)] if self.marks else ())

    def places(self, series: Series) -> Places:
        """Where they are. Raises `UserError` for names of no column."""
        self.counts(series)
        unit = self._unit(series) if self.marks else None
        if not (self.targets or self.known):
            return Places(tuple(range(series.variates)), (), (), unit)
        names = series.names
        known = _found(names, self.known)
        targets = _found(names, self.targets) or tuple(i for i in range(len(names)) if i not in known)
        return Places(targets, tuple(i for i in range(len(names)) if i not in (*targets, *known)), known, unit)

    def _unit(self, series: Series) -> str:
        unit = series.every
        if unit is None:
            raise UserError('the series has no dates, of which marks of time could be made; leave them out (marks=0)')
        return unit


EVERY = Columns()
"""All are forecast."""


def _found(names: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[int, ...]:
    for name in wanted:
        if name not in names:
            raise UserError(f'the series has no column {name!r}{nearest(name, names)}')
    if wanted:
        check_once('the series', wanted, names)
    return tuple(names.index(name) for name in wanted)
