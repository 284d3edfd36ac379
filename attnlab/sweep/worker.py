"""A worker: runs one trial after another until none is left."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from optuna.trial import TrialState
from rich.console import Console

from attnlab.sweep.status import describe
from attnlab.sweep.study import Study, confirmation, open_study
from attnlab.sweep.together import Followers, Leaving, first, next_order
from attnlab.sweep.trial import Outcome, follow_trial, run_trial
from attnlab.train.programs import Programs

PAUSE = 1.0
"""Seconds between two attempts at claiming a trial."""


def work(folder: Path, storage: str | None, console: Console, idle: float = float('inf')) -> bool:
    """Runs trials until the sweep and its confirmation are finished; returns whether they are.

    A worker without a trial waits up to `idle` seconds, for it may have to resume the trial of one that dies.
    On SIGTERM or Ctrl-C it saves the current run and returns. Of several processes of `jax.distributed` the first
    claims the trials, and the others run them with it.
    """
    if not first():
        return _follow(folder)
    followers = Followers(folder)
    _handle_signals(followers.leave)
    try:
        return _lead(folder, storage, console, idle, followers)
    except Leaving:
        return False
    finally:
        followers.end()


def _lead(folder: Path, storage: str | None, console: Console, idle: float, followers: Followers) -> bool:
    study: Study | None = open_study(folder, storage)
    programs, stop = Programs(), threading.Event()
    console.print(f'{socket.gethostname()} {os.getpid()}: at work on {folder}')
    busy = time.monotonic()
    while study is not None:
        claim = study.claim()
        if claim is not None:
            try:
                outcome = run_trial(study, claim, programs, followers, stop)
            finally:
                claim.release()
            busy = time.monotonic()
            console.print(f'{study.name} {describe(study, study.trials()[claim.number])}')
            # A signal may come too late to end its trial; and one to another process of the worker ends it too.
            if stop.is_set() or outcome == Outcome.STOPPED:
                console.print('asked to stop; the same command goes on from there')
                return False
        elif study.finished():
            study = confirmation(study, storage)
        elif time.monotonic() - busy > idle:
            waiting = [trial.number for trial in study.trials() if trial.state == TrialState.RUNNING]
            console.print(f'nothing to do; others run trials {", ".join(map(str, waiting))}')
            return False
        else:
            followers.idle()
            time.sleep(PAUSE)
    return True


def _follow(folder: Path) -> bool:
    """Runs the trials that the first process sends, until the end; between trials signals are left to that process."""
    _handle_signals(lambda *_: None)
    programs = Programs()
    while (order := next_order()) is not None:
        follow_trial(folder, order, programs)
    return True


def leave_when_asked(status: int) -> None:
    """Makes SIGTERM and Ctrl-C end this process with an exit status, until `work` installs its own handlers."""
    _handle_signals(lambda *_: sys.exit(status))
    # SLURM warns every process of a job with these; the parent of this process handles them, and sends SIGTERM.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _handle_signals(answer: Callable[..., None]) -> None:
    """Handles SIGTERM and Ctrl-C between runs, when nothing needs saving; a run installs handlers that save."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, answer)


def stop_with_parent() -> None:
    """Sends this process SIGTERM when its standard input closes, as it does when the parent dies."""

    def wait() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
