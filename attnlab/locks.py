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
                f'{self._path} cannot be locked: {error.strerror}; it must be on a file system that supports flock'
            ) from error
        self._file = file
        os.ftruncate(file, 0)
        os.pwrite(file, f'process {os.getpid()} on {socket.gethostname()}'.encode(), 0)
        return True

    def holder(self) -> str:
        """The process that took the lock last, and its host."""
        return self._path.read_text() or 'another process'

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
