"""What tests of sweeps in several processes ask and assert."""

import os
import pathlib
import re
import time

from attnlab.sweep.study import open_study

CONFIG = '--config=tests/sweep/tiny.py'


def workers(folder):
    """The processes that ever worked on a study, by its logs, newest last."""
    logs = sorted((folder / 'logs').glob('worker-*.txt'))
    return [int(pid) for log in logs for pid in re.findall(r' (\d+): at work', log.read_text())]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return (pathlib.Path('/proc') / str(pid) / 'stat').read_text().split(') ')[1][0] != 'Z'


def until(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def steps_of(folder, number):
    """How far a trial has come."""
    path = folder / 'trials' / f'{number:04}' / 'metrics.jsonl'
    return len(path.read_text().splitlines()) if path.exists() else 0


def assert_whole(folder, unbroken, storage=None, elsewhere=()):
    """Every trial is there once, in one of the folders, and as it is without interruption."""
    study = open_study(folder, storage)
    assert study.finished()
    found, wanted = study.trials(), unbroken.trials()
    assert [trial.number for trial in found] == list(range(len(wanted)))
    assert [(trial.params, trial.value) for trial in found] == [(trial.params, trial.value) for trial in wanted]
    assert [trial.intermediate_values for trial in found] == [trial.intermediate_values for trial in wanted]
    for trial in found:
        run = pathlib.Path('trials', f'{trial.number:04}')
        (home,) = [home for home in (folder, *elsewhere) if (home / run).exists()]
        for name in ('metrics.jsonl', 'config.json'):
            assert (home / run / name).read_bytes() == (unbroken.folder / run / name).read_bytes()
