"""The parent of a session: gives cases to workers, one at a time, and survives their failures.

It imports nothing that could touch the device. Workers lead their own process groups, so that processes they start die
with them.
"""

import collections
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from scripts.session import cases as session_cases
from scripts.session import lines, turn
from scripts.session.cases import SMOKE, STAGES, Case, Stage

START = 90.0
"""Seconds in which a worker must report."""

DYING = 20.0
"""Seconds in which a killed process is gone, unless it hangs where no signal reaches it, in the device's driver."""

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / 'gpu_session.py'
ROOT = SCRIPT.parent.parent
TOOLKIT = '/usr/local/cuda/bin'
OK, NOT_ALL_RIGHT, DEAD = 0, 1, 3


@dataclasses.dataclass(frozen=True)
class Session:
    """The options of the command line."""

    folder: pathlib.Path
    out: pathlib.Path
    minutes: float = 9.0
    workers: int | None = None
    patience: float = 1.0
    commit: str = 'unknown'
    only: Sequence[str] = ()


class Worker:
    """A process in its own group, with its current case, if any."""

    def __init__(self, folder: pathlib.Path, stage: Stage, log: IO[bytes], limit: float):
        read, write = os.pipe()
        command = [sys.executable, str(SCRIPT), 'worker', f'--from={folder}', f'--results={write}']
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(stage),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(write,),
            start_new_session=True,
        )
        os.close(write)
        os.set_blocking(read, False)
        self.results = read
        self.case: Case | None = None
        self.ready = False
        self.deadline = time.monotonic() + limit
        self._rest = b''

    def assign(self, case: Case, patience: float) -> None:
        """Gives the process a case, whose time counts from when the process is ready."""
        self.case = case
        if self.ready:
            self._send(patience)

    def begin(self, patience: float) -> None:
        """Called when the process has reported that it is ready."""
        self.ready = True
        if self.case is not None:
            self._send(patience)

    def _send(self, patience: float) -> None:
        assert self.case is not None and self.process.stdin is not None
        self.deadline = time.monotonic() + patience * self.case.seconds
        # A process that has just died is handled where its results are read.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(dataclasses.asdict(self.case)).encode() + b'\n')
            self.process.stdin.flush()

    def receive(self) -> list[dict[str, Any]] | None:
        """The lines received; `None` when the process has ended."""
        try:
            data = os.read(self.results, 1 << 20)
        except BlockingIOError:
            return []
        if not data:
            return None
        *whole, self._rest = (self._rest + data).split(b'\n')
        return [json.loads(line) for line in whole]

    def kill(self) -> int:
        """Kills the process and all that it started; returns its status, also of one that does not go."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        os.close(self.results)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            return self.process.wait(DYING)
        except subprocess.TimeoutExpired:
            # Whether the device is dead with it the check of the device says.
            return -signal.SIGKILL


def environment(stage: Stage) -> dict[str, str]:
    """The environment of a worker: the checkout first on the path, and the assembler where toolkits install it."""
    paths = [str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]
    return {
        **os.environ,
        **stage.environment,
        'PYTHONPATH': os.pathsep.join(paths),
        'PATH': os.pathsep.join([os.environ.get('PATH', os.defpath), TOOLKIT]),
    }


def versions() -> dict[str, str]:
    """The installed versions of the packages that figures depend on."""
    found = {}
    for name in ('jax', 'jaxlib', 'jax-cuda13-plugin', 'tokamax', 'jax-linear-attention', 'fla-core', 'torch'):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def answer(worker: Worker, case: Case, patience: float, waiting: Callable[[], bool] = lambda: True) -> lines.Line:
    """The line of a case that a fresh process runs, or what became of it while `waiting`; the process is killed."""
    worker.assign(case, patience)
    answered: lines.Line | None = None
    ended = False
    try:
        while answered is None and not ended and time.monotonic() < worker.deadline and waiting():
            time.sleep(0.02)
            found = worker.receive()
            ended = found is None
            for line in found or ():
                if 'ready' in line:
                    worker.begin(patience)
                else:
                    answered = line
    finally:
        status = worker.kill()
    return answered or (_died(status) if ended else _late(worker, case, patience))


class Runner:
    """Runs stages until they are done, time is up, or the device is dead."""

    def __init__(self, session: Session, record: lines.Record, log: IO[bytes]):
        self.session = session
        self.record = record
        self.log = log
        self.facts: dict[str, Any] = {'commit': session.commit, 'versions': versions()}
        self.end = time.monotonic() + 60 * session.minutes
        self.stopped: str | None = None
        self.dead = False
        self.counts: collections.Counter[str] = collections.Counter()

    def stop(self, *_: Any) -> None:
        """Called on SIGTERM and SIGINT."""
        self.stopped = 'the session was stopped'

    def end_reason(self) -> str | None:
        """The reason to end the session now, or `None`."""
        if self.dead:
            return 'the device did not respond'
        if self.stopped is None and time.monotonic() >= self.end:
            self.stopped = 'the minutes were over'
        return self.stopped

    def write(self, case: Case, line: dict[str, Any]) -> None:
        """Adds the line of a case to the record."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
        self.facts |= line.pop('facts', {})
        whole = {**session_cases.fields(case), **line, **self.facts, 'time': now}
        self.record.add(whole)
        self.counts[whole['status']] += 1
        reason = f': {whole["reason"]}' if 'reason' in whole else ''
        print(f'{whole["status"]:8}{case.id}{reason}', flush=True)

    def stage(self, name: str, cases: Sequence[Case]) -> None:
        """Runs the cases of one stage, and says of those that were dropped why."""
        for case in cases:
            if case.reason:
                self.write(case, {'status': 'skipped'})
        stage, waiting = STAGES[name], collections.deque(case for case in cases if not case.reason)
        slots = min(self.session.workers or stage.workers, stage.workers, len(waiting), os.cpu_count() or 1)
        workers: list[Worker] = []
        with selectors.DefaultSelector() as selector:
            try:
                while (waiting or any(worker.case for worker in workers)) and self.end_reason() is None:
                    self._hand_out(waiting, workers, slots, stage, selector)
                    for key, _ in selector.select(0.2):
                        self._receive(key.data, workers, stage, selector)
                    for worker in [one for one in workers if time.monotonic() > one.deadline and one.case]:
                        self._time_out(worker, workers, selector)
            finally:
                for worker in workers:
                    worker.kill()
        reason = self.end_reason()
        for worker in workers if reason else ():
            if worker.case is not None:
                self.write(worker.case, {'status': 'skipped', 'reason': f'{reason}, during the case'})

    def _hand_out(self, waiting: Any, workers: list[Worker], slots: int, stage: Stage, selector: Any) -> None:
        while waiting and len(workers) < slots:
            worker = Worker(self.session.folder, stage, self.log, START * self.session.patience)
            selector.register(worker.results, selectors.EVENT_READ, worker)
            workers.append(worker)
            worker.assign(waiting.popleft(), self.session.patience)
        for worker in workers:
            if waiting and worker.case is None:
                worker.assign(waiting.popleft(), self.session.patience)

    def _receive(self, worker: Worker, workers: list[Worker], stage: Stage, selector: Any) -> None:
        found = worker.receive()
        if found is None:
            status = self._remove(worker, workers, selector)
            if worker.case is not None:
                self.write(worker.case, _died(status))
                self.check_device(workers)
            return
        for line in found:
            if 'ready' in line:
                worker.begin(self.session.patience)
                continue
            assert worker.case is not None and line['id'] == worker.case.id
            self.write(worker.case, line)
            worker.case = None
            # A kernel that failed may leave its process without a device.
            if stage.fresh or line['status'] == 'failed':
                self._remove(worker, workers, selector)
                return

    def _time_out(self, worker: Worker, workers: list[Worker], selector: Any) -> None:
        self._remove(worker, workers, selector)
        assert worker.case is not None
        self.write(worker.case, _late(worker, worker.case, self.session.patience))
        self.check_device(workers)

    def _remove(self, worker: Worker, workers: list[Worker], selector: Any) -> int:
        selector.unregister(worker.results)
        workers.remove(worker)
        return worker.kill()

    def check_device(self, others: Sequence[Worker] = ()) -> None:
        """At the start, and after a crash or a hang: a product in a fresh process decides whether to continue.

        The time limits of the others are extended meanwhile.
        """
        start = time.monotonic()
        stage = STAGES['check']
        worker = Worker(self.session.folder, stage, self.log, START * self.session.patience)
        line = answer(worker, SMOKE, self.session.patience, lambda: self.end_reason() is None)
        self.facts |= line.get('facts', {})
        self.dead = self.stopped is None and line['status'] != 'ok'
        for other in others:
            other.deadline += time.monotonic() - start


