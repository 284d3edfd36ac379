"""A model on a mesh gives the numbers of one device: every class of mixer; on more than two in another process."""

import dataclasses
import functools
import math
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict
from rich.console import Console

from attnlab.errors import UserError
from attnlab.functional.sampling import Sampling
from attnlab.models.sampling import generate
from attnlab.runs.collectives import exchanges
from attnlab.train import launch
from attnlab.zoo import ZOO
from tests.compile import programs
from tests.compile.table import CLASSES
from tests.train.divided import assert_same, on_one_device, small, trained

ROOT = pathlib.Path(__file__).parents[2]
QUICK = ('mha', 'linear_transformer', 'mamba')
DIVIDED = ('mha', 'gla', 'mamba')


def one_of_each_class():
    """The first recipe of every class of mixers that predicts the next token."""
    found: dict[str, str] = {}
    for name, recipe in ZOO.items():
        if recipe.causal:
            found.setdefault(recipe.pattern[0].target, name)
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in found.values()]


@functools.cache
def trained_alone(zoo: str) -> dict[str, Any]:
    return trained(on_one_device(small(zoo)), packed=ZOO[zoo].packed)


@pytest.mark.parametrize('zoo', one_of_each_class())
def test_two_devices_agree_with_one(zoo):
    assert_same(trained(small(zoo, tensor=2), packed=ZOO[zoo].packed), trained_alone(zoo))


CLAIMING = [
    pytest.param(name, marks=() if name in DIVIDED else pytest.mark.slow)
    for name, recipe in ZOO.items()
    if recipe.sequence and recipe.causal
]


@pytest.mark.parametrize('zoo', CLAIMING)
def test_time_over_two_devices_agrees_with_one(zoo):
    setup = small(zoo, sequence=2)
    assert_same(trained(setup, packed=ZOO[zoo].packed), trained_alone(zoo))
    # Cores exchange states, or keys and values; nothing else of every token is gathered.
    for line in setup.trace().lower().compile().as_text().splitlines():
        found = re.search(r'\w\[([\d,]+)]\S* (all-gather|all-to-all)\(', line)
        if found and 'shard_map' not in line:
            assert math.prod(map(int, found[1].split(','))) <= setup.batch_size * setup.length, line


@pytest.mark.parametrize(
    'zoo', [pytest.param(name, marks=() if name in ('rat', 'seqboat') else pytest.mark.slow) for name in ZOO]
)
def test_rows_over_two_devices_stay_where_they_are(zoo):
    setup = small(zoo, data=2) if ZOO[zoo].config == 'language' else programs.setup_for(zoo, jax.devices(), 'data=2')
    found = exchanges(setup.trace().lower().compile().as_text())
    # Gradients and losses are summed, and nothing of one device's rows is sent to the other.
    assert {exchange.kind for exchange in found} == {'all-reduce'}, found


def on_more_devices(*words: str, threads: int = 8) -> None:
    """Runs `tests.train.divided` where XLA has so many threads on a CPU."""
    command = [sys.executable, '-m', 'tests.train.divided', *words]
    # Threads of several devices on few cores may be apart for longer than the 40 s after which XLA ends the process.
    patience = '--xla_cpu_collective_call_terminate_timeout_seconds=1200'
    environment = os.environ | {'NPROC': str(threads), 'XLA_FLAGS': patience}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize('zoo', [case.values[0] for case in CLAIMING])
def test_time_over_four_and_eight_devices_agrees_with_one(zoo):
    on_more_devices(zoo, 'sequence=4', 'sequence=8')


@pytest.mark.slow
@pytest.mark.parametrize('form', ['mosaic_tpu', 'mosaic_gpu'])
@pytest.mark.parametrize('zoo', CLASSES)
def test_kernels_of_a_step_on_up_to_eight_devices_agree_with_one(zoo, form):
    # A thread a warpgroup of every device, and those that wait for the others.
    meshes = ('tensor=2', 'fsdp=4', 'data=2,fsdp=2,tensor=2', 'sequence=2', 'sequence=4')
    on_more_devices(zoo, form, *meshes, threads=64)


