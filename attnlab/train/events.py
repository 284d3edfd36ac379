"""The events of a run, for TensorBoard."""

import pathlib
import time
from collections.abc import Mapping

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

EVERY = 30.0
"""Seconds after which what was written is on the disk."""


class Events:
    """A new file of events in a folder; those of steps from `purge` on that are there already are hidden.

    `tensorboardX.SummaryWriter` writes in a thread, and waits for it for ever once that has died of a full disk.
    """

    def __init__(self, folder: pathlib.Path, *, purge: int | None = None):
        self._writer = EventsWriter(str(folder / 'events'))
        self._flushed = time.monotonic()
        if purge is not None:
            self._writer.write_event(Event(step=purge, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Adds the numbers of a step. Raises OSError where the disk is full."""
        for name, value in numbers.items():
            self._writer.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
        if time.monotonic() - self._flushed > EVERY:
            self._flushed = time.monotonic()
            self._writer.flush()

    def close(self) -> None:
        """Writes what is left. Raises OSError where the disk is full."""
        self._writer.close()
