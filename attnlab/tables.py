"""The tables that commands print: in a terminal as wide as it is, elsewhere lines with tabs, JSON, CSV or Markdown.

A table holds values, not text. People are shown what each column makes of a value; JSON and CSV have every digit.
Control characters are spelled out, in JSON by its own rules, so that no text acts on the terminal.
In a terminal no name and no number is broken: prose wraps between words, and columns are left out by rank where the
width is too little, which is said below the table.
"""

import csv
import dataclasses
import io
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

TERMINAL = 'terminal'
"""The form that a terminal is given where no format is chosen."""

EXACT = ('json', 'csv')
"""Formats that are read by programs: standard output holds nothing but tables."""

APART = 2
"""Spaces between two columns."""

NARROWEST = 16
"""Characters that prose is given at least."""

LOPSIDED = 0.05
"""How far from the middle of its interval, in half widths, a value is still shown with one error for both sides."""

INDENT = 4
"""Spaces before a cell that has no room beside the others and stands below them."""


CONTROLS = {code: f'\\x{code:02x}' for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in '\n\t'}
"""How control characters are shown to people; as they are, they would act on the terminal, such as clear it."""


class Interval(NamedTuple):
    """A value and the ends of its interval; both are `None` where it has none."""

    value: float
    low: float | None
    high: float | None


def shown(value: Any) -> str:
    """A value as people are shown it: whole numbers with commas, others with six digits, nothing for `None`."""
    if value is None:
        return ''
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f'{value:,}'
    return f'{value:.6g}' if isinstance(value, float) else str(value)


def spelled(value: Any) -> str:
    """A value as it is written in a config; floats with six digits."""
    return f'{value:.6g}' if isinstance(value, float) else str(value)


def visible(text: str) -> str:
    """A text whose control characters, but for the ends of lines and tabs, are spelled `\\x1b`.

    Files of runs and studies are handed on, and what is in them is printed.
    """
    return text.translate(CONTROLS)


def digits(form: str) -> Callable[[Any], str]:
    """Shows numbers by a format, such as `digits('.4f')`; nothing for `None`, and text as it is."""
    return lambda value: format(value, form) if isinstance(value, int | float) else shown(value)


def plus_minus(one: Interval) -> str:
    """Shows a value, with its interval where it has one, with four digits after the point."""
    if one.low is None or one.high is None:
        return f'{one.value:.4f}'
    return with_ends(one.value, one.low, one.high, 4)


def with_ends(value: float, low: float, high: float, digits: int) -> str:
    """`value ± half of the interval`, or `value [low, high]`.

    Where the value is not in the middle of its interval there is no one error to add and take away: by little, that is
    overlooked, but never of an interval that was cut at 0 or 1, such as that of an accuracy.
    """
    half, shown = (high - low) / 2, f'{value:.{digits}f}'
    aside, cut = abs(value - (low + high) / 2), low == 0.0 or high == 1.0
    if aside > (1e-9 if cut else LOPSIDED) * half:
        return f'{shown} [{low:.{digits}f}, {high:.{digits}f}]'
    return f'{shown} ± {half:.{digits}f}'


def itself(value: Any) -> Any:
    """The value."""
    return value


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
      name: its header, and its key in JSON.
      show: makes text of a value.
      right: aligned to the right, as numbers are.
      rank: which columns a narrow terminal leaves out, the highest first; 0 always stays.
      prose: wraps between words; in the last column, a cell with a word too long for the room goes below its row. Only
        Markdown has its marks of code.
      exact: makes of a value what JSON and CSV have.
    """

    name: str
    show: Callable[[Any], str] = shown
    right: bool = False
    rank: int = 0
    prose: bool = False
    exact: Callable[[Any], Any] = itself


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of values under columns.

    Attributes:
      name: what it is called in JSON.
      columns: in order.
      rows: values, one a column.
      title: the line above it for people, if any.
      headed: whether people are shown the names of the columns.
      marked: the rows that stand out, by index.
      warning: whether the title is a warning.
    """

    name: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    title: str = ''
    headed: bool = True
    marked: frozenset[int] = frozenset()
    warning: bool = False

    def text(self) -> list[list[str]]:
        """The cells as people are shown them."""
        return [
            [visible(column.show(value)) for column, value in zip(self.columns, row, strict=True)] for row in self.rows
        ]

    def unmarked(self) -> list[list[str]]:
        """The same without marks of code in prose."""
        return [
            [cell.replace('`', '') if column.prose else cell for column, cell in zip(self.columns, row, strict=True)]
            for row in self.text()
        ]

    def records(self) -> list[dict[str, Any]]:
        """The values by column, intervals as three columns."""
        return [
            {
                name: item
                for column, value in zip(self.columns, row, strict=True)
                for name, item in _exact(column, value)
            }
            for row in self.rows
        ]