@pytest.mark.parametrize('zoo', [name for name, recipe in ZOO.items() if recipe.sequence])
def test_a_recipe_that_claims_to_divides_time(zoo):
    small(zoo, sequence=2).check()


def test_what_cannot_divide_time_says_so():
    with pytest.raises(UserError, match=r'config.mesh.sequence is 2, and this SelectiveAttention has no form'):
        small('selective_attention', sequence=2).check()
    setup = dataclasses.replace(small('mha', sequence=2), length=47)
    with pytest.raises(UserError, match=r'config.length is 47; with config.mesh.sequence it must be a multiple of 2'):
        setup.check()


@pytest.mark.parametrize('sizes', [pytest.param({'data': 2}, marks=pytest.mark.slow), {'tensor': 2}], ids=str)
def test_one_sequence_is_decoded_on_a_mesh(sizes):
    setup = small('mha', **sizes)
    alone = on_one_device(setup)
    prompt = np.arange(5, dtype=np.int32)
    tokens = [
        list(generate(nnx.merge(each.graphdef, each.initialize().variables), prompt, 6, Sampling(0.0), jit=each.jit))
        for each in (setup, alone)
    ]
    assert tokens[0] == tokens[1]


def test_what_does_not_divide_is_named():
    setup = small('mha', heads=1, tensor=2)
    found = [line for line in setup.undivided() if line.startswith('attention')]
    assert found == ['attention: heads 1 over tensor 2']
    assert on_one_device(setup).undivided() == []


def test_a_run_begins_with_what_does_not_divide(tmp_path, monkeypatch):
    setup, said = small('mha', heads=1, tensor=2), []
    monkeypatch.setattr(launch, 'prepare', lambda config: setup)
    monkeypatch.setattr(launch, 'train', lambda *args, opening, **others: said.extend(opening))
    launch.launch(ConfigDict(), tmp_path, console=Console(quiet=True))
    assert 'whole on every device: attention: heads 1 over tensor 2' in said


def test_attention_to_both_sides_over_two_devices_agrees_with_one():
    setup = small('mha', causal=False, sequence=2)
    setup.check()
    assert_same(trained(setup), trained(on_one_device(setup)))


@pytest.mark.slow
@pytest.mark.parametrize('axis', ['sequence', 'tensor'])
def test_convolutions_of_projections_over_two_devices_agree_with_one(axis):
    """Where the row has none."""
    assert_same(trained(small('gsa,conv=B', **{axis: 2})), trained_alone_at_b())


@functools.cache
def trained_alone_at_b() -> dict[str, Any]:
    return trained(on_one_device(small('gsa,conv=B')))


@pytest.mark.slow
@pytest.mark.parametrize('axis', ['data', 'sequence', 'tensor'])
def test_negative_eigenvalues_of_mamba_over_two_devices_agree_with_one(axis):
    setup = small('mamba', {'eigenvalues': 'signed'}, **{axis: 2})
    found = exchanges(setup.trace().lower().compile().as_text())
    assert axis != 'data' or {exchange.kind for exchange in found} == {'all-reduce'}, found
    assert_same(trained(setup, packed=True), trained(on_one_device(setup), packed=True))


@pytest.mark.parametrize(
    ('zoo', 'mixer'), [('sliding_window', 'Attention'), ('alibi', 'Attention'), ('gla', 'LinearAttention')]
)
def test_what_sees_both_sides_and_cannot_divide_time_says_so(zoo, mixer):
    with pytest.raises(UserError, match=f'config.mesh.sequence is 2, and this {mixer} has no form that divides time'):
        small(zoo, causal=False, sequence=2).check()


def test_how_attention_divides_time_is_in_the_plan():
    assert small('mha', sequence=2).time_division() == [
        'attention: keys and values in a ring, causal work dealt out in zig-zag '
        '(weights over some of the keys combine: Softmax)'
    ]
    assert small('mha').time_division() == []
