"""Series in files: tables of text or in Parquet with a row a step, and arrays of numpy."""

import abc
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import pathlib
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from attnlab.data.archives import UNREADABLE
from attnlab.data.series.dates import Dates, check_order, is_date, read_dates
from attnlab.data.series.series import Counts, Series, Shares, Values, check_values
from attnlab.errors import UserError, nearest, optional

DELIMITERS = ',;\t'
DATED = ('date', 'datetime', 'day', 'time', 'timestamp')
"""Names of a first column by which numbers such as 20160701 are dates."""

INDEX = ('', 'Unnamed: 0')
"""What a header calls the index of pandas: as it is written, and as it is read as a column and written again."""

PARQUET_INDEX = re.compile(r'__index_level_\d+__')
"""What pandas calls an index without a name in Parquet."""

NUMBERS = ('int', 'uint', 'float', 'double', 'halffloat', 'bool', 'decimal')
"""What types of numbers in Parquet begin with."""


@dataclasses.dataclass(frozen=True)
class Table:
    """What the beginning of a table of text says of it.

    Attributes:
      delimiter: between cells.
      header: whether its first line holds names.
      names: of the columns of numbers; their indices where there is no header.
      columns: the indices of these; the first column is left out where it holds no numbers, or dates, or is an index.
      dated: whether the first column is left out and no index.
    """

    delimiter: str
    header: bool
    names: tuple[str, ...]
    columns: tuple[int, ...]
    dated: bool


@dataclasses.dataclass(frozen=True)
class TableSeries(Series):
    """A table in a file: a row a step, in order of time, a column a variate.

    Attributes:
      path: the file.
      columns: names of the columns that are read, in this order; empty: all.
      season: steps of its period; 1 for none.
      split: how rows are divided.
    """

    path: str
    columns: tuple[str, ...] = ()
    season: int = 1
    split: Shares | Counts = Shares()

    @property
    def variates(self) -> int:
        return len(self.names)

    def values(self) -> Values:
        """The numbers. Raises `UserError` for a table that is newest first; texts that are no dates say nothing."""
        values = check_values(str(_existing(self.path)), self._numbers())
        try:
            dates = self.dates()
        except UserError:
            return values
        if dates is not None:
            check_order(self.path, dates)
        return values

    def describe(self) -> dict[str, Any]:
        return {'source': 'file', 'path': self.path, 'columns': self.columns, 'content': digest(_existing(self.path))}

    @abc.abstractmethod
    def _numbers(self) -> Values:
        """The columns that are read, whatever they hold."""


@dataclasses.dataclass(frozen=True)
class CSVSeries(TableSeries):
    """A table of text: a row a step, in order of time, a column a variate; `.gz` is read too.

    Cells are separated by commas, semicolons or tabs. A first line that holds no number is a header, and so is one that
    begins with no date above one that does, as `date,0,1,OT`. So are `,0,1,2` and `0,1,2` as pandas writes them, and
    `0,1` where the line below has no whole number. A first column that holds no numbers, such as dates, is left out; of
    numbers it is where the header has no name for it or calls it `Unnamed: 0`, an index, or `date` and it has dates
    such as 20160701. Columns without a header are named by their indices.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the header."""
        return self.columns or table(_existing(self.path)).names

    def dates(self) -> Dates | None:
        """The dates in the first column, if it holds no numbers. Raises `UserError` for what is no date."""
        return table_dates(_existing(self.path))

    def _numbers(self) -> Values:
        return read_table(_existing(self.path), self.columns)


