"""Lists that collect what is recorded while they are open, in one thread."""

import contextlib
import contextvars
from collections.abc import Iterator


class Ledger[T]:
    """What is recorded goes into every list that is being collected, also those around the innermost.

    Args:
      name: shown by debuggers.
    """

    def __init__(self, name: str):
        self._open: contextvars.ContextVar[tuple[list[T], ...]] = contextvars.ContextVar(name, default=())

    def record(self, entry: T) -> None:
        """Adds an entry to the lists that this thread collects."""
        for found in self._open.get():
            found.append(entry)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[list[T]]:
        """Collects what is recorded inside the `with` block, in this thread."""
        found: list[T] = []
        token = self._open.set((*self._open.get(), found))
        try:
            yield found
        finally:
            self._open.reset(token)
