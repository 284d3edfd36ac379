"""The lock of a study's journal."""

import os
import pathlib

from optuna.storages.journal import JournalFileOpenLock

from attnlab import files
from attnlab.locks import Lock


class JournalLock(JournalFileOpenLock):
    """The lock of Optuna's journal; acquiring it also removes an incomplete last line, left by a killed writer.

    Optuna's own locks are files whose existence is the lock; those of dead holders are broken after a fixed timeout.
    """

    def __init__(self, journal: pathlib.Path):
        super().__init__(str(journal))
        self._journal = journal
        self._lock = Lock(journal.with_suffix('.lock'))

    def acquire(self) -> bool:
        self._lock.acquire()
        with os.fdopen(files.opened(self._journal, os.O_RDWR), 'rb+') as file:
            content = file.read()
            if content and not content.endswith(b'\n'):
                file.truncate(content.rfind(b'\n') + 1)
        return True

    def release(self) -> None:
        self._lock.release()
