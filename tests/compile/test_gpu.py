"""Training steps are compiled for an H100, which need not be at hand: how much memory they take.

`make compile-gpu` installs JAX's plugin for CUDA and runs this; without it what needs the plugin is skipped.
"""

import json
import subprocess
import sys

import pytest

from tests.kernels import compile_gpu

CEILINGS = {
    'mha': 1800,
    'gla': 2000,
    'gated_delta_net': 2700,
    'mamba2': 3100,
    'mamba': 4700,
    'rg_lru': 2550,
    'gau': 2400,
}
"""MiB of temporaries of two periods of layers of width 1,024, at 8 rows of 2,048 tokens in bfloat16."""


@pytest.mark.slow
@pytest.mark.skipif(not compile_gpu.APART.exists(), reason='make compile-gpu installs the plugin for CUDA')
@pytest.mark.parametrize('recipe', CEILINGS)
def test_a_step_takes_no_more_memory(recipe):
    command = [sys.executable, '-m', 'tests.compile.gpu', recipe]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = map(json.loads, done.stdout.splitlines())
    assert line['temporary MiB'] <= CEILINGS[recipe], line