@dataclasses.dataclass(frozen=True)
class ParquetSeries(TableSeries):
    """A table in Parquet: a row a step, in order of time, a column a variate. Needs the extra `parquet`.

    A column of times, or a first column of texts, has the dates; all others must be numbers. Those of an index without
    a name, which pandas calls `__index_level_0__`, are left out.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns of numbers."""
        return self.columns or parquet_columns(_existing(self.path))[1]

    def dates(self) -> Dates | None:
        """The dates in the column of times, or in the first if it holds texts. Raises `UserError` for a row without."""
        path = _existing(self.path)
        name = parquet_columns(path)[0]
        if name is None:
            return None
        column = _read(path, [name])[name]
        if column.null_count:
            raise UserError(f'{path} has {column.null_count} rows without a date in column {name!r}')
        if 'string' in str(column.type):
            return read_dates(column.to_pylist())
        compute = _parquet('pyarrow.compute')
        with _reading(path):
            local = compute.local_timestamp(column) if 'tz=' in str(column.type) else column
            return local.cast('timestamp[s]', safe=False).to_numpy()

    def _numbers(self) -> Values:
        path = _existing(self.path)
        numbers = parquet_columns(path)[1]
        unknown = [name for name in self.columns if name not in numbers]
        if unknown:
            raise UserError(f'{path} has no column {unknown[0]!r} of numbers{nearest(unknown[0], numbers)}')
        check_once(str(path), self.columns, numbers)
        found = _read(path, list(self.names))
        with _reading(path):
            return np.stack([found[name].cast('float64', safe=False).to_numpy() for name in self.names], axis=1)


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
        of = {'path': self.path, 'key': self.key, 'feature': self.feature}
        return {'source': 'file', **of, 'content': digest(_existing(self.path))}


def read_table(path: pathlib.Path, columns: tuple[str, ...] = ()) -> Values:
    """The numbers of a table of text. Raises `UserError` naming line and column for a cell that is no number."""
    found = table(path)
    unknown = [name for name in columns if name not in found.names]
    if unknown:
        raise UserError(f'{path} has no column {unknown[0]!r}{nearest(unknown[0], found.names)}')
    if columns:
        check_once(str(path), columns, found.names)
    wanted = [found.columns[found.names.index(name)] for name in columns] or list(found.columns)
    with _opened(path) as file:
        try:
            return np.loadtxt(
                _even(path, file, found),
                delimiter=found.delimiter,
                skiprows=int(found.header),
                usecols=wanted,
                ndmin=2,
                dtype=np.float64,
                comments=None,
            )
        except (ValueError, IndexError, EOFError, OSError, zlib.error) as error:
            failure = error
    place = _wrong_cell(path, found, wanted)
    raise UserError(f'{path} cannot be read as a table of numbers: {place or failure}') from failure


@functools.lru_cache(maxsize=8)
def table_dates(path: pathlib.Path) -> Dates | None:
    """The dates of a table of text; `None` where its first column has none. Raises `UserError` for other texts."""
    found = table(path)
    if not found.dated:
        return None
    lines = _lines(path)
    if found.header:
        next(lines)
    cells = (line.split(found.delimiter, 1)[0].strip().strip('"') for line in lines if line.strip())
    try:
        return read_dates(cells)
    except UserError as error:
        raise UserError(f'the first column of {path} cannot be read: {error}') from error


def parquet_columns(path: pathlib.Path) -> tuple[str | None, tuple[str, ...]]:
    """The column of dates, if there is one, and those of numbers. Raises `UserError` for others, and for no table."""
    library = _parquet()
    with _reading(path):
        schema = library.read_schema(path)
    check_once(str(path), (), tuple(schema.names))
    every = {name: str(kind) for name, kind in zip(schema.names, schema.types, strict=True)}
    index = {name for name, kind in every.items() if PARQUET_INDEX.fullmatch(name) and kind.startswith(NUMBERS)}
    kinds = {name: kind for name, kind in every.items() if name not in index}
    texts = [name for name in list(kinds)[:1] if kinds[name] in ('string', 'large_string', 'string_view')]
    dates = [name for name, kind in kinds.items() if kind.startswith(('timestamp', 'date'))] or texts
    numbers = tuple(name for name, kind in kinds.items() if kind.startswith(NUMBERS))
    others = [name for name in kinds if name not in (*dates, *numbers)]
    if others or len(dates) > 1 or not numbers:
        wrong = f'column {others[0]!r} of {kinds[others[0]]}' if others else f'{len(dates)} of dates: {dates}'
        raise UserError(f'{path} has {wrong if numbers else "no column of numbers"}; one of dates, others of numbers')
    return (dates[0] if dates else None), numbers


def check_once(what: str, asked: tuple[str, ...], there: tuple[str, ...]) -> None:
    """Raises `UserError` for a column that is asked for twice, or of whose name there are several.

    Without names that are asked for, for any of whose name there are several.
    """
    for name in asked or there:
        if there.count(name) > 1:
            raise UserError(f'{what} has {there.count(name)} columns called {name!r}; rename them in the file')
        if asked.count(name) > 1:
            raise UserError(f'column {name!r} of {what} is asked for {asked.count(name)} times; once is enough')


