"""The record of a session: a line of JSON per case, written to disk before the next case begins."""

import json
import os
import pathlib
import subprocess
from collections.abc import Iterable
from typing import Any

Line = dict[str, Any]
STATUSES = ('ok', 'wrong', 'failed', 'timeout', 'skipped')


class Unusable(ValueError):
    """What a session was given cannot be used; the message is one line."""


def text_of(path: pathlib.Path, expected: str) -> str:
    """The text of a file that should be what is expected. Raises `Unusable` where it cannot be read."""
    try:
        return path.read_text(errors='replace')
    except OSError as error:
        raise Unusable(f'{path} is not read ({error.strerror}); expected {expected}') from error


class Record:
    """A file to which lines are appended; a line cut off by a power failure stays separate."""

    def __init__(self, path: pathlib.Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and not path.read_bytes().endswith(b'\n') and path.stat().st_size > 0
        self._file = path.open('ab')
        if torn:
            self._file.write(b'\n')

    def add(self, line: Line) -> None:
        """Writes a line and waits until it is on disk."""
        self._file.write(json.dumps(line).encode() + b'\n')
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read(paths: Iterable[pathlib.Path]) -> list[Line]:
    """The lines of several records, without incomplete ones. Raises `Unusable` for what is no record."""
    found = []
    for path in paths:
        for text in text_of(path, 'the session.jsonl of a session').splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if not (isinstance(line, dict) and {'id', 'status'} <= line.keys()):
                raise Unusable(f'{path} is no record of a session: not every line has an id and a status')
            found.append(line)
    return found


def newest(paths: Iterable[pathlib.Path]) -> dict[str, Line]:
    """The last line of every case; a skipped one does not replace one that was run."""
    found: dict[str, Line] = {}
    for line in read(paths):
        if line['status'] != 'skipped' or found.get(line['id'], line)['status'] == 'skipped':
            found[line['id']] = line
    return found


def commit(root: pathlib.Path) -> str:
    """The commit of a checkout; without git, the one recorded by `prepare`."""
    try:
        answer = subprocess.run(
            ['git', 'describe', '--always', '--dirty'], cwd=root, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return 'unknown'
    return answer.stdout.strip() or 'unknown'