def pairs(name: str, values: Mapping[str, Any], title: str = '') -> Table:
    """A table of names and values, without a header."""
    columns = (Column('name'), Column('value', spelled, prose=True))
    return Table(name, columns, list(values.items()), title, headed=False)


def print_rows(printer: 'Printer', table: Table, caption: str, notes: Mapping[str, str]) -> None:
    """Prints the table of all named rows of a kind, with its caption; as Markdown with the notes that there are."""
    printer.table(table)
    if printer.form != 'plain':
        printer.line(caption)
    if printer.form == 'markdown':
        written = [f'- **{name}**: {note}' for name, note in notes.items() if note]
        printer.line('\n'.join(['## Notes', '', *written]))


def plain_console(**settings: Any) -> Console:
    """A console with these settings of `rich.console.Console` that prints texts as they are, all of them `visible`.

    In what runs say there are paths, shapes and reasons, whose brackets would be taken for markup and left out, or be
    an error.
    """
    return _PlainConsole(markup=False, highlight=False, **settings)


class _PlainConsole(Console):
    """A console that prints control characters spelled out."""

    def print(self, *objects: Any, **settings: Any) -> None:
        super().print(*(visible(each) if isinstance(each, str) else each for each in objects), **settings)


def standard_output() -> Console:
    """Standard output, where lines are folded in a terminal alone."""
    made = plain_console()
    made.soft_wrap = not made.is_terminal
    return made


class Printer:
    """Where a command's tables and lines go, in one format.

    JSON is one object, of every table by its name, printed by `close`. Where the format is for programs, `console`,
    which takes all other lines, is standard error.
    """

    def __init__(self, console: Console, form: str | None = None):
        self.form = form or (TERMINAL if console.is_terminal else 'plain')
        self.console = plain_console(stderr=True) if self.form in EXACT else console
        self._output = console
        self._tables: dict[str, list[dict[str, Any]]] = {}
        self._begun = False

    def table(self, table: Table) -> None:
        """Prints a table."""
        if self.form == 'json':
            self._tables.setdefault(table.name, []).extend(table.records())
            return
        if self.form == TERMINAL:
            self._output.print(rendered(table, self._output.width), soft_wrap=True)
            return
        blocks = {'plain': plain_text, 'csv': csv_text, 'markdown': markdown_text}
        self._write(('\n' if self._begun else '') + blocks[self.form](table))
        self._begun = True

    def line(self, text: str) -> None:
        """Prints a line for people, which in a terminal wraps between words."""
        text = visible(text)
        if self.form == TERMINAL:
            text = '\n'.join(wrapped(text, self._output.width))
        elif self.form == 'markdown':
            text = f'\n{text}'
        self.console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Prints what was kept for the end."""
        if self.form == 'json':
            self._write(json.dumps(self._tables, indent=2) + '\n')

    def _write(self, text: str) -> None:
        self._output.file.write(visible(text))
        self._output.file.flush()


def plain_text(table: Table) -> str:
    """Lines with tabs, a line a row, below the columns' names and, as a comment, the title."""
    title = f'# {table.title}\n' if table.title else ''
    header = [[column.name for column in table.columns]] if table.headed else []
    rows = [*header, *table.unmarked()]
    return title + ''.join('\t'.join(' '.join(cell.split()) for cell in row) + '\n' for row in rows)


