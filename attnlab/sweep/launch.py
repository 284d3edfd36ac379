"""Launchers of workers: as processes of this host, or as jobs of a SLURM cluster through submitit."""

import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from optuna.trial import FrozenTrial
from rich.console import Console
from rich.live import Live

from attnlab import files
from attnlab.errors import UserError, optional
from attnlab.sweep.status import describe, live_statuses, statuses, summary
from attnlab.sweep.study import Parts, Study

PAUSE = 1.0
DEATHS = 5
"""Deaths of a worker in a row, without a trial that begins or ends, after which it is not started again."""
MEMORY_FRACTION = 0.9
"""Fraction of a device's memory that the trials on it divide among themselves; by default JAX takes 0.75."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a worker runs.

    Attributes:
      cores: the processor cores it may use; empty for all.
      device: the index of its accelerator; `None` for all of them.
      memory: the fraction of the device's memory; `None` for JAX's default.
    """

    cores: tuple[int, ...] = ()
    device: int | None = None
    memory: float | None = None


def places(workers: int, devices: Sequence[int], cores: Sequence[int]) -> list[Place]:
    """Returns a place for each worker: devices in rotation or, where none are named, an equal part of the cores.

    Workers on one device divide its memory; without devices, and where no cores are known, they run anywhere. Raises
    `UserError` for no workers.
    """
    if workers < 1:
        raise UserError(f'--workers is {workers}; it must be a whole number of at least 1')
    if devices:
        per_device = math.ceil(workers / len(devices))
        memory = None if per_device == 1 else round(MEMORY_FRACTION / per_device, 3)
        return [Place(device=devices[index % len(devices)], memory=memory) for index in range(workers)]
    if workers == 1 or not cores:
        return [Place()] * workers
    if workers > len(cores):
        return [Place(cores=(cores[index % len(cores)],)) for index in range(workers)]
    bounds = [index * len(cores) // workers for index in range(workers + 1)]
    return [Place(cores=tuple(cores[low:high])) for low, high in itertools.pairwise(bounds)]


def host_cores() -> list[int]:
    """The cores that this process may use; empty where the system does not report them."""
    return sorted(os.sched_getaffinity(0)) if sys.platform.startswith('linux') else []


def pin(cores: Sequence[int], device: int | None) -> None:
    """Restricts this process to its cores and device; call before JAX starts.

    Raises `UserError` for cores that are not among those it may use.
    """
    if cores and (usable := host_cores()):
        if others := sorted(set(cores) - set(usable)):
            shown = [', '.join(map(str, each)) for each in (others, usable)]
            raise UserError(f'--cores has {shown[0]}; the cores that this process may use are {shown[1]}')
        os.sched_setaffinity(0, cores)
    if device is not None:
        import jax

        jax.config.update('jax_cuda_visible_devices', str(device))
        jax.config.update('jax_rocm_visible_devices', str(device))


def command(arguments: Sequence[str], place: Place) -> list[str]:
    """Returns the command of a worker; JAX reads its fraction of memory only from the environment."""
    prefix = [] if place.memory is None else ['env', f'XLA_PYTHON_CLIENT_MEM_FRACTION={place.memory}']
    pinned = [f'--cores={",".join(map(str, place.cores))}'] if place.cores else []
    pinned += [] if place.device is None else [f'--device={place.device}']
    # Without -P the folder that a sweep is started in, which may be a stranger's, would be searched for modules.
    return [*prefix, sys.executable, '-P', '-m', 'attnlab', 'sweep', 'worker', *arguments, *pinned]


def run_processes(
    study: Study, arguments: Sequence[str], where: Sequence[Place], console: Console, storage: str | None = None
) -> bool:
    """Runs workers as processes; returns whether the sweep and its confirmation have finished.

    A worker killed by a signal (out of memory, or by hand) is restarted and resumes its trial, but not when it died
    `DEATHS` times in a row while no trial began or ended. One that failed logs the reason in `logs/worker-HOST-I.txt`.
    Workers save and stop when this process ends, however it ends.
    Raises `UserError` with the last lines of those that failed.
    """
    parts = Parts(study, storage)
    with contextlib.ExitStack() as stack:
        crew: list[_Worker] = []
        # First: what a shell has this process ignore, such as Ctrl-C in the background, workers would ignore too.
        received = stack.enter_context(_forwarding(crew))
        crew += [
            _Worker(study.folder, index, command(arguments, place), parts, stack) for index, place in enumerate(where)
        ]
        show = stack.enter_context(_display(parts, console))
        while True:
            alive = [worker.alive(restart=not received) for worker in crew]
            show()
            if not any(alive):
                break
            time.sleep(PAUSE)
    for one in parts.studies():
        console.print(f'{_heading(parts, one)}{summary(one, statuses(one))}')
    failed = [worker for worker in crew if worker.process.returncode]
    complaints = dict.fromkeys(each.last_line() for each in failed if not received or each.process.returncode > 0)
    if complaints:
        raise UserError('; '.join(complaints))
    if received:
        console.print('asked to stop: the same command goes on from there')
    return not received and parts.finished()


class _Worker:
    """A worker's process, restarted when a signal kills it."""

    def __init__(
        self, folder: pathlib.Path, index: int, argv: Sequence[str], parts: Parts, stack: contextlib.ExitStack
    ):
        self._parts = parts
        self._begun: list[Any] = []
        self._deaths = 0
        self._log = folder / 'logs' / f'worker-{socket.gethostname()}-{index}.txt'
        self._log.parent.mkdir(exist_ok=True)
        self._output = stack.enter_context(files.appending(self._log))
        self._argv = [*argv, '--tied']
        self.process = self._start()
        stack.callback(self._close)

    def alive(self, *, restart: bool) -> bool:
        """Whether the process runs; with `restart`, one that a signal killed is replaced."""
        status = self.process.poll()
        if status is not None and status < 0 and restart and self._deaths < DEATHS:
            self._count_death()
            again = self._deaths < DEATHS
            ended = f'ended by signal {-status}'
            hopeless = f'{ended}, {DEATHS} times in a row while no trial began or ended; see above'
            self._output.write(f'{ended}; started again\n' if again else f'{hopeless}\n')
            self._output.flush()
            if again:
                self._close()
                self.process = self._start()
                return True
        return self.process.poll() is None

    def _count_death(self) -> None:
        """Counts deaths since any trial began or ended; a trial that is begun again and again counts its starts."""
        trials = [trial for one in self._parts.studies() for trial in one.trials()]
        begun = [(trial.state, trial.user_attrs.get('starts')) for trial in trials]
        self._deaths = self._deaths + 1 if begun == self._begun else 1
        self._begun = begun

    def last_line(self) -> str:
        """The last line of its log."""
        lines = files.read_text(self._log, errors='replace').splitlines()
        return (lines[-1] if lines else f'a worker ended with status {self.process.returncode}').removeprefix(
            'attnlab: '
        )

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=self._output, stderr=subprocess.STDOUT)

    def _close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def _forwarding(crew: Sequence[_Worker]) -> Iterator[list[int]]:
    """Forwards SIGTERM and Ctrl-C to the workers, which save; yields the list of signals received."""
    received: list[int] = []

    def forward(number: int, _: Any) -> None:
        received.append(number)
        # A cluster may have sent the workers the same signal too; receiving it twice would end them before they save.
        other = signal.SIGINT if number == signal.SIGTERM else signal.SIGTERM
        for worker in crew:
            worker.process.send_signal(other)

    previous: dict[int, Any] = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _display(parts: Parts, console: Console) -> Iterator[Any]:
    """Live tables on a terminal; elsewhere a line for every trial that ends."""
    if console.is_terminal:
        with Live(live_statuses(parts, console), console=console, auto_refresh=False) as live:
            yield lambda: live.update(live_statuses(parts, console), refresh=True)
        return

    printed = {
        _name(study, trial) for study in parts.studies() for trial in study.trials() if trial.state.is_finished()
    }

    def update() -> None:
        for study in parts.studies():
            for trial in study.trials():
                if trial.state.is_finished() and _name(study, trial) not in printed:
                    printed.add(_name(study, trial))
                    console.print(f'{_heading(parts, study)}{describe(study, trial)}', soft_wrap=True)

    yield update


