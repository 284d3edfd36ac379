"""Real workers, killed for real: every trial ends as in a study that nothing interrupted, to the bit."""

import json
import os
import random
import signal
import socket
import subprocess
import time

import pytest

from attnlab.errors import UserError
from attnlab.sweep import launch
from attnlab.sweep.launch import Place, command, host_cores, pin, places, submit
from attnlab.sweep.study import open_study
from attnlab.tables import plain_console
from tests.sweep.processes import CONFIG, alive, assert_whole, steps_of, until, workers


@pytest.mark.slow
def test_workers_and_the_sweep_are_killed_and_the_same_command_goes_on(attnlab, unbroken, tmp_path):
    folder = tmp_path / 'study'
    arguments = (CONFIG, f'--study={folder}')
    sweep = attnlab(*arguments, '--workers=2')
    until(lambda: len(workers(folder)) == 2 and steps_of(folder, 0) > 3)
    killed, other = workers(folder)
    os.kill(other, signal.SIGSTOP)  # Else it could be through with all trials before the first is back.
    os.kill(killed, signal.SIGKILL)
    until(
        lambda: (
            'ended by signal 9; started again' in (folder / 'logs' / f'worker-{socket.gethostname()}-0.txt').read_text()
        )
    )
    assert sweep.poll() is None
    sweep.kill()
    os.kill(other, signal.SIGCONT)
    until(lambda: not any(map(alive, workers(folder))))
    assert not open_study(folder).finished()
    alone = attnlab('worker', f'--study={folder}')
    output, _ = alone.communicate(timeout=240)
    assert alone.returncode == 0, output
    assert_whole(folder, unbroken)
    again = attnlab(*arguments)
    output, _ = again.communicate(timeout=240)
    assert again.returncode == 0 and '4 done; best' in output, output


@pytest.mark.slow
def test_killed_at_random_again_and_again(attnlab, make, unbroken):
    """Two sweeps on one study; both and their workers are killed at a random moment after one of them is at work."""
    folder, moments = make().folder, random.Random(1)
    arguments = (CONFIG, f'--study={folder}')
    for _ in range(6):
        before = len(workers(folder))
        crew = [attnlab(*arguments), attnlab(*arguments)]
        until(lambda before=before: len(workers(folder)) > before)
        time.sleep(moments.uniform(0, 6))
        for pid in [process.pid for process in crew] + [pid for pid in workers(folder) if alive(pid)]:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(alive, workers(folder))))
    output, _ = attnlab(*arguments).communicate(timeout=400)
    assert '4 done; best' in output, output
    assert_whole(folder, unbroken)


def test_workers_do_not_ignore_what_a_shell_has_those_in_the_background_ignore(make, monkeypatch):
    """A handler of the parent's is the default in a process that it starts, and what it ignores is ignored there."""
    seen = []

    def started(*_):
        seen.append(signal.getsignal(signal.SIGINT))
        raise UserError('enough')

    monkeypatch.setattr(launch, '_Worker', started)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(UserError, match='enough'):
            launch.run_processes(make(), [], [Place((), None)], plain_console())
        assert callable(seen[0]) and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize('everyone', [False, True])
def test_asked_to_stop_it_saves(attnlab, tmp_path, everyone):
    """Also where a cluster signals every process of the job itself."""
    folder = tmp_path / 'study'
    sweep = attnlab(f'{CONFIG}:steps=4000,trials=1', f'--study={folder}')
    until(lambda: steps_of(folder, 0) > 3)
    for pid in [*(workers(folder) if everyone else []), sweep.pid]:
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.05)
    output, _ = sweep.communicate(timeout=120)
    assert sweep.returncode == 0 and '1 interrupted' in output, output
    (trial,) = open_study(folder).trials()
    (saved,) = [
        int(path.name) for path in (folder / 'trials' / '0000' / 'checkpoints').iterdir() if path.name.isdecimal()
    ]
    last = json.loads((folder / 'trials' / '0000' / 'metrics.jsonl').read_text().splitlines()[-1])['step']
    assert not trial.state.is_finished() and 0 <= saved - last < 2 and saved < 4000


@pytest.mark.slow
@pytest.mark.parametrize('preempted', [False, True])
def test_submitit(preempted, make, compiled, unbroken, tmp_path):
    """Through submitit's local executor, which runs jobs, signals and requeues them as SLURM does."""
    arguments = [f'--study={make().folder}', '--platform=cpu', '--cpu_devices=2', f'--compilation_cache={compiled}']
    (job,) = submit(make().folder, arguments, 1, 'local', {'timeout_min': 10})
    if preempted:
        until(lambda: steps_of(make().folder, 0) > 3)
        job._interrupt()
        until(job.done)
        assert not make().finished()
        (job,) = submit(make().folder, arguments, 1, 'local', {'timeout_min': 10})
    assert job.result() == 0
    assert_whole(make().folder, unbroken)


def test_cores_that_there_are_not_are_named():
    most = max(host_cores())
    with pytest.raises(UserError, match=f'--cores has {most + 7}; the cores that this process may use are .*{most}$'):
        pin([most, most + 7], None)


def test_places():
    assert places(1, [], range(8)) == [Place()]
    assert [place.cores for place in places(3, [], range(8))] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert [place.cores for place in places(3, [], range(2))] == [(0,), (1,), (0,)]
    assert places(3, [4, 5], range(8)) == [
        Place(device=4, memory=0.45),
        Place(device=5, memory=0.45),
        Place(device=4, memory=0.45),
    ]
    assert places(2, [0, 1], range(8)) == [Place(device=0), Place(device=1)]
    assert command(['--study=x'], Place(device=1, memory=0.45))[:2] == ['env', 'XLA_PYTHON_CLIENT_MEM_FRACTION=0.45']
    assert command(['--study=x'], Place(cores=(2, 3)))[-1] == '--cores=2,3'


def test_a_worker_imports_nothing_of_the_folder_it_is_started_in(tmp_path):
    (tmp_path / 'jax.py').write_text('raise SystemExit(9)')
    (tmp_path / 'random.py').write_text('raise SystemExit(9)')
    ended = subprocess.run(command(['--study=.'], Place()), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'is not a study' in ended.stderr and ended.returncode == 2
