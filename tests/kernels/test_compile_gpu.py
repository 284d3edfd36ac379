"""Kernels for GPUs are compiled to machine code for an H100, by JAX's plugin for CUDA; none need be at hand.

`make compile-gpu` installs the plugin and runs this; without it what needs the plugin is skipped.
"""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.kernels import compile_gpu

SCRIPT = pathlib.Path(__file__).parent / 'compile_gpu.py'
MOVED = {
    'attention': 0.55,
    'cross_entropy': 19.0,
    'delta_rule': 0.2,
    'diagonal_low_rank': 23.0,
    'linear_attention': 0.6,
    'linear_scan': 1.05,
    'selective_scan': 2.5,
    'short_conv': 1.05,
    'softmax': 0.05,
    'softmax_topk': 7.0,
}
"""Of every core the bytes that XLA may move beside kernels for one of arguments."""

KERNELS = {
    'attention_forward': (168, 197),
    'attention_key_gradients': (168, 100),
    'attention_query_gradients': (168, 129),
    'cross_entropy_gradients': (168, 208),
    'cross_entropy_statistics': (168, 196),
    'delta_rule_key_gradients': (255, 71),
    'delta_rule_missing': (72, 44),
    'delta_rule_queries': (96, 26),
    'delta_rule_solve': (184, 59),
    'linear_attention_gradients': (184, 47),
    'linear_attention_sweep': (96, 104),
    'linear_scan': (32, 80),
    'matrix_state_inverse': (136, 80),
    'matrix_state_inverse_gradients': (104, 80),
    'matrix_state_read': (128, 42),
    'matrix_state_read_gradients': (184, 47),
    'matrix_state_read_weighed': (64, 40),
    'matrix_state_sweep': (104, 177),
    'matrix_state_weight_gradients': (255, 91),
    'matrix_state_weights': (255, 75),
    'selective_scan_backward': (200, 86),
    'selective_scan_forward': (72, 34),
    'selective_scan_summary_of_gradients': (72, 10),
    'selective_scan_summary_of_states': (64, 10),
    'short_conv': (48, 32),
    'short_conv_gradients': (112, 66),
    'softmax_backward': (144, 2),
    'softmax_forward': (80, 2),
    'softmax_topk': (160, 2),
}
"""Registers of a thread, which are given in eights, and KiB of shared memory of a block that a kernel may have.

Both decide how many blocks a multiprocessor holds; a block may have 255 and 227.
"""

SPILLED = {'matrix_state_weight_gradients': 368}
"""Bytes that a kernel may spill; others none."""

EVERY = ('attention',)
"""Cores of which every call of `real()` is compiled; of others the first."""


@pytest.mark.slow
@pytest.mark.skipif(not compile_gpu.APART.exists(), reason='make compile-gpu installs the plugin for CUDA')
@pytest.mark.parametrize('core', MOVED)
def test_kernels_compile_for_an_h100(core):
    command = [sys.executable, SCRIPT, *([] if core in EVERY else ['--first']), core]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert not any('error' in line for line in lines), next(line['error'] for line in lines if 'error' in line)
    for line in lines:
        assert line['implementation'] == 'mosaic_gpu', line
        # What the forward pass alone has compiled is not assembled again.
        assert line['kernels'] or line['what'] != 'forward', line
        assert line['beside MiB'] <= MOVED[core] * line['arguments MiB'], line
        for kernel in line['kernels']:
            registers, shared = KERNELS[kernel['kernel']]
            assert kernel['registers'] <= registers, line
            assert kernel['shared'] <= shared * 1024, line
            assert kernel['spilled'] <= SPILLED.get(kernel['kernel'], 0), line
            assert kernel['early'] == [], line
            assert kernel['constants'] == [], line


PTX = """
wgmma.fence.sync.aligned;
{ .reg .pred p; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2}, %rd1, %rd2, p, 1, 1, 0, 0; }
wgmma.commit_group.sync.aligned;
add.f32 %r9, %r8, %r7;
{ .reg .pred p; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r3,%r4}, {%r5,%r6}, %rd2, p, 1, 1, 0; }
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 1;
mul.f32 %r10, %r1, %r2;
wgmma.wait_group.sync.aligned 0;
mul.f32 %r10, %r3, %r5;
"""


def test_registers_touched_before_their_product_was_waited_for_are_found():
    assert compile_gpu.early_uses(PTX) == []
    unwaited = PTX.replace('wgmma.wait_group.sync.aligned 1;', '')
    assert compile_gpu.early_uses(unwaited) == ['9: mul.f32 %r10, %r1, %r2;']
    assert compile_gpu.early_uses(PTX.replace('aligned 1;', 'aligned 0;')) == []
    assert len(compile_gpu.early_uses(PTX.replace('aligned 0;', 'aligned 1;'))) == 1


FACTORS = """
mov.b32 	%r20, 1065369472;
mov.b32 	%r5, %r20;
add.s32 	%r21, %r22, 1;
mov.b32 	%r6, %r21;
{ .reg .pred p; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r3,%r4}, {%r5,%r6}, %rd2, p, 1, 1, 0; }
{ .reg .pred p; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r3,%r4}, %rd1, %rd2, p, 1, 1, 0, 0; }
"""


def test_constants_in_the_registers_of_factors_are_found():
    assert compile_gpu.constant_factors(FACTORS) == ['6: %r5 is 1065369472']
    assert (
        compile_gpu.constant_factors(FACTORS.replace('mov.b32 	%r20, 1065369472', 'xor.b32 	%r20, %r30, 1')) == []
    )
    overwritten = FACTORS.replace(
        'mov.b32 	%r6', 'or.b32 	%r20, %r21, 1;\nmov.b32 	%r5, %r20;\nmov.b32 	%r6'
    )
    assert compile_gpu.constant_factors(overwritten) == []


PROGRAM = """
%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %big = f32[8]{0} multiply(%p, %p)
}

ENTRY %main (x: f32[8], y: bf16[4,2]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = bf16[4,2]{1,0} parameter(1)
  %kernel = (f32[8]{0}, bf16[4,2]{1,0}) custom-call(%x, %y), custom_call_target="mosaic_gpu_v2"
  %first = f32[8]{0} get-tuple-element(%kernel), index=0
  %copy = bf16[4,2]{0,1} copy(%y), metadata={op_name="a"}
  ROOT %sum = f32[8]{0} fusion(%first, %x), kind=kLoop, calls=%fused
}
"""


def test_bytes_of_operations_beside_kernels_are_added_up():
    assert compile_gpu.beside(PROGRAM) == {'copy': 32, 'sum': 96}
