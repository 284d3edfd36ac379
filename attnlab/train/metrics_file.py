"""The files of numbers that a run writes while it trains, an object of JSON a line: appended, mended, read."""

import itertools
import json
import math
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from attnlab import files
from attnlab.errors import UserError

METRICS = 'metrics.jsonl'
"""What the config determines, so that two runs of it can be compared byte by byte."""

SPEED = 'speed.jsonl'
"""What depends on the device."""

FASTEST = 1e18
"""Speeds are below it, in tokens a second."""

ENDS = ('_low', '_high')
"""How the names of the ends of an interval end."""

ACCESSORY = (*ENDS, 'tokens', 'documents', 'examples')
"""How the names end of what is no metric."""


def interval_ends(metric: str) -> tuple[str, str]:
    """The names of the ends of a metric's interval; what follows an `@`, such as a window, stays at the end."""
    stem, at, suffix = metric.partition('@')
    low, high = (f'{stem}{end}{at}{suffix}' for end in ENDS)
    return low, high


def is_accessory(name: str) -> bool:
    """Whether a number is an end of an interval, or counts what was evaluated."""
    return name.partition('@')[0].endswith(ACCESSORY)


def append_line(path: pathlib.Path, numbers: Mapping[str, Any]) -> None:
    """Appends one JSON object as one line, in one write. Raises `UserError` where the file is a link."""
    finite = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
    with files.appending(path) as file:
        file.write(json.dumps(finite) + '\n')


def set_aside(path: pathlib.Path) -> str | None:
    """Renames the metrics of a run that begins again at step 0, since it has no checkpoint left.

    Returns a line for the user; `None` where there are no metrics.
    """
    if not path.exists() or not path.stat().st_size:
        return None
    last = max((found['step'] for line in whole_lines(path) if (found := _parsed(line)) is not None), default=0)
    names = (path.with_name(f'{path.stem}-before-{number}{path.suffix}') for number in itertools.count(1))
    kept = path.rename(next(name for name in names if not name.exists()))
    return (
        f'{path} has steps up to {last}, of which no checkpoint is left: the run begins again at step 0, '
        f'and its metrics so far are kept in {kept.name}'
    )


def keep_until(path: pathlib.Path, step: int, every: int, begun: int = 0) -> list[str]:
    """Drops damaged lines, and those of steps after `step`, which will be run again; a run reports every `every` steps.

    Returns a line for the user about lost reports of steps that will not be run again; those up to step `begun` were
    made by another run, as often as it reports.
    """
    kept, lost = mend(path, step)
    reported = {found['step'] for found in kept if 'train/loss' in found}
    due = range(begun // every * every + every, step + 1, every)
    if absent := [number for number in due if number not in reported]:
        lost.append(
            f'{path} lacks {len(absent)} of the reports up to the checkpoint of step {step}, from step {absent[0]} to '
            f'{absent[-1]}: they were lost, and those steps are not taken again'
        )
    return lost


def mend(path: pathlib.Path, until: float | int = math.inf) -> tuple[list[dict[str, Any]], list[str]]:
    """Drops damaged lines, an incomplete last line, which the next would be appended to, and steps after `until`.

    Returns what the others hold, and a line for the user about damaged ones.
    """
    lines = [(line, _parsed(line)) for line in whole_lines(path)] if path.exists() else []
    kept = [(line, found) for line, found in lines if found is not None and found['step'] <= until]
    if path.exists():
        files.write(path, ''.join(f'{line}\n' for line, _ in kept))
    damaged = sum(found is None for _, found in lines)
    lost = [f'{path}: {damaged} damaged line{"s" if damaged > 1 else ""} dropped'] if damaged else []
    return [found for _, found in kept], lost


def whole_lines(path: pathlib.Path) -> list[str]:
    """The lines that end in a newline."""
    return files.read_text(path, errors='replace').split('\n')[:-1]


def read_lines(path: pathlib.Path, needed: str = 'step') -> list[dict[str, Any]]:
    """The objects of a `.jsonl` file, without an incomplete last line.

    Raises `UserError` naming a damaged line, such as one without the number that is `needed`.
    """
    lines = whole_lines(path) if path.exists() else []
    found = [each if each is not None and needed in each else None for each in map(_parsed, lines)]
    if None in found:
        raise UserError(
            f'line {found.index(None) + 1} of {path} is damaged: {lines[found.index(None)][:40]!r}; remove that line'
        )
    return [line for line in found if line is not None]


def speeds(workdir: pathlib.Path) -> list[float]:
    """Tokens a second of training, as a run reported them.

    Raises `UserError` naming a damaged line, or a speed that no device has, of which nothing can be drawn.
    """
    found = [float(line['tokens_per_second']) for line in read_lines(workdir / SPEED, 'tokens_per_second')]
    for speed in found:
        if not 0 < speed < FASTEST:
            raise UserError(f'{workdir / SPEED} is damaged: a speed is {speed:g} tokens a second; remove that line')
    return found


def _parsed(line: str) -> dict[str, Any] | None:
    """The numbers of a line with its step; `None` for a damaged one."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or type(found.get('step')) is not int:
        return None
    return found if all(map(_is_number, found.values())) else None


def _is_number(value: Any) -> bool:
    """Whether `append_line` writes a value so; numbers that are not finite are text."""
    if isinstance(value, str):
        return value in ('nan', 'inf', '-inf')
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
