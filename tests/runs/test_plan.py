"""Plans of runs on devices that are not there."""

import importlib.util
import io
import json
import pathlib
import re
import subprocess
import sys
import types

import jax
import pytest
from rich.console import Console

from attnlab.errors import UserError
from attnlab.runs.plan import print_plan_for, shortage, state_table
from attnlab.tables import Printer
from attnlab.train import topologies
from attnlab.train.hardware import hardware
from attnlab.train.setup import prepare
from configs import language, long_range
from pallas_kernels import target
from tests.kernels import compile_gpu

ROOT = pathlib.Path(__file__).parents[2]


def test_plan_for_gpus_without_their_compiler_names_memory_kernels_and_an_estimate(monkeypatch):
    monkeypatch.setattr(topologies, 'find_cuda', lambda: False)
    topology = topologies.find('H100x2')
    config = language.get_config('zoo=gla+mha,size=tiny,conv=AC').unlock()
    config.precision.activations, config.model.stack.depth = 'bfloat16', 1
    config.mesh.data, config.mesh.tensor, config.model.stack.blocks[0].mixer.heads = 1, 2, 1
    console = Console(file=io.StringIO(), width=200)
    print_plan_for(prepare(config.lock(), topology.devices), topology, Printer(console))
    text = console.file.getvalue()
    assert 'mosaic_gpu' in text
    assert 'roofline estimate of a step (not measured)' in text
    assert 'optimiser' in text
    assert 'residual convolutions stand at AC of layers' in text
    assert '989 TFLOP/s' in text
    assert '\nwhole on every device: linear_attention: heads 1 over tensor 2\n' in text
    assert 'no layer is Attention: config.model.stack.depth is 1, the pattern has 2 layers' in text
    assert f'collectives\nits compiler: {topologies.NO_CUDA}\n' in text
    # Collectives are not known: none are taken for 0, nor is a bound said to have them.
    rows = {line.partition('\t')[0]: ' '.join(line.split()) for line in text.splitlines()}
    assert rows['links'] == 'links not known without its compiler'
    assert rows['at most'].endswith('tokens/s all at once, without the links')
    assert rows['one after the other'].endswith('ms without the links')


def test_a_compiler_for_tpus_that_is_missing_is_had_by_the_command_that_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    monkeypatch.setattr(sys, 'prefix', str(tmp_path / '.venv'))
    with pytest.raises(UserError, match='libtpu, is neither installed nor in') as refused:
        topologies.find_libtpu()
    made_by(str(refused.value), 'requirements-tpu.lock')


def test_a_compiler_for_gpus_that_is_missing_is_had_by_the_command_that_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    monkeypatch.setattr(sys, 'prefix', str(tmp_path / '.venv'))
    assert not topologies.find_cuda()
    made_by(topologies.NO_CUDA, 'requirements-cuda.lock')


def made_by(text, lock):
    (goal,) = re.findall(r'make (\S+)', text)
    # Of another path make has a rule too, that installs nothing.
    made = subprocess.run(['make', '-n', '-W', lock, goal], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f'-r {lock}' in made.stdout


def test_gpus_that_the_plugin_does_not_describe_are_stood_in_for(monkeypatch):
    def refuse(topology_name, platform, **given):
        raise NotImplementedError('topology not implemented for cuda\nmore')

    monkeypatch.setattr(topologies, 'find_cuda', lambda: True)
    monkeypatch.setattr(topologies.topologies, 'get_topology_desc', refuse)
    topology = topologies.find('H100x2')
    assert not topology.compiles
    with pytest.raises(
        UserError, match=r'^there is no compiler for H100x2: .* refuses: topology not implemented for cuda$'
    ):
        topology.compile(jax.jit(lambda x: x).lower(1.0))


def planned(topology, *flags):
    """The command for a tiny gla on four devices, done."""
    given = '--config.mesh.fsdp=4', '--config.model.stack.depth=2', '--config.precision.activations=bfloat16'
    config = '--config=language:zoo=gla,size=tiny'
    command = [sys.executable, '-m', 'attnlab', 'train', '--dry_run', f'--topology={topology}', config, *given, *flags]
    # In a process of its own: a compiler's library speaks up in every process that finds it.
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1200)


