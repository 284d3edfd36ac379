"""A trial that several processes run together, as one program of `jax.distributed`.

The first process alone looks for trials and writes to the study. The others do what it says: a trial, by its folder,
number and point; at each of its evaluations, whether to go on; nothing for now; the end. All of them are always at the
same word of this conversation, or on the way there. A process that fails where the others may not have ends its worker,
and `jax.distributed` ends those that wait for it; the trial goes on when they are started again.
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
"""Messages are sent in multiples of so many bytes, that few programs are compiled for them."""


class Word(enum.IntEnum):
    """What the first process says after an evaluation."""

    GO_ON = 0
    STOP = 1
    ABANDON = 2


class Leaving(BaseException):
    """This process was asked to stop, and has nothing to save."""


class Abandoned(Exception):
    """The first process gave the trial up."""


@dataclasses.dataclass(frozen=True)
class Order:
    """A trial to run.

    Attributes:
      study: the study's folder, below that of the sweep: '.' or 'confirm'.
      number: of the trial.
      drawn: its point of the space.
    """

    study: str
    number: int
    drawn: dict[str, Drawn]


def first() -> bool:
    """Whether this process is the one that claims."""
    return jax.process_index() == 0


def broadcast(message: Any) -> Any:
    """Returns, in every process, the message of the first; plain data."""
    if jax.process_count() == 1:
        return message
    text = json.dumps(message).encode() if first() else b''
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.zeros(-(-size // BLOCK) * BLOCK, np.int32)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    received = multihost_utils.broadcast_one_to_all(padded)
    return json.loads(bytes(received[:size].astype(np.uint8)))


class Followers:
    """The other processes of a worker, as the first one speaks to them; there may be none."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._in_step = True
        self._speaking = False
        self._leaving = False

    @property
    def in_step(self) -> bool:
        """Whether they are known to wait for a word between trials."""
        return self._in_step

    def leave(self, *_: Any) -> None:
        """Handles a signal: raises Leaving, once no word is half said and no trial half begun."""
        if self._speaking or not self._in_step:
            self._leaving = True
        else:
            raise Leaving

    def idle(self) -> None:
        """Nothing for now."""
        self._send({})

    def end(self) -> None:
        """No more trials."""
        if self._in_step:
            self._send({'end': True})

    def run(self, study: pathlib.Path, number: int, drawn: dict[str, Drawn]) -> None:
        """They begin a trial, and so does the caller; until `ran` they are not in step."""
        order = Order(str(study.relative_to(self._folder)), number, drawn)
        self._send({'run': dataclasses.asdict(order)})
        self._in_step = jax.process_count() == 1

    def ran(self) -> None:
        """The trial came to an end that is the same in every process."""
        self._in_step = True

    def broadcasting(self, watch: loop.Watch) -> loop.Watch:
        """A watch whose answers the others hear; what it raises ends the trial for them."""

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
    """The watch of a process that follows. Raises Abandoned where the first gave up."""
    word = broadcast(None)
    if word == Word.ABANDON:
        raise Abandoned
    return bool(word == Word.STOP)


def next_order() -> Order | None:
    """Waits for the next trial; `None` is the end."""
    while not (message := broadcast(None)):
        pass
    return None if 'end' in message else Order(**message['run'])


class OutOfStep(UserError):
    """A process of several failed in the middle of a trial."""
