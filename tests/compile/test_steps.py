"""Training steps are compiled for an H100 and a TPU, which need not be at hand: what memory they take and move.

`make compile-gpu` installs JAX's plugin for CUDA and runs those of GPUs; without it they are skipped.
"""

import json
import subprocess
import sys

import pytest

from tests.kernels import compile_gpu

GPU = {
    'mha': 1800,
    'gla': 2000,
    'gated_delta_net': 2700,
    'mamba2': 3100,
    'mamba': 4700,
    'rg_lru': 2550,
    'gau': 2400,
}
"""MiB of temporaries of two periods of layers of width 1,024, at 8 rows of 2,048 tokens in bfloat16."""

TPU = {'mha': (2400, 15500), 'gla': (3000, 17000)}
"""The same for a TPU v5e, and MiB that are read and written."""


def compiled(*arguments):
    command = [sys.executable, '-m', 'tests.compile.steps', *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = map(json.loads, done.stdout.splitlines())
    return line


@pytest.mark.slow
@pytest.mark.skipif(not compile_gpu.APART.exists(), reason='make compile-gpu installs the plugin for CUDA')
@pytest.mark.parametrize('recipe', GPU)
def test_a_step_on_a_gpu_takes_no_more_memory(recipe):
    assert compiled(recipe)['temporary MiB'] <= GPU[recipe]


@pytest.mark.slow
@pytest.mark.parametrize('recipe', TPU)
def test_a_step_on_a_tpu_takes_and_moves_no_more(recipe):
    line, (most, moved) = compiled('--topology=v5e:2x2', recipe), TPU[recipe]
    assert line['temporary MiB'] <= most and line['moved MiB'] <= moved, line
