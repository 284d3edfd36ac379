"""A worker: takes one trial after another, until there is none left."""

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
"""Seconds between two looks for something to do."""


def work(folder: Path, storage: str | None, console: Console, idle: float = float('inf')) -> bool:
    """Runs trials until the sweep is finished, its confirmation too; returns whether it is.

    A worker that finds nothing to do waits, for it may have to take over from one that dies: `idle` seconds at most.
    Asked to stop by SIGTERM or Ctrl-C, it saves the run it is in and returns. Of several processes of
    `jax.distributed` the first one decides all this, and the others run its trials with it.
    """
    if not first():
        return _follow(folder)
    followers = Followers(folder)
    _answer_signals(followers.leave)
    try:
        return _lead(folder, storage, console, idle, followers)
    except Leaving:
        return False
    finally:
        followers.end()


def _lead(folder: Path, storage: str | None, console: Console, idle: float, followers: Followers) -> bool:
    study: Study | None = open_study(folder, storage)
    programs = Programs()
    console.print(f'{socket.gethostname()} {os.getpid()}: at work on {folder}')
    busy = time.monotonic()
    while study is not None:
        claim = study.claim()
        if claim is not None:
            try:
                outcome = run_trial(study, claim, programs, followers)
            finally:
                claim.release()
            busy = time.monotonic()
            console.print(f'{study.name} {describe(study, study.trials()[claim.number])}')
            if outcome == Outcome.STOPPED:
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
    """Runs what the first process says, until it says that it is the end; between runs signals are for that one."""
    _answer_signals(lambda *_: None)
    programs = Programs()
    while (order := next_order()) is not None:
        follow_trial(folder, order, programs)
    return True


def leave_when_asked(status: int) -> None:
    """Ends this process with an exit status on SIGTERM and Ctrl-C, until `work` answers them."""
    _answer_signals(lambda *_: sys.exit(status))
    # With these SLURM warns every process of a job; the one that started this one answers, and sends SIGTERM.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _answer_signals(answer: Callable[..., None]) -> None:
    """Between runs there is nothing to save; a run saves by handlers of its own."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, answer)


def stop_with_parent() -> None:
    """Asks this process to stop when its standard input closes, which it does when the parent dies."""

    def wait() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
