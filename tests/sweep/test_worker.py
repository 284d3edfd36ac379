"""A worker of this process."""

import os
import signal

import pytest
from optuna.trial import TrialState
from rich.console import Console

from attnlab.sweep import trial as trials
from attnlab.sweep import worker
from attnlab.sweep.worker import work
from attnlab.train import loop

QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def _handlers(programs, monkeypatch):
    """Those of the tests stay; programs are compiled once."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(worker, 'Programs', lambda: programs)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ('step', 'prunes', 'state'),
    [(18, False, TrialState.RUNNING), (18, True, TrialState.PRUNED), (24, False, TrialState.COMPLETE)],
)
def test_a_signal_stops_the_worker_whenever_it_comes(make, monkeypatch, number, step, prunes, state):
    """In an evaluation, with its trial given up then, and in that after the last step: no other trial is begun."""
    study, watch = make('trials=2'), trials._watch

    def signalled(claim, metric, steps):
        watched = watch(claim, metric, steps)

        def signals(at, numbers):
            if at != step:
                return watched(at, numbers)
            os.kill(os.getpid(), number)
            if prunes:
                claim.note('pruned_at', at)
            return watched(at, numbers)

        return signals

    monkeypatch.setattr(trials, '_watch', signalled)
    assert not work(study.folder, None, QUIET)
    assert [trial.state for trial in make('trials=2').trials()] == [state]


def test_what_another_process_was_asked_stops_the_worker(make, monkeypatch):
    study = make('trials=2')
    monkeypatch.setattr(trials.launch, 'train', lambda *_, **__: loop.STOPPED)
    assert not work(study.folder, None, QUIET)
    assert [trial.state for trial in study.trials()] == [TrialState.RUNNING]
