"""When one of several processes dies, the others end within seconds, and name it."""

import contextlib
import os
import re
import signal
import socket
import threading
import time
import types

import jax
import numpy as np
import pytest

from attnlab.train import loop, processes
from tests.train.conftest import last_step


class Service:
    """A coordination service: a port that takes connections and says nothing, and calls that answer until told not to.

    A call that is not answered does not come back, as over a network that has gone silent.
    """

    def __init__(self):
        self.listening = socket.create_server(('localhost', 0))
        self.address = f'localhost:{self.listening.getsockname()[1]}'
        self.answers, self.never = True, threading.Event()
        self.signs: dict[str, str] = {}

    def key_value_set(self, key, value, allow_overwrite):
        if not self.answers:
            self.never.wait()
        self.signs[key] = value

    def key_value_dir_get(self, folder):
        others = {f'{folder}/0': f'lives {time.monotonic()}'}
        return (self.signs | others).items()


@pytest.fixture
def service(monkeypatch):
    """A service for processes whose seconds are short and that do not end, but say that they would."""
    monkeypatch.setattr(processes, 'BEAT', 0.02)
    monkeypatch.setattr(processes, 'SILENCE', 0.4)
    monkeypatch.setattr(processes, '_delay_aborts', lambda: None)
    ended = []
    monkeypatch.setattr(processes, '_end_without_others', ended.append)
    service = Service()
    with contextlib.closing(service.listening):
        yield service, ended
        service.never.set()


def wait_until(true):
    deadline = time.monotonic() + 20
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_service_that_goes_silent_without_closing_ends_the_process(service, capsys):
    service, ended = service
    watch = processes._Watch(service, service.address, 1, 2)
    # Twice as many seconds as silence may last.
    wait_until(lambda: watch._answers >= 2 * processes.SILENCE / processes.BEAT)
    assert not ended, capsys.readouterr().err
    service.answers = False
    wait_until(lambda: ended)
    watch._left.set()
    assert set(ended) == {processes.FAILED}
    assert 'attnlab: process 0 of 2 has ended: it has not answered for' in capsys.readouterr().err


@pytest.mark.parametrize('asked', [False, True])
def test_what_another_process_was_asked_is_heard_after_the_last_step_too(asked, monkeypatch):
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(loop.multihost_utils, 'process_allgather', lambda own: np.stack([own, np.array(asked)]))
    stop = threading.Event()
    assert not any(loop._should_stop(stop, number, 20) for number in (15, 17, 19)) and not stop.is_set()
    for number in (16, 20):
        stop.clear()
        assert loop._should_stop(stop, number, 20) == stop.is_set() == asked


def test_an_interrupted_process_says_so_and_ends_without_the_others(service, monkeypatch):
    service, _ = service
    state = types.SimpleNamespace(client=service, coordinator_address=service.address)
    monkeypatch.setattr(processes.distributed, 'global_state', state)
    for name, number in (('process_count', 2), ('process_index', 1)):
        monkeypatch.setattr(jax, name, lambda number=number: number)
    registered = []
    monkeypatch.setattr(processes.atexit, 'register', lambda *arguments: registered.append(arguments[1:]))
    with pytest.raises(KeyboardInterrupt), processes.together():
        raise KeyboardInterrupt
    assert service.signs[f'{processes.FOLDER}/1'] == 'fails it was interrupted' and registered == [(130,)]


def test_a_process_that_begins_later_is_waited_for(service, monkeypatch):
    service, ended = service
    monkeypatch.setattr(processes, 'FIRST', 2.0)
    others = []
    monkeypatch.setattr(service, 'key_value_dir_get', lambda folder: [*service.signs.items(), *others])
    watch = processes._Watch(service, service.address, 1, 2)
    wait_until(lambda: watch._answers >= 3 * processes.SILENCE / processes.BEAT)
    assert not ended
    wait_until(lambda: ended)
    watch.leave(processes.DONE)
    assert ended


def test_a_call_that_fails_once_is_no_end(service, monkeypatch):
    service, ended = service
    calls = []

    def fail_once(folder):
        calls.append(folder)
        if len(calls) == 2:
            raise processes.jax.errors.JaxRuntimeError('UNAVAILABLE: for a moment')
        return Service.key_value_dir_get(service, folder)

    monkeypatch.setattr(service, 'key_value_dir_get', fail_once)
    watch = processes._Watch(service, service.address, 1, 2)
    wait_until(lambda: len(calls) >= 30)
    watch.leave(processes.DONE)
    assert len(calls) >= 30 and not ended
    assert service.signs[f'{processes.FOLDER}/1'].startswith(processes.DONE)


@pytest.mark.parametrize(
    ('victim', 'how'),
    [
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
        (1, signal.SIGKILL),
        # A process that is stopped keeps its connections open and answers nothing.
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies_ends_the_others_by_name(train, tmp_path, victim, how):
    with socket.socket() as sock:
        sock.bind(('localhost', 0))
        port = sock.getsockname()[1]
    workdir = tmp_path / 'run'
    shared = ('--config.steps=100000', '--config.evals=()', f'--coordinator=localhost:{port}', '--processes=2')
    commands = [train(workdir, *shared, f'--process={index}') for index in range(2)]
    while last_step(workdir) < 14:
        assert all(command.process.poll() is None for command in commands)
        time.sleep(0.1)
    os.kill(commands[victim].process.pid, how)
    began = time.monotonic()
    status, output = commands[1 - victim].finish()
    took = time.monotonic() - began
    commands[victim].process.kill()
    commands[victim].finish()
    assert took < 60 and status == 1, output
    lines = [line for line in output.splitlines() if line.startswith('attnlab: ')]
    assert len(lines) == 1 and 'Traceback' not in output, output
    assert re.fullmatch(
        rf'attnlab: process {victim} of 2 has ended: .*; process {1 - victim} ends too. '
        'The same commands go on from the last checkpoint',
        lines[0],
    )