def _name(study: Study, trial: FrozenTrial) -> tuple[str, int]:
    return study.name, trial.number


def _heading(parts: Parts, study: Study) -> str:
    return '' if study is parts.studies()[0] else 'confirmation: '


class Job:
    """A worker as submitit runs it: a process of its own, which saves before the cluster takes the machine away.

    No dataclass, for a config may name those, and this one runs a program.
    """

    def __init__(self, argv: Sequence[str]):
        self.argv = tuple(argv)
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """Runs trials until none is left."""
        self.process = subprocess.Popen(self.argv, stdin=subprocess.PIPE)
        while self.process.poll() is None:
            time.sleep(0.1)
        if self.process.returncode:
            raise UserError(f'the worker ended with status {self.process.returncode}; see above')
        return self.process.returncode

    def checkpoint(self) -> Any:
        """Called by submitit before a timeout, and when the job is preempted: saves, and asks to be queued again."""
        from submitit.helpers import DelayedSubmission

        if self.process is not None:
            os.kill(self.process.pid, signal.SIGTERM)
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(Job(self.argv))


def submit(
    folder: pathlib.Path, arguments: Sequence[str], workers: int, cluster: str, options: dict[str, Any]
) -> list[Any]:
    """Submits an array of workers; returns submitit's jobs. `cluster` is 'slurm', or 'local' to try it out.

    Raises `UserError` for what submitit refuses.
    """
    submitit = optional('submitit', '--launcher=submitit')
    job = Job(command([*arguments, '--tied'], Place()))
    try:
        executor = submitit.AutoExecutor(folder=folder / 'jobs', cluster=cluster)
        executor.update_parameters(**{'name': f'attnlab-{folder.name}', **options})
        with executor.batch():
            return [executor.submit(job) for _ in range(workers)]
    except (AssertionError, NameError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f'submitit, cluster {cluster}: {error}') from error
