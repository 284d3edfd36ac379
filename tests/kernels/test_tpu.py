"""Kernels for TPUs are compiled, at the sizes of models, by the compiler that TPUs have; none need be at hand."""

import functools
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from pallas_kernels.cases import attention
from tests.kernels import maps_table

CORES = (
    'attention',
    'cross_entropy',
    'delta_rule',
    'diagonal_low_rank',
    'linear_attention',
    'linear_scan',
    'long_conv',
    'selective_scan',
    'softmax',
    'softmax_topk',
)
SCRIPT = pathlib.Path(__file__).parent / 'compile_tpu.py'


@pytest.mark.skipif(sys.platform != 'linux', reason='the compiler for TPUs is made for Linux')
@pytest.mark.parametrize(
    'every_call',
    [
        pytest.param(False, id='one call', marks=pytest.mark.xdist_group('tpu')),
        pytest.param(True, id='every call on every kind of TPU', marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize('core', CORES)
def test_a_kernel_compiles(core, every_call):
    found = compiled_calls((), (core,)) if every_call else compiled_calls(('--topologies=v5e:2x2', '--first'), CORES)
    lines = [line for line in found if line['core'] == core]
    assert not any('error' in line for line in lines), next(line['error'] for line in lines if 'error' in line)
    assert {line['what'] for line in lines} == {'forward', 'forward and backward'}
    for line in lines:
        assert line['implementation'] == 'mosaic_tpu', line
        assert line['seconds'] < 30, line
        # Linear in length: a block of t x t scores for every head alone would take 64 GiB.
        assert line['temporary MiB'] < TEMPORARIES.get(core, 12) * line['arguments MiB'], line


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='the compiler for TPUs is made for Linux')
def test_a_scan_of_many_channels_compiles():
    lines = compiled_calls(('--topologies=v5e:2x2', '--calls=wide'), ('selective_scan',))
    assert [line.get('implementation') for line in lines] == ['mosaic_tpu'] * 2, lines


@functools.cache
def compiled_calls(options: tuple[str, ...], cores: tuple[str, ...]) -> list[dict[str, Any]]:
    """What became of every call, in a process of its own: the compiler's library speaks up wherever it is found."""
    command = [sys.executable, SCRIPT, *options, *cores]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, f'make test installs the compiler of TPUs.\n{done.stderr[-3000:]}'
    print(done.stdout)
    return [json.loads(line) for line in done.stdout.splitlines()]


TEMPORARIES = {'long_conv': 21}
"""Bytes of temporaries for each byte of arguments, at most 12 elsewhere; the states between chunks are most of them.

Of a long convolution they are its rows, in float32 and twice as many as the four of the call; of arguments in bfloat16
with few taps twice as many again, but for results.
"""


BUNDLES = {
    'attention_forward': (3190, 870),
    'attention_query_gradients': (3240, 1310),
    'attention_key_gradients': (4830, 1910),
}
"""The most instructions of the kernels of attention at 64 channels for a TPU v5e, and of a block that is not masked."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='the compiler for TPUs is made for Linux')
def test_kernels_of_attention_are_compiled_to_few_instructions():
    forward, both = compiled_calls(('--topologies=v5e:2x2', '--first', '--schedules'), ('attention',))
    assert len(forward['kernels']) == 1 and len(both['kernels']) == len(BUNDLES)
    for line in (forward, both):
        for kernel in line['kernels']:
            (most,) = (most for name, most in BUNDLES.items() if name in kernel['kernel'])
            whole, _ = kernel['products'][-2:]
            assert kernel['bundles'] <= most[0] and whole[0] <= most[1], kernel
    # Where products stand beside exponentials, matrix units seldom wait.
    assert forward['kernels'][0]['products'][-2][1] > 0.8


OVER_SOFTMAX = {
    'soft cap': (1.21, 1.2, 1.2),
    'normalised self-adjust': (1.2, 1.56, 1.35),
    'sigmoid': (1.2, 1.36, 1.27),
    'stablemax': (1.62, 1.43, 1.3),
    'entmax 1.2': (1.44, 1.42, 1.4),
}
"""Of a map the instructions of its kernels over those of the softmax, at most, where they are more than a fifth."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='the compiler for TPUs is made for Linux')
def test_kernels_of_weight_maps_have_few_more_instructions_than_those_of_the_softmax():
    lines = compiled_calls(('--topologies=v5e:2x2', '--calls=every_map', '--schedules'), ('attention',))
    assert not any('error' in line for line in lines), lines
    found = maps_table.over_softmax(lines)
    assert set(found) > set(attention.MAPS)
    for name, ratios in found.items():
        for ratio, most in zip(ratios, OVER_SOFTMAX.get(name, (1.2,) * 3), strict=True):
            assert ratio <= most, (name, ratios)


INSTRUCTIONS = {
    'linear_attention_forward': 1090,
    'linear_attention_backward': 1960,
    'delta_rule_forward': 4160,
    'delta_rule_backward': 6600,
    'diagonal_low_rank_forward': 6640,
    'diagonal_low_rank_backward': 14100,
    'long_conv_forward': 1820,
    'long_conv_taps_gradient': 1055,
}
"""Of a program of four heads, or channels, for a v5e, at most: 4 % above what the compiler makes of the first calls."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='the compiler for TPUs is made for Linux')
def test_programs_of_several_heads_have_no_more_instructions():
    cores = ('linear_attention', 'delta_rule', 'diagonal_low_rank', 'long_conv')
    lines = compiled_calls(('--topologies=v5e:2x2', '--first', '--schedules'), cores)
    found = [kernel for line in lines for kernel in line['kernels']]
    for name, most in INSTRUCTIONS.items():
        bundles = [kernel['bundles'] for kernel in found if name in kernel['kernel']]
        assert bundles and max(bundles) <= most, (name, bundles)
