"""Series in files: tables of text with a row a step, and arrays of numpy."""

import dataclasses
import functools
import gzip
import hashlib
import pathlib
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from attnlab.data.series.series import Counts, Series, Shares, Values, check_values
from attnlab.errors import UserError, nearest

DELIMITERS = ',;\t'


@dataclasses.dataclass(frozen=True)
class Table:
    """What the beginning of a table of text says of it.

    Attributes:
      delimiter: between cells.
      header: whether its first line holds names.
      names: of the columns of numbers; their indices where there is no header.
      columns: the indices of these; the first column is left out where it holds no numbers, such as dates.
    """

    delimiter: str
    header: bool
    names: tuple[str, ...]
    columns: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CSVSeries(Series):
    """A table of text: a row a step, in order of time, a column a variate; `.gz` is read too.

    Cells are separated by commas, semicolons or tabs. A first line that holds no number is a header; a first column
    that holds no numbers, such as dates, is left out.

    Attributes:
      path: the file.
      columns: names of the columns that are read, in this order, or their indices where there is no header; empty: all.
      season: steps of its period; 1 for none.
      split: how rows are divided.
    """

    path: str
    columns: tuple[str, ...] = ()
    season: int = 1
    split: Shares | Counts = Shares()

    @property
    def variates(self) -> int:
        return len(self.columns) or len(table(_existing(self.path)).columns)

    def values(self) -> Values:
        path = _existing(self.path)
        return check_values(str(path), read_table(path, self.columns))

    def describe(self) -> dict[str, Any]:
        return {'source': 'file', 'path': self.path, 'columns': self.columns, 'content': digest(_existing(self.path))}


@dataclasses.dataclass(frozen=True)
class NPZSeries(Series):
    """An array in an `.npz` or `.npy` file, rows in time: `n v`, or `n v f`, of which one feature f is read.

    Attributes:
      path: the file.
      key: which array of an `.npz`.
      feature: which of the last axis, if there is one.
      season: steps of its period; 1 for none.
      split: how rows are divided.
    """

    path: str
    key: str = 'data'
    feature: int = 0
    season: int = 1
    split: Shares | Counts = Shares()

    @property
    def variates(self) -> int:
        return read_array(_existing(self.path), self.key, self.feature).shape[1]

    def values(self) -> Values:
        path = _existing(self.path)
        return check_values(str(path), read_array(path, self.key, self.feature))

    def describe(self) -> dict[str, Any]:
        return {'source': 'file', 'path': self.path, 'key': self.key, 'content': digest(_existing(self.path))}


def read_table(path: pathlib.Path, columns: tuple[str, ...] = ()) -> Values:
    """The numbers of a table of text. Raises `UserError` naming line and column for a cell that is no number."""
    found = table(path)
    unknown = [name for name in columns if name not in found.names]
    if unknown:
        raise UserError(f'{path} has no column {unknown[0]!r}{nearest(unknown[0], found.names)}')
    wanted = [found.columns[found.names.index(name)] for name in columns] or list(found.columns)
    with _opened(path) as file:
        try:
            return np.loadtxt(
                file,
                delimiter=found.delimiter,
                skiprows=int(found.header),
                usecols=wanted,
                ndmin=2,
                dtype=np.float64,
                comments=None,
            )
        except (ValueError, IndexError) as error:
            failure = error
    place = _wrong_cell(path, found, wanted)
    raise UserError(f'{path} cannot be read as a table of numbers: {place or failure}') from failure


def read_array(path: pathlib.Path, key: str, feature: int) -> Values:
    """The numbers of an array, `n v`. Raises `UserError` where there is no such array, and for other shapes."""
    try:
        loaded = np.load(path, allow_pickle=False)
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise UserError(f'{path} cannot be read as an array of numpy: {error}') from error
    if isinstance(loaded, np.lib.npyio.NpzFile):
        if key not in loaded:
            raise UserError(f'{path} has no array {key!r}{nearest(key, loaded.files)}')
        loaded = loaded[key]
    if loaded.ndim not in (2, 3) or loaded.dtype.kind not in 'fiu':
        raise UserError(f'{path} holds {loaded.dtype} of shape {loaded.shape}; a series has rows in time and columns')
    if loaded.ndim == 3:
        if not 0 <= feature < loaded.shape[2]:
            raise UserError(f'feature is {feature}; {path} has {loaded.shape[2]} features')
        loaded = loaded[:, :, feature]
    return loaded.astype(np.float64)


@functools.lru_cache(maxsize=8)
def table(path: pathlib.Path) -> Table:
    """What the first two lines of a table say of it. Raises `UserError` where they hold no columns of numbers."""
    lines = _lines(path)
    first, second = next(lines, ''), next(lines, '')
    if not first.strip():
        raise UserError(f'{path} is empty, or begins with an empty line')
    delimiter = max(DELIMITERS, key=first.count)
    cells = [cell.strip().strip('"') for cell in first.split(delimiter)]
    header = not any(map(_is_number, cells))
    numbers = [cell.strip().strip('"') for cell in (second if header else first).split(delimiter)]
    if header and len(numbers) != len(cells):
        raise UserError(f'{path} has {len(cells)} names in line 1 and {len(numbers)} cells in line 2')
    columns = tuple(range(0 if _is_number(numbers[0]) or not numbers[0] else 1, len(cells)))
    if not columns:
        raise UserError(f'{path} has no column of numbers')
    names = tuple(cells[i] if header else str(i) for i in columns)
    return Table(delimiter, header, names, columns)


def digest(path: pathlib.Path) -> str:
    """The SHA-256 of a file, hexadecimal."""
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def _existing(path: str) -> pathlib.Path:
    found = pathlib.Path(path).expanduser()
    if not found.is_file():
        raise UserError(f'there is no file {path}')
    return found


def _opened(path: pathlib.Path) -> Any:
    if path.suffix == '.gz':
        return gzip.open(path, 'rt', encoding='utf-8-sig')
    return path.open(encoding='utf-8-sig')


def _lines(path: pathlib.Path) -> Iterator[str]:
    try:
        with _opened(path) as file:
            yield from file
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise UserError(f'{path} is no text in UTF-8: {error}') from error


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _wrong_cell(path: pathlib.Path, found: Table, wanted: list[int]) -> str | None:
    """The first cell that is no number, in words."""
    for number, line in enumerate(_lines(path), start=1):
        if number == 1 and found.header:
            continue
        cells = line.rstrip('\n').split(found.delimiter)
        if len(cells) <= max(wanted):
            return f'line {number} has {len(cells)} cells, not {max(wanted) + 1} or more'
        for column in wanted:
            if not _is_number(cells[column]):
                shown = repr(cells[column]) if cells[column].strip() else 'empty'
                return f'line {number}, column {found.names[found.columns.index(column)]!r} is {shown}'
    return None
