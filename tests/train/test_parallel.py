"""Processes, devices and meshes change where a number is computed, not which."""

import json
import socket

import numpy as np
import pytest

STEPS = ('--config.steps=40', '--config.evals[0].cadence.n=20', '--config.checkpoint.every=20')


def losses(workdir):
    lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    return np.array([line.get('train/loss', line.get('valid/loss')) for line in lines])


@pytest.fixture(scope='module')
def single(train, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('alone') / 'run'
    status, output = train(workdir, *STEPS).finish()
    assert status == 0, output
    return workdir


@pytest.mark.parametrize(
    'mesh',
    [
        pytest.param({'data': 8}, marks=pytest.mark.slow),
        pytest.param({'data': 2, 'fsdp': 2, 'tensor': 2}, marks=pytest.mark.slow),
        pytest.param({'fsdp': 8}, marks=pytest.mark.slow),
        pytest.param({'data': 2, 'tensor': 4}, marks=pytest.mark.slow),
        pytest.param({'data': 2, 'sequence': 4}, marks=pytest.mark.slow),
    ],
    ids=lambda mesh: '-'.join(f'{axis}{size}' for axis, size in mesh.items()),
)
def test_eight_devices_agree_with_one(train, attnlab, single, tmp_path, mesh):
    workdir = tmp_path / 'eight'
    axes = [f'--config.mesh.{axis}={size}' for axis, size in ({'data': 1} | mesh).items()]
    status, output = train(workdir, *STEPS, '--cpu_devices=8', *axes).finish()
    assert status == 0, output
    np.testing.assert_allclose(losses(workdir), losses(single), rtol=2e-5)
    if mesh == {'data': 2, 'fsdp': 2, 'tensor': 2}:
        for run, devices in ((workdir, 8), (single, 1)):
            asked = (f'--workdir={run}', f'--cpu_devices={devices}', '--tokens=2048', '--multiples=1,2')
            status, output = attnlab('eval', *asked).finish()
            assert status == 0, output
        eight, one = (json.loads((run / 'evals' / '40-2048-tokens.json').read_text()) for run in (workdir, single))
        assert eight.keys() == one.keys() and eight['step'] == 40
        np.testing.assert_allclose(eight['loss@2x'], one['loss@2x'], rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [{}, {'data': 1, 'sequence': 2}], ids=['data', 'sequence'])
def test_two_processes_agree_with_one(train, single, tmp_path, mesh):
    with socket.socket() as sock:
        sock.bind(('localhost', 0))
        port = sock.getsockname()[1]
    workdir = tmp_path / 'two'
    axes = [f'--config.mesh.{axis}={size}' for axis, size in mesh.items()]
    shared = (*STEPS, *axes, f'--coordinator=localhost:{port}', '--processes=2')
    commands = [train(workdir, *shared, f'--process={index}') for index in range(2)]
    for command in commands:
        status, output = command.finish()
        assert status == 0, output
    np.testing.assert_allclose(losses(workdir), losses(single), rtol=2e-5)
