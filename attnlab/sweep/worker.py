"""A worker: takes one trial after another, until there is none left."""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from optuna.trial import TrialState
from rich.console import Console

from attnlab.sweep.status import describe
from attnlab.sweep.study import Study, confirmation, open_study
from attnlab.sweep.trial import Outcome, Programs, run_trial

PAUSE = 1.0
"""Seconds between two looks for something to do."""


def work(folder: Path, storage: str | None, console: Console, idle: float = float('inf')) -> bool:
    """Runs trials until the sweep is finished, its confirmation too; returns whether it is.

    A worker that finds nothing to do waits, for it may have to take over from one that dies: `idle` seconds at most.
    Asked to stop by SIGTERM or Ctrl-C, it saves the run it is in and returns.
    """
    study: Study | None = open_study(folder, storage)
    programs = Programs()
    console.print(f'{socket.gethostname()} {os.getpid()}: at work on {folder}')
    busy = time.monotonic()
    while study is not None:
        claim = study.claim()
        if claim is not None:
            try:
                outcome = run_trial(study, claim, programs)
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
            time.sleep(PAUSE)
    return True


def _leave(number: int, frame: object) -> None:
    """Between runs there is nothing to save; a run saves by a handler of its own."""
    sys.exit(0)


def leave_when_asked() -> None:
    """Ends this process in order on SIGTERM and Ctrl-C; while it runs a trial, that is saved first."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)


def stop_with_parent() -> None:
    """Asks this process to stop when its standard input closes, which it does when the parent dies."""

    def wait() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
