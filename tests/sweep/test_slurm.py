"""A real SLURM of one node on loopback; it needs root, and slurmctld, slurmd and munged."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

import pytest

from attnlab.configuration import config_of
from attnlab.sweep.study import create_study, open_study
from tests.sweep.conftest import ROOT, TINY
from tests.sweep.processes import CONFIG, alive, assert_whole, steps_of, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('sweep')]
DAEMONS = ('munged', 'slurmctld', 'slurmd')
CONF = """\
ClusterName=attnlab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores}
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:4
"""


def free_ports(count):
    sockets = [socket.create_server(('127.0.0.1', 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@pytest.fixture(scope='module')
def slurm():
    """Starts the daemons and returns what asks SLURM something; `SLURM_CONF` tells its programs where it is."""
    if os.getuid() != 0 or not all(map(shutil.which, (*DAEMONS, 'sbatch'))):
        pytest.skip('a SLURM of its own takes root, slurmctld, slurmd, munged and sbatch')
    with tempfile.TemporaryDirectory(prefix='attnlab-slurm-') as name, pytest.MonkeyPatch.context() as patch:
        folder = pathlib.Path(name)
        key = folder / 'munge.key'
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        controller, node = free_ports(2)
        (folder / 'slurm.conf').write_text(
            CONF.format(
                folder=folder,
                host=socket.gethostname().partition('.')[0],
                controller=controller,
                node=node,
                cores=os.cpu_count(),
            )
        )
        patch.setenv('SLURM_CONF', str(folder / 'slurm.conf'))
        files = {'socket': 'socket', 'pid-file': 'pid', 'log-file': 'log', 'seed-file': 'seed'}
        munge = [
            'munged',
            '--force',
            f'--key-file={key}',
            *(f'--{flag}={folder}/munge.{end}' for flag, end in files.items()),
        ]
        pids = []
        try:
            for argv, pid in ((munge, 'munge.pid'), (['slurmctld', '-c'], 'slurmctld.pid'), (['slurmd'], 'slurmd.pid')):
                with (folder / 'output').open('a') as output:
                    subprocess.run(argv, check=True, timeout=60, stdout=output, stderr=output)
                until(lambda pid=pid: (folder / pid).exists() and (folder / pid).read_text().strip(), 30)
                pids.append(int((folder / pid).read_text()))
            until(lambda: 'idle' in asked('sinfo', '--noheader', '--format=%T'), 60)
            yield asked
            asked('scancel', '--full', '--user=root')
            until(lambda: not asked('squeue', '--noheader'), 60)
        finally:
            for pid in reversed(pids):
                os.kill(pid, signal.SIGTERM)
            until(lambda: not any(map(alive, pids)), 60)


def asked(*argv):
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout


def logs(folder):
    return '\n'.join(path.read_text() for path in sorted((folder / 'jobs').glob('*log*')))


def submitted(attnlab, config, folder, *arguments):
    """The number of the job that a sweep became."""
    sweep = attnlab(config, f'--study={folder}', '--launcher=submitit', '--job=timeout_min=60', *arguments)
    output, _ = sweep.communicate(timeout=120)
    assert sweep.returncode == 0 and 'submitted' in output, output
    return output.partition('submitted ')[2].partition('.')[0].partition('_')[0]


def test_an_array_of_workers_finishes_a_sweep(slurm, attnlab, unbroken, tmp_path):
    folder = tmp_path / 'study'
    submitted(attnlab, CONFIG, folder, '--workers=2')
    until(lambda: not slurm('squeue', '--noheader'), 400)
    assert logs(folder).count('Job completed successfully') == 2, logs(folder)
    assert_whole(folder, unbroken)


@pytest.mark.parametrize('by_submitit', [True, False], ids=['by_submitit', 'by_slurm'])
def test_a_preempted_worker_is_queued_again_and_goes_on(slurm, attnlab, tmp_path, by_submitit):
    """SLURM signals every process of the job, the worker too: with what submitit asked for, or with SIGTERM."""
    config, folder = f'{CONFIG}:steps=4000,trials=1', tmp_path / 'study'
    job = submitted(attnlab, config, folder)
    until(lambda: steps_of(folder, 0) > 600)
    slurm(*(('scancel', '--signal=USR2', job) if by_submitit else ('scontrol', 'requeue', job)))
    until(lambda: slurm('squeue', '--noheader', '--format=%T %r').strip() == 'PENDING BeginTime', 120)
    assert 'asked to stop; the same command goes on' in logs(folder), logs(folder)
    assert ('Requeued job' in logs(folder)) == by_submitit
    (saved,) = checkpoints(folder)[-1:]
    assert saved % 1000 != 0
    # SLURM waits for two minutes before it starts a job again.
    slurm('scontrol', 'update', f'jobid={job}', 'StartTime=now')
    until(lambda: states(slurm, job) == {'COMPLETED'}, 400)
    assert f'going on from step {saved} of 4000' in (folder / 'logs' / '0000.txt').read_text()
    straight = attnlab(config, f'--study={tmp_path / "straight"}')
    output, _ = straight.communicate(timeout=240)
    assert straight.returncode == 0, output
    assert open_study(folder).best().value == open_study(tmp_path / 'straight').best().value
    metrics = pathlib.Path('trials', '0000', 'metrics.jsonl')
    assert (folder / metrics).read_bytes() == (tmp_path / 'straight' / metrics).read_bytes()


def test_two_tasks_run_a_trial_together_and_are_preempted(slurm, attnlab, tmp_path):
    """One worker of two processes, which JAX joins by what SLURM says."""
    config, folder = f'{CONFIG}:steps=600,trials=1', tmp_path / 'study'
    job = submitted(attnlab, config, folder, '--distributed', '--job=tasks_per_node=2,timeout_min=60')
    until(lambda: steps_of(folder, 0) > 100)
    slurm('scancel', '--signal=USR2', job)
    until(lambda: slurm('squeue', '--noheader', '--format=%T %r').strip() == 'PENDING BeginTime', 120)
    (saved,) = checkpoints(folder)[-1:]
    assert saved % 150 != 0
    slurm('scontrol', 'update', f'jobid={job}', 'StartTime=now')
    until(lambda: states(slurm, job) == {'COMPLETED'}, 400)
    assert open_study(folder).finished(), logs(folder)
    assert f'going on from step {saved} of 600' in (folder / 'logs' / '0000.txt').read_text()
    starts = json.loads((folder / 'trials' / '0000' / 'run.json').read_text())['starts']
    assert [start['process_count'] for start in starts] == [2, 2]


def test_the_job_script_stops_in_time_and_is_queued_again(slurm, compiled, tmp_path):
    """scripts/cluster/slurm.sh: an array of two, both warned by SLURM's SIGTERM."""
    folder = create_study(tmp_path / 'study', config_of(TINY, 'steps=4000,trials=2')).folder
    installed = tmp_path / '.venv' / 'bin' / 'attnlab'
    installed.parent.mkdir(parents=True)
    cpu = f'--platform=cpu --cpu_devices=2 --compilation_cache={compiled}'
    installed.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m attnlab "$@" {cpu}\n')
    installed.chmod(0o755)
    argv = ['sbatch', '--array=0-1', ROOT / 'scripts' / 'cluster' / 'slurm.sh', f'--study={folder}']
    said = subprocess.run(argv, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    job = said.split()[-1]
    until(lambda: steps_of(folder, 0) > 600 and steps_of(folder, 1) > 600)
    slurm('scancel', '--signal=TERM', job)
    waiting = ['PENDING BeginTime'] * 2
    until(lambda: slurm('squeue', '--noheader', '--array', '--format=%T %r').splitlines() == waiting, 120)
    (saved,) = checkpoints(folder)[-1:]
    assert saved % 1000 != 0
    for task in range(2):
        slurm('scontrol', 'update', f'jobid={job}_{task}', 'StartTime=now')
    until(lambda: states(slurm, job) == {'COMPLETED'}, 400)
    assert open_study(folder).finished()
    assert f'going on from step {saved} of 4000' in (folder / 'logs' / '0000.txt').read_text()


def states(slurm, job):
    """Of the tasks of a job, also when it is over; between two starts `squeue` may not list it otherwise."""
    return set(slurm('squeue', '--noheader', '--states=all', f'--jobs={job}', '--array', '--format=%T').split())


def checkpoints(folder):
    saved = (folder / 'trials' / '0000' / 'checkpoints').glob('*')
    return sorted(int(path.name) for path in saved if path.name.isdecimal())
