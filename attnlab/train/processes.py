"""Several processes that train together: when one ends before its time, the others end too, and say which it was.

A step waits for all processes, so that without one of them the others would wait for ever. Each tells the coordination
service of JAX, which process 0 runs, every second that it lives, and looks whether the others have. Where the service
stops answering, though its connection is not closed, as when a network goes silent or process 0 is stopped, process 0
counts as dead.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed

from attnlab.errors import UserError

BEAT = 1.0
"""Seconds between two signs of life."""

SILENCE = 12.0
"""Seconds without a sign of life after which a process counts as dead."""

FIRST = 120.0
"""The same before its first sign, as imports from a shared disk may take long. JAX misses one that died before that."""

SUSPECTED = 4.0
"""The same once the runtime has complained, most often of a process that it misses."""

RECONNECTED = 0.1
"""Seconds before a closed connection to the service is opened again."""

GRACE = 4.0
"""Seconds that a process has to end by itself after another has failed: both may have the same reason."""

FAILED, INTERRUPTED = 1, 130
"""The exit status of a process that ends because another has, and of one that Ctrl-C ends."""

FOLDER = 'attnlab/processes'
LIVES, DONE, FAILS = 'lives', 'done', 'fails'


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Ends this process, in one line, where another of the same run dies, or fails, inside of the `with` block."""
    client, address = distributed.global_state.client, distributed.global_state.coordinator_address
    if jax.process_count() == 1 or client is None or address is None:
        yield
        return
    watch = _Watch(client, address, jax.process_index(), jax.process_count())
    try:
        yield
    except KeyboardInterrupt:
        watch.leave(FAILS, 'it was interrupted')
        atexit.register(_end_without_others, INTERRUPTED)
        raise
    except Exception as error:
        if not isinstance(error, UserError | OSError):
            watch.suspect()
        watch.leave(FAILS, str(error) or type(error).__name__)
        atexit.register(_end_without_others, 2 if isinstance(error, UserError | OSError) else FAILED)
        raise
    watch.leave(DONE)


@dataclasses.dataclass
class _Heard:
    """The last sign of life of another process, and when it came."""

    sign: str
    at: float


class _Watch:
    """Signs of life of this process, and of the others."""

    def __init__(self, client: Any, address: str, index: int, count: int):
        self._client, self._address, self._index, self._count = client, address, index, count
        self._left, self._ending = threading.Event(), threading.Event()
        self._silence = SILENCE
        self._heard: dict[int, _Heard] = {}
        self._answers = 0
        _delay_aborts()
        for run in (self._beat, *([self._await_end_of_service, self._await_silence_of_service] if index else [])):
            threading.Thread(target=run, name=f'attnlab-{run.__name__}', daemon=True).start()

    def suspect(self) -> None:
        """Returns when every other process has given a sign of life; otherwise this one ends here."""
        self._silence = SUSPECTED
        if self._ending.wait(SUSPECTED + 2 * BEAT):
            threading.Event().wait()

    def leave(self, how: str, why: str = '') -> None:
        """Ends the watch, and tells the others."""
        self._left.set()
        # Without the service nobody can be told.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._tell(how, why.partition('\n')[0])

    def _beat(self) -> None:
        beats = 0
        while not self._left.wait(BEAT):
            beats += 1
            try:
                self._tell(LIVES, str(beats))
                others = dict(self._client.key_value_dir_get(FOLDER))
            except jax.errors.JaxRuntimeError:
                continue  # The other threads know whether the service is gone for good.
            self._answers += 1
            for index in set(range(self._count)) - {self._index}:
                self._look(index, others.get(f'{FOLDER}/{index}', ''))

    def _await_end_of_service(self) -> None:
        """Keeps a connection to the service, and hears at once when nobody is at its other end any more.

        A call of the service's own may not come back: JAX's runtime holds its lock while it aborts.
        """
        host, _, port = self._address.rpartition(':')
        try:
            while not self._left.wait(RECONNECTED):
                with socket.create_connection((host.strip('[]'), int(port)), SILENCE) as connection:
                    connection.settimeout(None)
                    with contextlib.suppress(ConnectionResetError):
                        while connection.recv(4096):
                            pass
        except OSError:
            self._end(0, 'it does not answer')

    def _await_silence_of_service(self) -> None:
        """Counts the seconds in which the service has answered nothing, while its connection stands.

        Seconds, not the time of day: where this process was itself stopped for a while, that counts as one.
        """
        silent, answers = 0, 0
        while not self._left.wait(BEAT):
            silent, answers = silent + 1 if self._answers == answers else 0, self._answers
            if silent * BEAT > self._silence:
                self._end(0, f'it has not answered for {silent * BEAT:.0f} s')

    def _look(self, index: int, sign: str) -> None:
        now = time.monotonic()
        heard = self._heard.setdefault(index, _Heard(sign, now))
        if sign != heard.sign:
            heard = self._heard[index] = _Heard(sign, now)
        how, _, why = sign.partition(' ')
        silence = now - heard.at
        if how == FAILS and silence > GRACE:
            self._end(index, why)
        if (how == LIVES and silence > self._silence) or (how == '' and silence > FIRST):
            self._end(index, f'nothing was heard of it for {silence:.0f} s')

    def _tell(self, how: str, what: str) -> None:
        self._client.key_value_set(f'{FOLDER}/{self._index}', f'{how} {what}', allow_overwrite=True)

    def _end(self, index: int, why: str) -> None:
        """Ends this process where it stands, since its other threads wait for what does not come."""
        if self._left.is_set():
            return
        self._ending.set()
        message = (
            f'attnlab: process {index} of {self._count} has ended: {why}; process {self._index} ends too. '
            'The same commands go on from the last checkpoint'
        )
        print(message, file=sys.stderr, flush=True)
        _end_without_others(FAILED)


def _delay_aborts() -> None:
    """Lets a process live for six seconds after an abort: time for a thread of Python to say why.

    When the service goes, JAX's runtime aborts in a thread of its own while `_await_end_of_service` hears of it. No
    handler in Python would be run then; this one is `sleep` of the C library, called with the number of the signal, 6.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


def _end_without_others(status: int) -> None:
    """Ends this process without the barrier at which JAX waits for all; the one with the service after the others."""
    if jax.process_index() == 0:
        time.sleep(GRACE + 2 * BEAT)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
