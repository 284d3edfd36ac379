"""Makes tests/durations.txt, by which tests/conftest.py leaves tests to the night, of the output of a run of all.

    make test-all ARGS='--durations=0 --durations-min=0.5' | python tests/durations.py

A line is of a test, or of the fixtures that it was the first to ask for (`setup`), with the seconds it took.
"""

import pathlib
import re
import sys
from collections.abc import Iterable

FILE = pathlib.Path(__file__).with_suffix('.txt')
LEAST = 0.5
"""Seconds below which a test is left out."""

LINE = re.compile(r'(?P<seconds>[\d.]+)s (?P<phase>call|setup) +(?P<test>\S.*)')
GROUP = re.compile(r'(?<=\])@[^\]]*$|(?<!\])@[^\[\]]*$')
"""What pytest-xdist puts behind the name of a test."""


def read(text: Iterable[str]) -> dict[tuple[str, str], float]:
    """Seconds by test and phase, of pytest's output or of the file."""
    found = (LINE.match(line.rstrip('\n')) for line in text)
    lines = ((GROUP.sub('', line['test']), line['phase'], float(line['seconds'])) for line in found if line)
    return {(test, phase): seconds for test, phase, seconds in lines if seconds >= LEAST}


def written(found: dict[tuple[str, str], float]) -> str:
    """The file."""
    return ''.join(f'{seconds:.1f}s {phase:5} {test}\n' for (test, phase), seconds in sorted(found.items()))


if __name__ == '__main__':
    FILE.write_text(written(read(sys.stdin)))
