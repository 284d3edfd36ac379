"""Trials that several processes run together, as one program of `jax.distributed`.

The first process alone claims trials and writes to the study. It sends messages to the others: a trial, by its folder,
number and point; at each evaluation, whether to continue; nothing to do yet; the end. All processes send and receive
the same sequence of messages. A process that fails where others may not have failed ends its worker, and
`jax.distributed` ends those that wait for it; the trial resumes when they are restarted.
"""

import dataclasses
import enum
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from attnlab.errors import UserError
from attnlab.sweep.space import Drawn
from attnlab.train import loop

BLOCK = 1024
"""Message sizes are multiples of this many bytes, so that few programs are compiled to send them."""


class Word(enum.IntEnum):
    """The message of the first process after an evaluation."""

    GO_ON = 0
    STOP = 1
    ABANDON = 2


class Leaving(BaseException):
    """This process received a signal to stop, and has nothing to save."""


class Abandoned(Exception):
    """The first process abandoned the trial."""


@dataclasses.dataclass(frozen=True)
class Order:
    """A message: a trial to run.

    Attributes:
      study: the study's folder, below that of the sweep: '.' or 'confirm'.
      number: of the trial.
      drawn: its point of the space.
    """

    study: str
    number: int
    drawn: dict[str, Drawn]


def first() -> bool:
    """Whether this process is the first, which claims trials."""
    return jax.process_index() == 0


def broadcast(message: Any) -> Any:
    """Returns the message of the first process, in every process; messages are plain data."""
    if jax.process_count() == 1:
        return message
    text = json.dumps(message).encode() if first() else b''
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.zeros(-(-size // BLOCK) * BLOCK, np.int32)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    received = multihost_utils.broadcast_one_to_all(padded)
    return json.loads(bytes(received[:size].astype(np.uint8)))


class Followers:
    """The other processes of a worker, as seen by the first; there may be none."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._in_step = True
        self._speaking = False
        self._leaving = False

    @property
    def in_step(self) -> bool:
        """Whether all of them are known to wait for a message between trials."""
        return self._in_step

    def leave(self, *_: Any) -> None:
        """Handles a signal: raises Leaving, once no message is being sent and no trial is being started."""
        if self._speaking or not self._in_step:
            self._leaving = True
        else:
            raise Leaving

    def idle(self) -> None:
        """Sends that there is nothing to do yet."""
        self._send({})

    def end(self) -> None:
        """Sends that there are no more trials."""
        if self._in_step:
            self._send({'end': True})

    def run(self, study: pathlib.Path, number: int, drawn: dict[str, Drawn]) -> None:
        """Sends a trial, which the caller runs too; until `ran` the processes are not in step."""
        order = Order(str(study.relative_to(self._folder)), number, drawn)
        self._send({'run': dataclasses.asdict(order)})
        self._in_step = jax.process_count() == 1

    def ran(self) -> None:
        """Marks the trial as ended in the same way in every process."""
        self._in_step = True

    def broadcasting(self, watch: loop.Watch) -> loop.Watch:
        """Returns a watch whose answers are sent to the others; an exception it raises ends the trial for them."""

        def shared(step: int, numbers: Mapping[str, float]) -> bool:
            try:
                stopping = watch(step, numbers) or self._leaving
            except BaseException:
                self._send(Word.ABANDON)
                self._in_step = True
                raise
            self._send(Word.STOP if stopping else Word.GO_ON)
            return stopping

        return shared

    def _send(self, message: Any) -> None:
        self._speaking = True
        try:
            broadcast(message)
        finally:
            self._speaking = False
        if self._leaving and self._in_step:
            raise Leaving


def heard(step: int, numbers: Mapping[str, float]) -> bool:
    """The watch of every other process: receives the answer. Raises Abandoned where the first process gave up."""
    word = broadcast(None)
    if word == Word.ABANDON:
        raise Abandoned
    return bool(word == Word.STOP)


def next_order() -> Order | None:
    """Waits for the next trial; `None` at the end."""
    while not (message := broadcast(None)):
        pass
    return None if 'end' in message else Order(**message['run'])


class OutOfStep(UserError):
    """One of several processes failed during a trial."""