def read_array(path: pathlib.Path, key: str, feature: int) -> Values:
    """The numbers of an array, `n v`. Raises `UserError` where there is no such array, and for other shapes."""
    try:
        # numpy leaves a file open that it finds to be no archive.
        with path.open('rb') as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.lib.npyio.NpzFile):
                if key not in loaded:
                    raise UserError(f'{path} has no array {key!r}{nearest(key, loaded.files)}')
                loaded = loaded[key]
    except UNREADABLE as error:
        raise UserError(f'{path} cannot be read as an array of numpy: {error}') from error
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
    below = [cell.strip().strip('"') for cell in second.split(delimiter)]
    header = (
        not any(map(_is_number, cells))
        or (is_date(below[0]) and not _is_number(cells[0]) and not is_date(cells[0]))
        or (cells[0] in INDEX and _counted(cells[1:]))
        or (_counted(cells) and len(below) == len(cells) > 1 and (len(cells) > 2 or not any(map(_is_whole, below))))
    )
    numbers = below if header else cells
    if header and len(numbers) != len(cells):
        quoted = '; a cell in quotes must not hold what cells are divided by' if '"' in f'{first}{second}' else ''
        raise UserError(f'{path} has {len(cells)} names in line 1 and {len(numbers)} cells in line 2{quoted}')
    index = header and cells[0] in INDEX and _is_number(numbers[0])
    texts = numbers[0] != '' and not _is_number(numbers[0])
    dated = texts or (header and cells[0].lower() in DATED and is_date(numbers[0]))
    columns = tuple(range(1 if index or dated else 0, len(cells)))
    if not columns:
        raise UserError(f'{path} has no column of numbers')
    names = tuple(cells[i] if header else str(i) for i in columns)
    return Table(delimiter, header, names, columns, dated)


def digest(path: pathlib.Path) -> str:
    """The SHA-256 of a file, hexadecimal."""
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def _parquet(module: str = 'pyarrow.parquet') -> Any:
    return optional(module, 'Parquet')


def _read(path: pathlib.Path, columns: list[str]) -> Any:
    """Columns of a table in Parquet. Raises `UserError` where they are damaged."""
    library = _parquet()
    with _reading(path):
        found = library.read_table(path, columns=columns)
        # Texts are decoded when they are asked for, here once before.
        found.validate(full=True)
        return found


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    """Errors of pyarrow, of damaged files and of zones that it does not know, as `UserError`."""
    try:
        yield
    except (ValueError, OSError, MemoryError, _parquet('pyarrow').ArrowException) as error:
        raise UserError(f'{path} cannot be read as Parquet: {error}') from error


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
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f'{path} is no text in UTF-8: {error}') from error


def _even(path: pathlib.Path, lines: Iterable[str], found: Table) -> Iterator[str]:
    """The lines of a table. Raises `UserError` for one with more or fewer cells than the first, unless it is empty.

    What reads numbers leaves out cells beyond those that it is asked for, so that `1,234.5` would be read as 1.
    """
    most = max(found.columns) + 1
    for number, line in enumerate(lines, start=1):
        count = line.count(found.delimiter) + 1
        if count != most and line != '\n':
            raise UserError(
                f'{path} cannot be read as a table of numbers: line {number} has {count} cells, not {most} as line 1'
            )
        yield line


def _counted(cells: list[str]) -> bool:
    """Whether cells are 0, 1, 2 and so on, the names that pandas gives to columns of an array."""
    return cells == [*map(str, range(len(cells)))]


def _is_whole(cell: str) -> bool:
    return cell.removeprefix('-').isdigit()


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _wrong_cell(path: pathlib.Path, found: Table, wanted: list[int]) -> str | None:
    """The first cell that is no number, in words."""
    for number, line in enumerate(_even(path, _lines(path), found), start=1):
        if line == '\n' or (number == 1 and found.header):
            continue
        cells = line.rstrip('\n').split(found.delimiter)
        for column in wanted:
            if not _is_number(cells[column]):
                shown = repr(cells[column]) if cells[column].strip() else 'empty'
                return f'line {number}, column {found.names[found.columns.index(column)]!r} is {shown}'
    return None
