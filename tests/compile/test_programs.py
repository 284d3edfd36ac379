"""Programs of recipes are compiled for accelerators; none need be at hand."""

import json
import pathlib
import subprocess
import sys

import pytest

from attnlab.train import topologies
from attnlab.zoo import ZOO
from tests.compile import table
from tests.compile.programs import PROGRAMS

ROOT = pathlib.Path(__file__).parents[2]
CHOSEN = ('mha', 'gla', 'mamba2', 'rg_lru')
"""Recipes of different cores."""


def check(line, kernel):
    assert 'failed' not in line, line
    recipe = ZOO[line['recipe']]
    # Of steps, forward and backward of the mixer and of the loss, at least.
    least = (4 if 'step' in line['program'] and line['program'] != 'decoding step' else 1) * (
        kernel in recipe.implementations
    )
    assert line['kernels'] >= least, line


@pytest.mark.parametrize('program', PROGRAMS)
@pytest.mark.parametrize('recipe', ZOO)
@pytest.mark.slow
def test_programs_are_lowered_for_gpus(recipe, program):
    check(table.describe(recipe, program, topologies.find('H100x1')), 'mosaic_gpu')


@pytest.mark.parametrize('recipe', CHOSEN)
def test_steps_are_lowered_for_gpus(recipe):
    check(table.describe(recipe, 'recomputing step', topologies.find('H100x1')), 'mosaic_gpu')


@pytest.mark.skipif(sys.platform != 'linux', reason='the compiler for TPUs is made for Linux')
@pytest.mark.parametrize(
    ('topology', 'programs', 'recipe'),
    [
        ('v5e:2x2', 'training step', 'rg_lru'),
        *(pytest.param('v5e:2x2', ','.join(PROGRAMS), recipe, marks=pytest.mark.slow) for recipe in ZOO),
        *(pytest.param('v5p:2x2x1', 'training step', recipe, marks=pytest.mark.slow) for recipe in ZOO),
        *(pytest.param('v6e:2x2', 'training step', recipe, marks=pytest.mark.slow) for recipe in ZOO),
    ],
)
def test_programs_are_compiled_for_tpus(topology, programs, recipe):
    # In a process of its own: the compiler's library speaks up in every process that finds it.
    command = [sys.executable, '-m', 'tests.compile.table', f'--topology={topology}', f'--programs={programs}', recipe]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, f'make test installs the compiler of TPUs.\n{done.stderr[-3000:]}'
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line['program'] for line in lines] == programs.split(',')
    for line in lines:
        check(line, 'mosaic_tpu')
