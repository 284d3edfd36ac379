"""Whose turn it is on the device: many processes compile at once, and one that times is alone.

Compilers try their choices on the device, so nobody compiles while something is timed.
"""

import contextlib
import fcntl
import json
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

FILE = 'turn.json'
ALONE = 60.0
"""Seconds that one may be alone."""


def forget(folder: pathlib.Path) -> None:
    """Removes what the processes of an earlier session told one another."""
    (folder / FILE).unlink(missing_ok=True)


class Turn(contextlib.AbstractContextManager):
    """This process's place among those that run the cases of a folder, by a lock on a file there."""

    def __init__(self, folder: pathlib.Path):
        self._file = (folder / FILE).open('a+')

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Beside others that compile."""
        fcntl.flock(self._file, fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def alone(self, seconds: float = ALONE) -> Iterator[None]:
        """Without others, as soon as these have compiled; within `compiling` or not.

        The process is ended by SIGALRM after `seconds`, as all others wait for one whose kernel hangs.
        """
        # A lock that is converted is given up first, so that two that wait for each other are not stuck.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def once(self, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `measure` returns to the first process of a session that asks, alone; all others are told that."""
        with self.alone():
            self._file.seek(0)
            text = self._file.read()
            if not text:
                text = json.dumps(measure())
                self._file.write(text)
                self._file.flush()
        return json.loads(text)
