"""When one of several processes dies, the others end within seconds, and name it."""

import os
import re
import signal
import socket
import time

import pytest

from tests.train.conftest import last_step


@pytest.mark.parametrize('victim', [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_process_that_dies_ends_the_others_by_name(train, tmp_path, victim):
    with socket.socket() as sock:
        sock.bind(('localhost', 0))
        port = sock.getsockname()[1]
    workdir = tmp_path / 'run'
    shared = ('--config.steps=100000', '--config.evals=()', f'--coordinator=localhost:{port}', '--processes=2')
    commands = [train(workdir, *shared, f'--process={index}') for index in range(2)]
    while last_step(workdir) < 14:
        assert all(command.process.poll() is None for command in commands)
        time.sleep(0.1)
    os.kill(commands[victim].process.pid, signal.SIGKILL)
    began = time.monotonic()
    status, output = commands[1 - victim].finish()
    took = time.monotonic() - began
    commands[victim].finish()
    assert took < 60 and status == 1, output
    lines = [line for line in output.splitlines() if line.startswith('attnlab: ')]
    assert len(lines) == 1 and 'Traceback' not in output, output
    assert re.fullmatch(
        rf'attnlab: process {victim} of 2 has ended: .*; process {1 - victim} ends too. '
        'The same commands go on from the last checkpoint',
        lines[0],
    )
