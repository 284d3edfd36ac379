"""Programs of recipes are compiled for accelerators; none need be at hand."""

import json
import pathlib
import subprocess
import sys

import jax
import pytest

from attnlab.train import topologies
from attnlab.zoo import ZOO
from pallas_kernels import target
from tests.compile import table
from tests.compile.programs import PROGRAMS, programs_of, trace
from tests.kernels import compile_gpu

ROOT = pathlib.Path(__file__).parents[2]
CHOSEN = ('mha', 'gla', 'mamba2', 'rg_lru')
"""Recipes of different cores."""

CONVOLUTIONS = ('s4', 's4d')
"""Recipes whose core runs where there is no state; with one they run in chunks, in float32."""


def check(line, kernel):
    assert 'failed' not in line, line
    recipe = ZOO[line['recipe']]
    # Of steps, forward and backward of the mixer, and of the loss of next tokens, at least.
    steps = 4 if recipe.causal else 2
    streams = line['program'] in ('prefill', 'decoding step')
    least = (
        0 if streams and line['recipe'] in CONVOLUTIONS else 1 if 'step' not in line['program'] or streams else steps
    )
    least *= kernel in recipe.implementations
    assert line['kernels'] >= least, line


def described(recipe, program):
    return table.describe(table.Cell('H100x1', '', recipe, program), table.topology_of('H100x1', ''))


@pytest.mark.parametrize(('recipe', 'program'), [(recipe, name) for recipe in ZOO for name in programs_of(recipe)])
@pytest.mark.slow
def test_programs_are_lowered_for_gpus(recipe, program):
    check(described(recipe, program), 'mosaic_gpu')


@pytest.mark.parametrize('recipe', ZOO)
@pytest.mark.slow
def test_steps_are_lowered_for_tpus(recipe):
    """Before its compiler is asked, which few recipes are given to in a night."""
    topology = topologies.Topology('a TPU', tuple(jax.local_devices()[:1]), target.TPU_V5E)
    text = table.lower(table.Cell('', '', recipe, 'training step'), topology).as_text()
    check({'recipe': recipe, 'program': 'training step', 'kernels': text.count('@tpu_custom_call')}, 'mosaic_tpu')


@pytest.mark.parametrize(
    ('recipe', 'program'),
    [
        pytest.param(recipe, name, marks=() if recipe in CHOSEN else pytest.mark.slow)
        for recipe in ZOO
        for name in programs_of(recipe)
        if name != 'recomputing step'
    ],
)
def test_programs_have_no_effects(recipe, program):
    """With one JAX would give them their arrays one by one from Python, in ten times the time."""
    assert not trace(recipe, program, jax.local_devices()[:1]).jaxpr.effects


@pytest.mark.parametrize('recipe', CHOSEN)
def test_steps_are_lowered_for_gpus(recipe):
    check(described(recipe, 'recomputing step'), 'mosaic_gpu')


def test_the_document_shows_the_lines_that_are_kept():
    def rows(text):
        return [line for line in text.splitlines() if line.startswith('|')]

    assert rows(table.DOCUMENT.read_text()) == rows(table.render(table.read())), (
        'python -m tests.compile.table --render'
    )


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason='JAX 0.11 lowers a kernel for GPUs to other bytes every time'
)
def test_a_program_that_is_as_it_was_is_not_compiled_again():
    # What other tests have traced says where its source files are.
    jax.clear_caches()
    cell, topology = table.Cell('H100x1', '', 'base_conv', 'evaluation'), table.topology_of('H100x1', '')
    line = table.describe(cell, topology)
    assert 'failed' not in line, line
    assert table.describe(cell, topology, line) is line
    assert table.describe(cell, topology, line | {'jax': '0.1'})['jax'] == line['jax']
    kept = {cell: line, table.Cell('H100x1', '', 'base_conv', 'prefill'): line | {'jax': '0.1'}}
    assert list(table.stale(kept, kept)) == [(cell, '')]
    assert list(table.stale(kept, {cell: line | {'hash': table.DIGITS * '0'}})) == [(cell, line['hash'])]
    assert list(table.stale(kept, {cell: line | {'hash': 16 * '0'}})) == [(cell, 'unknown')]
    # Nor does a program say where its source files are, so that it is the same of another checkout.
    text = table.lower(cell, topology).as_text()
    assert 'mosaic_gpu' in text and str(ROOT) not in text


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='the compiler for TPUs is made for Linux')
@pytest.mark.parametrize(
    ('topology', 'programs', 'recipe'),
    [
        *(('v5e:2x2', ','.join(PROGRAMS), recipe) for recipe in table.CLASSES),
        *(('v5p:2x2x1', 'training step,decoding step', recipe) for recipe in table.CLASSES),
        *(('v6e:2x2', 'training step,decoding step', recipe) for recipe in table.CLASSES),
        *(
            ('v5e:2x2', 'training step,prefill,decoding step', recipe)
            for recipe in ('nsa', 'uniattn', 'griffin', 'based', 'kda', 'mla', 'sparsemax', 'base_conv', 'samba')
        ),
        *(('v5e:2x2', 'training step', recipe) for recipe in ('swin', 'vmamba')),
        # libtpu died of gathers in both, which it gives to the SparseCores that a v5e does not have.
        ('v5p:2x2x1', 'decoding step', 'moba'),
        ('v5p:2x2x1', 'evaluation', 'sa_softmax_normalised'),
    ],
)
def test_programs_are_compiled_for_tpus(topology, programs, recipe):
    lines = compiled(f'--topology={topology}', f'--programs={programs}', recipe)
    assert [line['program'] for line in lines] == programs.split(',')
    for line in lines:
        check(line, 'mosaic_tpu')


@pytest.mark.slow
@pytest.mark.skipif(not compile_gpu.APART.exists(), reason='make compile-gpu installs the plugin for CUDA')
@pytest.mark.parametrize('mesh', [mesh for mesh in table.MESHES if mesh.count(',') < 2])
def test_steps_are_compiled_for_four_gpus(mesh):
    lines = compiled('--topology=H100x4', f'--mesh={mesh}', '--programs=training step', *table.CLASSES)
    assert {line['recipe'] for line in lines} == set(table.CLASSES)
    for line in lines:
        check(line, 'mosaic_gpu')


def compiled(*arguments):
    # In a process of its own: a compiler's library speaks up in every process that finds it.
    command = [sys.executable, '-m', 'tests.compile.table', *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800)
    makes = 'make test installs the compiler of TPUs, make compile-gpu that of GPUs'
    assert done.returncode == 0, f'{makes}.\n{done.stderr[-3000:]}'
    return [json.loads(line) for line in done.stdout.splitlines()]