COMPILED = (
    pytest.param(
        'H100x4',
        marks=pytest.mark.skipif(
            not compile_gpu.APART.exists(), reason='make compile-gpu installs the plugin for CUDA'
        ),
    ),
    pytest.param(
        'v5e:2x2',
        marks=pytest.mark.skipif(sys.platform != 'linux', reason='the compiler for TPUs is made for Linux'),
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize('topology', COMPILED)
def test_a_plan_has_what_only_a_compiler_knows(topology):
    done = planned(topology, '--format=json')
    assert done.returncode == 0, done.stderr
    gpu = topologies.gpus(topology) is not None
    said = 'algorithms of products are those without a device: a run measures which are fastest, and its temporaries'
    assert done.stderr == (f'{said} may be others\n' if gpu else '')
    found = json.loads(done.stdout)
    assert {row['implementation'] for row in found['kernels']} == {'mosaic_gpu' if gpu else 'mosaic_tpu'}

    parameters = found['parameters'][-1]['number']
    memory = {row['what']: row['bytes'] for row in found['memory']}
    # Almost all of them are divided by four, and so are two moments each.
    assert parameters <= memory['parameters'] < 1.1 * parameters
    assert memory['optimiser'] == pytest.approx(2 * memory['parameters'], abs=64)
    temporaries = memory['activations and other temporaries (compiled)']
    given = memory['in all'] - temporaries
    # What a step does not read is left out, and for TPUs what is small is padded.
    state = memory['train state'] + memory['batch']
    assert 0.99 * state <= given <= (1.01 if gpu else 1.2) * state
    assert 2**20 < temporaries < 2**26

    exchanged = {row['kind']: row['bytes sent'] for row in found['collectives']}
    assert exchanged.keys() >= {'all-gather', 'all-reduce', 'reduce-scatter'}
    # Every layer gathers its parameters in two bytes each, forward and backward; embeddings and head once.
    once = 2 * parameters * 3 // 4
    assert 1.5 * once < exchanged['all-gather'] < 3 * once

    roofline = {row['what']: row for row in found['roofline']}
    times = [roofline[name]['value'] for name in ('operations', 'memory', 'links')]
    assert roofline['all at once']['value'] == max(times) and min(times) > 0
    assert 'of the compiled step' in roofline['memory']['assumes']
    assert 'without' not in roofline['at most']['assumes']


@pytest.mark.slow
@pytest.mark.parametrize('topology', COMPILED)
def test_a_run_whose_temporaries_do_not_fit_says_by_how_much_they_do_not(topology):
    done = planned(topology, '--config.batch_size=16384', '--config.length=2048')
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.match(rf'attnlab: the run does not fit on {topology}: .*temporaries take .* GiB on one device', line)
    assert re.search(r'too little by [\d.]+ GiB$', line)


def test_a_run_that_does_not_fit_says_so_and_by_how_much_before_it_is_compiled():
    config = language.get_config('size=1b').unlock()
    config.model.dim = 4096
    topology = topologies.Topology('v5e:1x1', (jax.devices()[0],), target.TPU_V5E)
    console = Console(file=io.StringIO())
    with pytest.raises(UserError, match=r'alone takes .* GiB on one device, TPU v5 lite has 16 GiB, too little by'):
        print_plan_for(prepare(config.lock(), topology.devices), topology, Printer(console))
    assert console.file.getvalue() == ''


def test_what_the_compiler_lacks_is_said_by_how_much():
    message = (
        'RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO '
        'temporaries (175.64G) exceeds available HBM (95.73G). HLO module: jit_step.\nmore'
    )
    found = shortage(message)
    assert found.startswith('activations and other temporaries take 175.6 GiB on one device')
    assert found.endswith('too little by 79.91 GiB')
    assert shortage('RESOURCE_EXHAUSTED: something else\nmore') == 'RESOURCE_EXHAUSTED: something else'


@pytest.mark.parametrize(
    ('name', 'near'),
    [('v5p:3x3x7', 'v5p:4x4x4'), ('v5:2x2', 'v5'), ('h100:8', 'H100x8'), ('v6:4x4', 'v6e:4x4'), ('v4:4', 'v4:2x2x1')],
)
def test_the_nearest_topology_is_named(name, near):
    assert topologies.nearest_topology(name).startswith(near)


@pytest.mark.parametrize(
    ('name', 'near'), [('H100x10000', 'H100x9999'), ('H100x0', 'H100x1'), ('v4:0x0x0', 'v4:2x2x1')]
)
def test_the_nearest_number_of_chips_is_one_that_there_is(name, near):
    assert topologies.nearest_topology(name) == near
    with pytest.raises(UserError, match=f"^there is no topology '{name}'; the nearest is {near}$"):
        topologies.find(name)


def test_a_topology_that_is_none_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"^there is no topology 'H200x8'; the nearest is H100x8$"):
        topologies.find('H200x8')


@pytest.mark.parametrize('name', ['B200x8', 'A100x8', '', 'trainium'])
def test_hardware_of_another_kind_is_answered_by_what_there_is(name):
    there = 'there are v4, v5e, v5p, tpu7x, v6e, as v5p:4x4x4, and of GPUs H100, as H100x8'
    with pytest.raises(UserError, match=f"^there is no topology '{name}'; {there}$"):
        topologies.find(name)


def test_a_topology_that_the_compiler_does_not_know_is_refused_in_one_line(monkeypatch):
    def refuse(platform, topology_name):
        raise jax.errors.JaxRuntimeError('INVALID_ARGUMENT: 3x5 is not divisible by 2x2x1\nmore')

    monkeypatch.setattr(topologies, 'find_libtpu', lambda: None)
    monkeypatch.setattr(topologies.topologies, 'get_topology_desc', refuse)
    with pytest.raises(UserError, match=r"^there is no topology 'v5e:3x5'; the nearest is v5e:4x4 \(.* by 2x2x1\)$"):
        topologies.find('v5e:3x5')


@pytest.mark.parametrize(('name', 'options'), [('v4:2x2x1', {'chip_config_name': 'megacore'}), ('v5e:2x2', {})])
def test_a_device_is_what_jax_makes_meshes_of(name, options, monkeypatch):
    def describe(platform, topology_name, **given):
        assert given == options
        return types.SimpleNamespace(devices=jax.devices())

    monkeypatch.setattr(topologies, 'find_libtpu', lambda: None)
    monkeypatch.setattr(topologies.topologies, 'get_topology_desc', describe)
    assert topologies.find(name).devices == tuple(jax.devices())


@pytest.mark.parametrize(
    ('kind', 'flops'),
    [('TPU v5 lite', 197e12), ('TPU v5', 459e12), ('TPU v5p', 459e12), ('NVIDIA H100 80GB HBM3', 989e12)],
)
def test_kinds_of_devices_are_told_apart(kind, flops):
    assert hardware(kind).flops == flops


def test_a_model_that_reads_documents_whole_has_no_state():
    config = long_range.get_config('task=digits,size=smoke')
    table = state_table(prepare(config))
    assert table.text() == [['any', 'does not stream', '']]
