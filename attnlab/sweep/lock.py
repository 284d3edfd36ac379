"""Locks that the kernel takes back when their holder dies, however it dies.

A lock is `flock` on a file that is never removed. On a network file system it holds between hosts if that file system
carries `flock`, as NFS version 4 and Lustre (mounted with `flock`) do.
"""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from optuna.storages.journal import JournalFileOpenLock

from attnlab.errors import UserError


class Lock:
    """One file's lock, held or not."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._file: int | None = None

    def acquire(self, *, wait: bool = True) -> bool:
        """Takes the lock; without `wait`, returns False where another holds it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(file)
            return False
        except OSError as error:
            os.close(file)
            raise UserError(
                f'{self._path} cannot be locked: {error.strerror}; a sweep wants a file system with flock'
            ) from error
        self._file = file
        return True

    def release(self) -> None:
        """Gives the lock back."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def taken(self) -> bool:
        """Whether another holds the lock."""
        if not self._path.exists():
            return False
        free = self.acquire(wait=False)
        self.release()
        return not free

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock inside."""
        self.acquire()
        try:
            yield
        finally:
            self.release()


class JournalLock(JournalFileOpenLock):
    """The lock of Optuna's journal; also mends a last line that a writer did not live to finish.

    Optuna's own locks are files whose presence is the lock: those of dead holders are broken after a guessed time.
    """

    def __init__(self, journal: pathlib.Path):
        super().__init__(str(journal))
        self._journal = journal
        self._lock = Lock(journal.with_suffix('.lock'))

    def acquire(self) -> bool:
        self._lock.acquire()
        with self._journal.open('rb+') as file:
            content = file.read()
            if content and not content.endswith(b'\n'):
                file.truncate(content.rfind(b'\n') + 1)
        return True

    def release(self) -> None:
        self._lock.release()