def run(session: Session, stages: Sequence[str] | None, resume: Sequence[pathlib.Path]) -> int:
    """Runs the prepared cases of `stages`, in their order, except those that were ok in earlier sessions.

    Raises `lines.Unusable`, before a device is touched, for a folder that was not prepared, what is no record, and
    stages and patterns without a case.
    """
    prepared = session_cases.read(session.folder / session_cases.FILE)
    dropped = session.folder / session_cases.DROPPED
    prepared += session_cases.read(dropped) if dropped.exists() else []
    known = list(dict.fromkeys(case.stage for case in prepared))
    for name in stages or ():
        if name not in known:
            raise lines.Unusable(
                f'of the stage {name} no case was prepared in {session.folder}; {", ".join(known)} were'
            )
    before = lines.newest(resume)
    asked = session_cases.chosen(prepared, session.only)
    left = [case for case in asked if before.get(case.id, {'status': ''})['status'] != 'ok']
    if session.commit == 'unknown':
        commit = lines.text_of(session.folder / 'commit', 'what prepare wrote').strip()
        session = dataclasses.replace(session, commit=commit)
    session.out.mkdir(parents=True, exist_ok=True)
    turn.forget(session.folder)
    record = lines.Record(session.out / 'session.jsonl')
    with (session.out / 'session.log').open('ab') as log, contextlib.closing(record):
        runner = Runner(session, record, log)
        with _ended_by_signals(runner):
            runner.check_device()
            for name in STAGES if stages is None else stages:
                of_stage = [case for case in left if case.stage == name]
                if of_stage and runner.end_reason() is None:
                    runner.stage(name, of_stage)
    done = sum(runner.counts.values())
    figures = ', '.join(f'{number} {status}' for status, number in runner.counts.items()) or 'nothing to do'
    print(f'{figures}; {len(asked) - len(left)} were ok before; {runner.end_reason() or "all done"}', flush=True)
    if runner.dead:
        return DEAD
    return OK if runner.counts['ok'] + runner.counts['skipped'] == done else NOT_ALL_RIGHT


@contextlib.contextmanager
def _ended_by_signals(runner: Runner) -> Iterator[None]:
    before = {number: signal.signal(number, runner.stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _died(status: int) -> lines.Line:
    how = signal.Signals(-status).name if status < 0 else f'status {status}'
    return {'status': 'failed', 'reason': f'its process died: {how}'}


def _late(worker: Worker, case: Case, patience: float) -> lines.Line:
    limit = case.seconds if worker.ready else START
    what = 'it took longer than' if worker.ready else 'its process did not start within'
    return {'status': 'timeout', 'reason': f'{what} {limit * patience:g} s'}
