"""Locks that the kernel takes back when their holder dies, however it dies.

A lock is `flock` on a file that is never removed. On a network file system it holds between hosts if that file system
carries `flock`, as NFS version 4 and Lustre (mounted with `flock`) do.
"""

import contextlib
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator

from attnlab import files
from attnlab.errors import UserError


class Lock:
    """One file's lock, held or not."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._file: int | None = None

    def acquire(self, *, wait: bool = True) -> bool:
        """Takes the lock; without `wait`, returns False where another holds it.

        Raises `UserError` for what is no file.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = files.opened(self._path, os.O_RDWR | os.O_CREAT)
        if not self._locked(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)):
            return False
        self._file = file
        os.ftruncate(file, 0)
        os.pwrite(file, f'process {os.getpid()} on {socket.gethostname()}'.encode(), 0)
        return True

    def holder(self) -> str:
        """The process that took the lock last, and its host."""
        return files.read_text(self._path, errors='replace') or 'another process'

    def release(self) -> None:
        """Gives the lock back."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def taken(self) -> bool:
        """Whether another holds the lock; writes nothing. Raises `UserError` for what is no file."""
        try:
            file = files.opened(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        if not self._locked(file, fcntl.LOCK_SH | fcntl.LOCK_NB):
            return True
        os.close(file)
        return False

    def _locked(self, file: int, how: int) -> bool:
        """Whether an open file could be locked; it is closed where not."""
        try:
            fcntl.flock(file, how)
        except BlockingIOError:
            os.close(file)
            return False
        except OSError as error:
            os.close(file)
            raise UserError(
                f'{self._path} cannot be locked: {error.strerror}; it must be on a file system that supports flock'
            ) from error
        return True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock inside."""
        self.acquire()
        try:
            yield
        finally:
            self.release()
