"""Trials that two processes run together, as on two hosts: what happens to one happens to both."""

import json
import signal
import socket

import numpy as np
import pytest

from attnlab.config import from_plain, plain
from attnlab.configuration import config_of
from attnlab.sweep.status import statuses
from attnlab.sweep.study import create_study, open_study
from tests.sweep.conftest import TINY
from tests.sweep.processes import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('sweep')]


@pytest.fixture
def pair(attnlab):
    """Starts the two processes of a worker."""

    def start(folder):
        with socket.create_server(('localhost', 0)) as sock:
            port = sock.getsockname()[1]
        shared = ('worker', f'--study={folder}', f'--coordinator=localhost:{port}', '--processes=2')
        return [attnlab(*shared, f'--process={index}') for index in range(2)]

    return start


def finish(processes):
    for process in processes:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output


def losses(folder, number):
    lines = (folder / 'trials' / f'{number:04}' / 'metrics.jsonl').read_text().splitlines()
    return [json.loads(line).get('train/loss', json.loads(line).get('valid/loss')) for line in lines]


def test_they_agree_with_one_and_the_winner_is_confirmed(pair, unbroken, tmp_path):
    study = create_study(tmp_path / 'study', config_of(TINY, 'confirm=2'))
    finish(pair(study.folder))
    assert study.finished() and open_study(study.folder / 'confirm', within=study).finished()
    for one, two in zip(unbroken.trials(), study.trials(), strict=True):
        assert one.params == two.params
        np.testing.assert_allclose(losses(study.folder, two.number), losses(unbroken.folder, one.number), rtol=2e-5)
    record = json.loads((study.workdir(3) / 'run.json').read_text())['starts'][-1]
    assert (record['process_count'], record['device_count']) == (2, 4)


def test_faults_of_a_point_and_pruning_are_shared(pair, tmp_path):
    """A loss that is not finite, and a trial given up after its first evaluation: both processes go on to the next."""
    config = config_of(TINY, 'sampler=quasi,pruner=asha,high=1e30')
    study = create_study(tmp_path / 'study', config)
    finish(pair(study.folder))
    states = [row.state for row in statuses(study)]
    assert study.finished() and {'done', 'failed'} <= set(states), states


def test_a_trial_without_memory_is_recorded_and_ends_the_worker(pair, tmp_path):
    """Whether both met it, neither can know; the same command goes on with the next trial."""
    sweep = plain(config_of(TINY)) | {'sampler': {'target': 'attnlab.sweep.search.GridSearch', 'seed': 0}}
    width = {'target': 'attnlab.sweep.space.Grid', 'key': 'model.dim', 'values': [2**20, 8]}
    study = create_study(
        tmp_path / 'study', from_plain(sweep | {'space': {'width': width}, 'seeds': [0], 'trials': None})
    )
    outputs = [process.communicate(timeout=240)[0] for process in pair(study.folder)]
    assert 'trial 0 failed in one process of 2 (out of memory: ' in outputs[0], outputs
    finish(pair(study.folder))
    assert [row.state for row in statuses(study)] == ['failed', 'done']


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_one_ends_both_and_the_same_command_goes_on(pair, tmp_path, number):
    folders = [tmp_path / 'broken', tmp_path / 'straight']
    for folder in folders:
        create_study(folder, config_of(TINY, 'steps=200,trials=1'))
    metrics = folders[0] / 'trials' / '0000' / 'metrics.jsonl'
    crew = pair(folders[0])
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 40)
    crew[1].send_signal(number)
    for process in crew:
        output, _ = process.communicate(timeout=240)
        assert (process.returncode == 0) == (number == signal.SIGTERM), output
    assert not open_study(folders[0]).finished()
    finish(pair(folders[0]))
    finish(pair(folders[1]))
    assert losses(folders[0], 0) == losses(folders[1], 0)