def csv_lines(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """CSV of lines of values below a header; `None` is nothing."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow(header)
    writer.writerows(lines)
    return text.getvalue()


def csv_text(table: Table) -> str:
    """CSV with every digit."""
    records = table.records()
    fields = list(dict.fromkeys(name for record in records for name in record)) or [c.name for c in table.columns]
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator='\n')
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def markdown_text(table: Table) -> str:
    """A Markdown table below its title, if it has one."""
    title = [table.title, ''] if table.title else []
    header = [column.name for column in table.columns], ['---' for _ in table.columns]
    rows = [[' '.join(cell.split()).replace('|', '\\|') for cell in row] for row in table.text()]
    return '\n'.join([*title, *(f'| {" | ".join(row)} |' for row in (*header, *rows))]) + '\n'


def rendered(table: Table, width: int) -> Text:
    """The table for a terminal of this width; no line is wider, but for a single word that is."""
    columns = [dataclasses.replace(column, name=visible(column.name)) for column in table.columns]
    table = dataclasses.replace(table, columns=columns, title=visible(table.title))
    cells = table.unmarked()
    kept, dropped = _fitting(table, cells, width)
    widths = _widths(table, cells, kept, width)
    text = Text()
    for line in wrapped(table.title, width) if table.title else ():
        text.append(f'{line}\n', style='bold red' if table.warning else 'bold')
    if table.headed:
        for line in _row([table.columns[i] for i in kept], [table.columns[i].name for i in kept], widths, width):
            text.append(f'{line}\n', style='bold')
        text.append('-' * min(width, sum(widths) + APART * (len(widths) - 1)) + '\n', style='dim')
    for number, row in enumerate(cells):
        style = 'bold' if number in table.marked else ''
        for line in _row([table.columns[i] for i in kept], [row[i] for i in kept], widths, width):
            text.append(f'{line}\n', style=style)
    if dropped:
        names = ', '.join(table.columns[i].name for i in dropped)
        for line in wrapped(f'too narrow for: {names}; --format=plain has all', width):
            text.append(f'{line}\n', style='dim')
    return text


def _exact(column: Column, value: Any) -> Iterator[tuple[str, Any]]:
    """A value as JSON has it, under the names of its columns."""
    value = column.exact(value)
    if isinstance(value, Interval):
        ends = {'': value.value, ' low': value.low, ' high': value.high}
        yield from ((f'{column.name}{end}', _finite(item)) for end, item in ends.items())
    else:
        yield column.name, _finite(value)


def _finite(value: Any) -> Any:
    """The value; a number that JSON cannot spell, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _least(table: Table, cells: Sequence[Sequence[str]], index: int) -> int:
    """The characters that a column cannot do without."""
    column = table.columns[index]
    words = [word for word in column.name.split() if table.headed]
    texts = [row[index] for row in cells]
    if column.prose:
        longest = max((len(word) for text in texts for word in text.split()), default=0)
        hanging = index == len(table.columns) - 1
        natural = max((len(line) for text in texts for line in text.splitlines()), default=0)
        return max(*map(len, words), min(natural, NARROWEST if hanging else max(longest, NARROWEST)), 1)
    return max(*map(len, words), *(len(line) for text in texts for line in text.splitlines()), 1, 1)


def _fitting(table: Table, cells: Sequence[Sequence[str]], width: int) -> tuple[list[int], list[int]]:
    """The columns that fit, and those left out for it."""
    least = [_least(table, cells, index) for index in range(len(table.columns))]
    kept = list(range(len(table.columns)))
    dropped: list[int] = []
    while sum(least[i] for i in kept) + APART * (len(kept) - 1) > width:
        worst = max(kept, key=lambda i: (table.columns[i].rank, i))
        if not table.columns[worst].rank:
            break
        kept.remove(worst)
        dropped.append(worst)
    return kept, dropped


def _widths(table: Table, cells: Sequence[Sequence[str]], kept: Sequence[int], width: int) -> list[int]:
    """The width of each column: what it needs, then what is left to those that would take more."""
    widths = [_least(table, cells, index) for index in kept]
    wanted = [
        max([len(table.columns[i].name) * table.headed, *(len(line) for row in cells for line in row[i].splitlines())])
        for i in kept
    ]
    left = width - sum(widths) - APART * (len(kept) - 1)
    while left > 0 and any(now < most for now, most in zip(widths, wanted, strict=True)):
        narrow = min((i for i in range(len(kept)) if widths[i] < wanted[i]), key=lambda i: widths[i])
        widths[narrow] += 1
        left -= 1
    return widths


def _row(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int], width: int) -> Iterator[str]:
    """The lines of one row."""
    parts = [wrapped(cell, size) for cell, size in zip(cells, widths, strict=True)]
    below: list[str] = []
    if len(parts) > 1 and any(len(line) > widths[-1] for line in parts[-1]):
        below, parts[-1] = wrapped(cells[-1], width - INDENT), ['']
    for number in range(max(map(len, parts))):
        line = ''
        for column, part, size in zip(columns, parts, widths, strict=True):
            cell = part[number] if number < len(part) else ''
            line += (cell.rjust(size) if column.right else cell.ljust(size)) + ' ' * APART
        yield line.rstrip()
    yield from (' ' * INDENT + line for line in below)


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a text, broken between words; a word longer than the width stays whole."""
    lines = text.splitlines() or ['']
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, max(1, width), break_long_words=False, break_on_hyphens=False) or ['']
    ]
