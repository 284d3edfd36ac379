"""The process that starts workers, which are stand-ins here."""

import io
import os
import re
import signal
import socket
import threading

import pytest
from optuna.trial import TrialState
from rich.console import Console
from submitit import AutoExecutor
from submitit.slurm.slurm import _make_sbatch_string

from attnlab.commands.sweep import _options
from attnlab.errors import UserError
from attnlab.sweep import launch, status
from attnlab.sweep.launch import DEATHS, Place, places, run_processes, submit
from attnlab.sweep.study import confirmation
from attnlab.tables import Printer


@pytest.fixture
def run(monkeypatch):
    """Runs a sweep whose workers are a script; returns whether it finished, and what was printed."""
    monkeypatch.setattr(launch, 'PAUSE', 0.01)

    def ran(study, script, workers=1):
        out = io.StringIO()
        monkeypatch.setattr(launch, 'command', lambda *_: ['sh', '-c', script, 'worker'])
        return run_processes(study, [], [Place()] * workers, Console(file=out, width=200)), out.getvalue()

    return ran


def finish(study):
    while (claim := study.claim()) is not None:
        study.tell(claim, TrialState.COMPLETE, float(claim.number))
        claim.release()


def test_workers_that_leave_before_the_end_have_not_finished(run, make):
    study = make('trials=2,confirm=1')
    assert run(study, 'true') == (False, '2 to come\n')
    finish(study)
    assert not run(study, 'true')[0], 'the winner is yet to be confirmed'
    confirming = confirmation(study, None)
    assert not run(study, 'true')[0]
    finish(confirming)
    assert run(study, 'true')[0]


def test_trials_that_confirm_are_shown(run, make, tmp_path):
    study, seen = make('trials=2,confirm=1'), tmp_path / 'seen'
    finish(study)

    def confirm():
        finish(confirmation(study, None))
        seen.touch()

    began = threading.Timer(0.3, confirm)
    began.start()
    _, printed = run(study, f'until test -e {seen}; do sleep 0.1; done; sleep 0.3')
    began.join()
    assert re.search(r'^confirmation: trial 0 done .* seed=2 ', printed, re.M) and 'trial 1 ' not in printed
    assert printed.splitlines()[-1].startswith('confirmation: 1 done; best: trial 0')


def test_watching_goes_on_until_the_winner_is_confirmed(make, monkeypatch):
    study, looked = make('trials=2,confirm=1'), []
    finish(study)

    def look(seconds):
        looked.append(seconds)
        if len(looked) == 2:
            finish(confirmation(study, None))

    monkeypatch.setattr(status.time, 'sleep', look)
    status.show_status(study.folder, None, Printer(Console(file=io.StringIO())), watch=True)
    assert len(looked) == 2


def test_a_worker_that_dies_again_and_again_before_it_begins_is_left(run, make):
    study = make('trials=2')
    log = study.folder / 'logs' / f'worker-{socket.gethostname()}-0.txt'
    with pytest.raises(UserError, match=f'ended by signal 9, {DEATHS} times in a row while no trial began or ended'):
        run(study, 'echo at work; kill -KILL $$')
    assert log.read_text().count('at work') == DEATHS and log.read_text().count('started again') == DEATHS - 1


def test_a_worker_that_fails_says_what_it_said_itself_whatever_those_of_other_hosts_say(run, make, monkeypatch):
    study = make('trials=2')
    for host in ('one', 'two'):
        monkeypatch.setattr(launch.socket, 'gethostname', lambda host=host: host)
        with pytest.raises(UserError, match=f'^no room on {host}$'):
            run(study, f'echo attnlab: no room on {host}; exit 2')
    assert {path.name for path in (study.folder / 'logs').iterdir()} == {'worker-one-0.txt', 'worker-two-0.txt'}


def test_a_worker_that_dies_in_its_trials_is_started_again(run, make, tmp_path, monkeypatch):
    """Oftener than one that begins none."""
    study, deaths, close = make('trials=1'), tmp_path / 'deaths', launch._Worker._close
    claim = study.claim()

    def begun(worker):
        claim.note('starts', [*claim.notes.get('starts', ()), 0])
        close(worker)

    monkeypatch.setattr(launch._Worker, '_close', begun)
    run(study, f'echo x >> {deaths}; test $(wc -l < {deaths}) -gt {2 * DEATHS} || kill -KILL $$')
    assert len(deaths.read_text().splitlines()) == 2 * DEATHS + 1


def test_a_signal_that_came_is_not_taken_for_an_end(run, make):
    study = make('trials=1')
    finish(study)
    asked = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    asked.start()
    finished, said = run(study, 'sleep 20')
    assert not finished and 'asked to stop: the same command goes on' in said


def test_parameters_of_jobs_are_those_of_submitit(tmp_path):
    options = _options(['slurm_use_srun=false', 'slurm_exclusive=true', 'slurm_setup=module load cuda', 'mem_gb=1.5'])
    assert options == {
        'slurm_use_srun': False,
        'slurm_exclusive': True,
        'slurm_setup': ['module load cuda'],
        'mem_gb': 1.5,
    }
    own = {name.removeprefix('slurm_'): value for name, value in options.items() if name.startswith('slurm_')}
    script = _make_sbatch_string('command', tmp_path, **own).splitlines()
    assert {'#SBATCH --exclusive', 'module load cuda', 'command'} <= set(script)
    options = _options(['mem_gb=8', 'slurm_mem=8G', 'stderr_to_stdout=true', 'timeout_min=60', 'slurm_time=1-00:00:00'])
    assert [*options.values()] == [8, '8G', True, 60, '1-00:00:00']
    AutoExecutor(tmp_path / 'jobs', cluster='local').update_parameters(**options)


@pytest.mark.parametrize('wrong', ['mem_gb=much', 'stderr_to_stdout=yes', 'timeout_min=1.5'])
def test_what_submitit_refuses_is_one_line(tmp_path, wrong):
    with pytest.raises(UserError, match=f'submitit, cluster local: Parameter "{wrong.partition("=")[0]}" expected'):
        submit(tmp_path, [], 1, 'local', _options([wrong]))


def test_workers_run_anywhere_where_the_system_does_not_say_what_cores_there_are():
    assert places(2, [], []) == [Place(), Place()]
