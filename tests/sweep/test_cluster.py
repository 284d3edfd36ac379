"""What scripts/cluster has for TPU VMs, XPK and Kubernetes, run by stand-ins that do here what those do elsewhere.

Its SLURM job is run by a real SLURM, see test_slurm.py.
"""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import yaml

from attnlab.sweep.study import open_study
from tests.sweep.processes import CONFIG, assert_whole, steps_of, until

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = ROOT / 'scripts' / 'cluster'
CALLS = {
    'gcloud': (SCRIPTS / 'tpu_vm.sh', 'my-tpu', 'us-central2-b'),
    'xpk': (SCRIPTS / 'xpk.sh', 'my-cluster', 'gla-0', 'v5litepod-16', 'registry.example/attnlab', 'shared'),
}
# Runs the command of its last argument as a shell of each host would, with what SLURM would say of the hosts.
HOSTS = """\
import json, os, subprocess, sys
json.dump(sys.argv[1:], open({calls!r}, 'w'))
(command,) = [word.removeprefix('--command=') for word in sys.argv if word.startswith('--command=')]
slurm = {{'SLURM_JOB_ID': {job!r}, 'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': '{hosts}', 'SLURM_LOCALID': '0'}}
says = [os.environ | slurm | {{'SLURM_PROCID': str(index)}} for index in range({hosts})]
hosts = [subprocess.Popen(['bash', '-c', command], cwd={cwd!r}, env=said) for said in says]
sys.exit(max(host.wait() for host in hosts))
"""


def script(path, text, interpreter='/bin/sh'):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!{interpreter}\n{text}')
    path.chmod(0o755)


def slurm_job():
    """A job for which JAX, by its rule for SLURM, finds a free port."""
    for port in range(61440, 65536):
        with socket.socket() as sock:
            if sock.connect_ex(('localhost', port)):
                return str(port - 61440)
    raise AssertionError('no port is free')


@pytest.fixture
def cluster(tmp_path):
    """Runs a script where `gcloud`, `xpk` and `attnlab` are stand-ins; `attnlab` is what is given, on every host."""

    def run(name, attnlab, *flags, hosts=1):
        home, calls = tmp_path / 'home', tmp_path / 'calls.json'
        installed = home / 'attnlab'
        script(installed / '.venv' / 'bin' / 'attnlab', attnlab)
        for folder in ('tests', 'configs'):
            (installed / folder).symlink_to(ROOT / folder)
        text = HOSTS.format(calls=str(calls), job=slurm_job(), hosts=hosts, cwd=str(installed))
        script(tmp_path / 'bin' / name, text, sys.executable)
        path = f'{tmp_path / "bin"}:{installed / ".venv" / "bin"}:{os.environ["PATH"]}'
        environment = os.environ | {'HOME': str(home), 'PATH': path, 'PYTHONPATH': str(ROOT)}
        argv = [str(word) for word in (*CALLS[name], *flags)]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=400, check=False)
        return done, json.loads(calls.read_text())

    return run


@pytest.mark.parametrize('name', CALLS)
def test_words_reach_the_hosts_as_they_were_given(cluster, name):
    words = ("--study=it's $HOME", '--config=a.py:x=1,y="2"', '--config.base.steps=3; exit 9')
    done, call = cluster(name, 'printf "%s\\n" "$@"', *words)
    assert done.returncode == 0, done
    first, *rest = done.stdout.splitlines()
    assert first == 'sweep' and rest[0] == '--distributed' and rest[-3:] == list(words)
    wanted = {
        'gcloud': ['compute', 'tpus', 'tpu-vm', 'ssh', 'my-tpu', '--zone=us-central2-b', '--worker=all'],
        'xpk': ['workload', 'create', '--cluster=my-cluster', '--workload=gla-0', '--tpu-type=v5litepod-16'],
    }[name]
    assert call[: len(wanted)] == wanted
    refused = subprocess.run(CALLS[name][:2], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and refused.stderr.startswith('usage: ')


@pytest.mark.slow
@pytest.mark.parametrize('name', CALLS)
def test_the_hosts_of_a_slice_finish_a_sweep_together(cluster, compiled, tmp_path, name):
    folder = tmp_path / 'study'
    cpu = f'--platform=cpu --cpu_devices=2 --compilation_cache={compiled}'
    attnlab = f'exec {sys.executable} -m attnlab "$@" {cpu}'
    done, _ = cluster(name, attnlab, CONFIG, f'--study={folder}', hosts=2)
    assert done.returncode == 0, done
    study = open_study(folder)
    assert study.finished() and study.best() is not None
    starts = json.loads((study.workdir(0) / 'run.json').read_text())['starts']
    assert [(start['process_count'], start['device_count']) for start in starts] == [(2, 4)]


def job():
    """The job of kubernetes.yaml."""
    documents = list(yaml.safe_load_all((SCRIPTS / 'kubernetes.yaml').read_text()))
    assert [document['kind'] for document in documents] == ['Job', 'PersistentVolumeClaim']
    return documents[0]['spec']


def test_the_job_holds_together():
    spec = job()
    pod = spec['template']['spec']
    (container,) = pod['containers']
    mounts = {mount['name']: mount['mountPath'] for mount in container['volumeMounts']}
    assert mounts.keys() == {volume['name'] for volume in pod['volumes']}
    study = next(word for word in container['command'] if word.startswith('--study='))
    assert study.removeprefix('--study=').startswith(mounts['studies'] + '/')
    # Kubernetes accepts a policy of failures with pods that are never restarted alone.
    assert pod['restartPolicy'] == 'Never'
    ignored = [
        code for rule in spec['podFailurePolicy']['rules'] for code in rule.get('onExitCodes', {}).get('values', [])
    ]
    assert f'--stopped_status={ignored[0]}' in container['command']


@pytest.mark.slow
def test_pods_share_a_sweep_and_one_that_was_evicted_is_replaced(compiled, unbroken, tmp_path):
    folder = tmp_path / 'study'
    instead = {
        '--config': CONFIG,
        '--study': f'--study={folder}',
        '--compilation_cache': f'--compilation_cache={compiled}',
    }
    argv = [instead.get(word.partition('=')[0], word) for word in job()['template']['spec']['containers'][0]['command']]
    script(tmp_path / 'bin' / 'attnlab', f'exec {sys.executable} -m attnlab "$@" --platform=cpu --cpu_devices=2')
    path = f'{tmp_path / "bin"}:{os.environ["PATH"]}'
    pods = []

    def pod():
        with (tmp_path / f'pod-{len(pods)}').open('w') as output:
            pods.append(subprocess.Popen(argv, cwd=ROOT, env=os.environ | {'PATH': path}, stdout=output, stderr=output))
        return pods[-1]

    try:
        evicted, other = pod(), pod()
        until(lambda: steps_of(folder, 0) > 3)
        evicted.send_signal(signal.SIGTERM)
        assert evicted.wait(timeout=120) == 75
        assert pod().wait(timeout=240) == 0 and other.wait(timeout=240) == 0
        assert_whole(folder, unbroken)
    finally:
        for process in pods:
            process.kill()
            process.wait()


@pytest.mark.skipif(shutil.which('shellcheck') is None, reason='shellcheck is not installed')
def test_shellcheck_has_nothing_to_say():
    subprocess.run(['shellcheck', *sorted(SCRIPTS.glob('*.sh'))], check=True)
