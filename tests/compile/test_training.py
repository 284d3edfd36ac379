"""Training steps on several accelerators are compiled for them; none need be at hand."""

import json
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from pallas_kernels import target
from tests.compile import training

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != 'linux', reason='the compiler for TPUs is made for Linux')
@pytest.mark.parametrize(
    'steps',
    [
        # Alone in `make test`: a whole step with kernels, rows and parameters divided.
        pytest.param(['zoo=gla,fsdp=4'], id='rows and parameters'),
        pytest.param(['zoo=mha,data=4'], id='rows', marks=pytest.mark.slow),
        pytest.param(
            ['zoo=mha,data=2,tensor=2', 'zoo=gla,data=2,tensor=2', 'zoo=mamba,tensor=4', 'zoo=rg_lru,fsdp=2,tensor=2'],
            id='heads and channels',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                'zoo=mha,sequence=4',
                'zoo=gla,sequence=4',
                'zoo=mamba,sequence=4',
                'zoo=lru,sequence=4',  # Complex states: libtpu scatters no complex sums.
                'zoo=gated_delta_net,data=2,sequence=2',
            ],
            id='time',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_steps_keep_their_kernels_on_four_tpus(steps):
    check('v5e:2x2', steps)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='the compiler for TPUs is made for Linux')
def test_steps_keep_their_kernels_on_sixteen_tpus():
    check('v5e:4x4', [f'zoo={recipe},data=4,fsdp=2,tensor=2' for recipe in ('mha', 'gla', 'mamba')])


def check(topology, steps):
    # In a process of its own: the compiler's library speaks up in every process that finds it.
    command = [sys.executable, '-m', 'tests.compile.training', f'--topology={topology}', *steps]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, f'make test installs the compiler of TPUs.\n{done.stderr[-3000:]}'
    print(done.stdout)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line['step'] for line in found] == steps
    for line in found:
        # Forward and backward of the mixer and of the loss, at least.
        assert line['kernels'] >= 4, line
        assert 'all-reduce' in line['collectives'], line
        for shape in line['gathered']:
            sizes = [int(size) for size in re.search(r'\[([\d,]+)]', shape)[1].split(',')]
            # Outside of cores nothing of every token is gathered.
            assert training.LENGTH not in sizes, line


def test_calls_on_two_gpus_are_of_half_the_rows():
    setup = training.setup_for('zoo=mha,data=2', jax.devices())
    with target.compiling_for(target.H100):
        text = setup.trace().lower(lowering_platforms=('cuda',)).as_text()
    calls = [line for line in text.splitlines() if 'custom_call @mosaic_gpu' in line]
    assert len(calls) >= 4
    rows = {int(size) for call in calls for size in re.findall(rf'tensor<(\d+)x{training.LENGTH}x\d+x\d+x', call)}
    assert rows == {training.ROWS // 2}
