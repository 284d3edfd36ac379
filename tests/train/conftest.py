import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SMALL = [
    '--config=configs/language.py:zoo=mingru',
    '--config.model.dim=16',
    '--config.model.stack.depth=2',
    '--config.length=32',
    '--config.batch_size=8',
    '--config.steps=120',
    '--config.checkpoint.every=30',
    '--config.checkpoint.keep=3',
    '--config.report.every=7',
    '--config.evals[0].cadence.n=50',
    '--config.evals[0].tokens=512',
]


@dataclasses.dataclass
class Command:
    """An `attnlab` process."""

    process: subprocess.Popen

    def finish(self, timeout: float = 240) -> tuple[int, str]:
        """Exit status and everything it printed."""
        output, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, output

    def send(self, number: signal.Signals, workdir: pathlib.Path, step: int) -> None:
        """Sends a signal once metrics.jsonl has reached a step; fails if the process ended before."""
        while last_step(workdir) < step:
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.002)
        os.kill(self.process.pid, number)


def last_step(workdir: pathlib.Path) -> int:
    path = workdir / 'metrics.jsonl'
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line)['step'] for line in lines if line.endswith('\n')]
    return max(whole, default=0)


def pytest_collection_modifyitems(items):
    """Tests that share a run of the session are run by one worker, which then trains it once."""
    for item in items:
        for shared in {'unbroken', 'single'} & set(getattr(item, 'fixturenames', ())):
            item.add_marker(pytest.mark.xdist_group(shared))


@pytest.fixture(scope='session')
def attnlab(compiled):
    """Starts `attnlab COMMAND ...` on one CPU device."""

    def start(*arguments: str) -> Command:
        command = [sys.executable, '-m', 'attnlab', *arguments]
        if arguments[0] in ('train', 'eval', 'generate'):
            command += [f'--compilation_cache={compiled}', '--platform=cpu']
        return Command(subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))

    return start


@pytest.fixture(scope='session')
def train(attnlab):
    """Starts a small run; what is given takes the place of what `SMALL` has for the same flag."""

    def start(workdir: pathlib.Path, *arguments: str) -> Command:
        flags = {item.partition('=')[0]: item for item in (*SMALL, f'--workdir={workdir}', *arguments)}
        return attnlab('train', *flags.values())

    return start


@pytest.fixture(scope='session')
def unbroken(train, tmp_path_factory):
    """The work directory of a run that nothing interrupted."""
    workdir = tmp_path_factory.mktemp('runs') / 'unbroken'
    status, output = train(workdir).finish()
    assert status == 0, output
    return workdir


@pytest.fixture
def mount(tmp_path):
    """Mounts a disk of a size such as '160k', or resizes it, and returns its folder; skips where not allowed."""
    folder = tmp_path / 'disk'
    folder.mkdir()

    def resized(size: str) -> pathlib.Path:
        options = f'size={size}' + (',remount' if folder.is_mount() else '')
        command = ['mount', '-t', 'tmpfs', '-o', options, 'tmpfs', folder]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip('mounting a small disk takes root')
        return folder

    yield resized
    if folder.is_mount():
        subprocess.run(['umount', folder], check=True)
