"""Benchmark lines as text for a terminal, as JSON, and as the tables of a Markdown page."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.bench import timing
from pallas_kernels.bench.ceilings import Ceilings
from pallas_kernels.bench.measure import Measurement

MEASURED = ('<!-- measured: begin -->', '<!-- measured: end -->')
"""The lines of a page around the tables of measurements."""

COMPILED = ('<!-- compiled: begin -->', '<!-- compiled: end -->')
"""The lines around the tables of compilations for devices that are not present."""

COMPILED_HEAD = (
    '| core | call | device | pass | kernel | compile, s of processor time | arguments, MiB | temporaries, MiB |',
    '|---' * 8 + '|',
)

COLUMNS = ('contender', 'ms', 'ratio', 'TFLOP/s', 'GB/s', 'of ceiling', 'temporaries, MiB', 'compile, s')


def facts(ceilings: Ceilings) -> dict[str, Any]:
    """Where and with what the lines were measured."""
    device = jax.devices()[0]
    return {
        'device': device.device_kind
        if device.platform != 'cpu'
        else f'{platform.processor() or platform.machine()} CPU',
        'platform': device.platform,
        'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
        'commit': _commit(),
        'python': platform.python_version(),
        'jax': jax.__version__,
        'jaxlib': importlib.metadata.version('jaxlib'),
        'copy, GB/s': round(ceilings.bytes_per_second / 1e9, 1),
        'matrix product, TFLOP/s': round(ceilings.flops_per_second / 1e12, 3),
        'exponentials, G/s': round(ceilings.exponentials_per_second / 1e9, 1),
    }


def _commit() -> str:
    here = pathlib.Path(__file__).parent
    answer = subprocess.run(
        ['git', 'describe', '--always', '--dirty'], cwd=here, capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or 'unknown'


def heading(lines: Sequence[Measurement]) -> tuple[str, ...]:
    """The columns, with what the brackets of ratios are: the least and the most where there were few rounds."""
    rounds = {line.rounds for line in lines if line.milliseconds is not None}
    few = sorted(number for number in rounds if number is not None and number < timing.ENOUGH)
    parts = ['95 %'] if len(few) < len(rounds) or not few else []
    parts += [f'least and most of {number} rounds' for number in few]
    return tuple(f'ratio ({", ".join(parts)})' if column == 'ratio' else column for column in COLUMNS)


def cells(line: Measurement) -> tuple[str, ...]:
    """One line as the texts of `COLUMNS`."""
    name = line.contender if line.implementation is None else f'{line.contender} ({line.implementation})'
    if line.milliseconds is None:
        return (name, f'failed: {line.failure}', *[''] * (len(COLUMNS) - 2))
    return (
        name,
        f'{line.milliseconds:.3g}',
        f'{line.ratio:.2f} ({line.low:.2f} to {line.high:.2f})',
        f'{line.tflops:.3g}',
        f'{line.gigabytes:.3g}',
        f'{line.ceiling:.0%}',
        f'{line.temporary_mib:.1f}',
        f'{line.compile_seconds:.1f}',
    )


def text(lines: Sequence[Measurement]) -> str:
    """The lines of one problem as a table of text."""
    rows = [heading(lines), *map(cells, lines)]
    widths = [max(len(row[place]) for row in rows if row[1][:6] != 'failed') for place in range(len(COLUMNS))]
    aligned = ('  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return '\n'.join((f'{lines[0].core}, {lines[0].problem}, {lines[0].what}', *aligned))


def markdown(record: dict[str, Any]) -> str:
    """One measured record as Markdown."""
    lines = [Measurement(**line) for line in record['lines']]
    about = '; '.join(f'{name} {value}' for name, value in record['facts'].items())
    parts = [f'### {record["facts"]["device"]}', '', about + '.', '']
    for core in dict.fromkeys(line.core for line in lines):
        of_core = [line for line in lines if line.core == core]
        parts += [
            f'#### `{core}`',
            '',
            '| call | pass | ' + ' | '.join(heading(of_core)) + ' |',
            '|---' * (len(COLUMNS) + 2) + '|',
        ]
        parts += [f'| {line.problem} | {line.what} | ' + ' | '.join(cells(line)) + ' |' for line in of_core]
        parts.append('')
    return '\n'.join(parts)


def compiled(line: dict[str, Any]) -> str:
    """A line of `tests/kernels/compile_tpu.py` as one of a Markdown table."""
    sizes = f'{line["arguments MiB"]:.0f} | {line["temporary MiB"]:.1f}'
    return (
        f'| `{line["core"]}` | {line["call"]} | {line["device"]} | {line["what"]} | {line["implementation"]} '
        f'| {line["seconds"]:.1f} | {sizes} |'
    )


def rewrite(page: pathlib.Path, records: Sequence[pathlib.Path]) -> None:
    """Rewrites the tables that there are records of: those that `--json` wrote, and lines of compilers, `.jsonl`.

    Raises:
      OSError: a file cannot be read or written.
      ValueError: a file is no record, or the page has no place for its table.
    """
    tables: dict[str, list[str]] = {'.json': [], '.jsonl': []}
    for record in records:
        if record.suffix not in tables:
            raise ValueError(f'{record} is called neither .json nor .jsonl; expected a record that --json wrote')
        tables[record.suffix] += _tables(record)
    text = page.read_text()
    if tables['.json']:
        text = between(MEASURED, text, '\n'.join(tables['.json']), page)
    if tables['.jsonl']:
        text = between(COMPILED, text, '\n'.join([*COMPILED_HEAD, *tables['.jsonl'], '']), page)
    replace(page, text)


def _tables(record: pathlib.Path) -> list[str]:
    """What a page has of a record. Raises ValueError for one of another kind."""
    text = record.read_text()
    try:
        if record.suffix == '.json':
            return [markdown(json.loads(text))]
        return [compiled(json.loads(line)) for line in text.splitlines()]
    except (KeyError, TypeError, ValueError) as error:
        kind = 'what --json wrote' if record.suffix == '.json' else 'lines of tests/kernels/compile_tpu.py'
        raise ValueError(f'{record} is not read ({type(error).__name__}: {error}); expected {kind}') from error


def check_writable(path: pathlib.Path) -> None:
    """Raises OSError or ValueError for a path that `replace` could not write to."""
    if path.exists() and not path.is_file():
        raise ValueError(f'{path} is no file; expected the path of one')
    part = _part(path)
    part.touch()
    part.unlink()


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a file whole or, where that fails with an OSError, leaves it as it was."""
    part = _part(path)
    try:
        part.write_text(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _part(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f'.{path.name}.{os.getpid()}')


def between(marks: tuple[str, str], text: str, tables: str, page: pathlib.Path) -> str:
    """The text of a page with other tables between two marks. Raises ValueError where it has no such marks."""
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise ValueError(f'{page} has no lines {marks[0]} and {marks[1]}, between which the tables go')
    return f'{before}{begin}\n\n{tables}\n{end}{after}'
