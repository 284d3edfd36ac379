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
    'linear_scan': 1.05,
    'selective_scan': 2.5,
    'short_conv': 1.05,
    'softmax': 0.05,
    'softmax_topk': 7.0,
}
"""Of a core the bytes that XLA may move beside kernels for one of arguments."""

BESIDE = {
    'attention': {'k=128, chosen blocks': (431, 1280)},
    'delta_rule': {
        'k=64, no decay': (23, 36),
        'k=64, scalar': (56, 105),
        'k=64, vector': (217, 232),
        'k=128, no decay': (25, 48),
        'k=128, scalar': (56, 141),
        'k=128, vector': (380, 407),
    },
    'diagonal_low_rank': {'k=64': (983, 3489), 'k=128': (1466, 5778)},
    'long_conv': {'t=2048, packed': (516, 1166), 't=8192, 128 taps': (364, 1259)},
    'linear_attention': {
        'k=64, no decay': (18, 18),
        'k=64, scalar': (49, 61),
        'k=64, vector': (214, 348),
        'k=128, no decay': (18, 18),
        'k=128, scalar': (49, 69),
        'k=128, vector': (377, 645),
        'k=128, constant, grouped': (30, 345),
        'k=128, scalar, shared': (49, 69),
    },
}
"""Of every call of a matrix state, of long convolutions and of chosen blocks, the MiB that XLA may move beside kernels,
forward and in both passes.

At half of its batch `delta_rule` with 16 heads of 128 is to move at most 0.3 GB in both passes, `linear_attention` 0.1
forward. With decays of key channels the second does not.
"""

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
    'delta_rule_solve_weighed': (168, 57),
    'delta_rule_within_chunks': (168, 68),
    'diagonal_low_rank_solve': (168, 64),
    'diagonal_low_rank_within_chunks': (160, 56),
    'linear_attention_gradients': (184, 47),
    'linear_attention_sweep': (96, 104),
    'linear_scan': (32, 80),
    'long_conv_forward': (192, 100),
    'long_conv_taps_gradient': (255, 50),
    'matrix_state_queries_weighed': (64, 32),
    'matrix_state_read': (128, 42),
    'matrix_state_read_gradients': (216, 56),
    'matrix_state_read_weighed': (64, 40),
    'matrix_state_score_gradients': (64, 24),
    'matrix_state_state_gradients': (176, 68),
    'matrix_state_sweep': (104, 177),
    'matrix_state_weight_gradients': (255, 108),
    'matrix_state_weights': (255, 107),
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

WIDE = {
    'delta_rule_key_gradients': (255, 111),
    'delta_rule_missing': (112, 60),
    'delta_rule_queries': (96, 50),
    'delta_rule_solve': (176, 67),
    'delta_rule_solve_weighed': (160, 65),
    'delta_rule_within_chunks': (168, 100),
    'diagonal_low_rank_solve': (160, 72),
    'diagonal_low_rank_within_chunks': (192, 88),
    'linear_attention_gradients': (255, 113),
    'matrix_state_queries_weighed': (64, 40),
    'matrix_state_read': (136, 88),
    'matrix_state_read_gradients': (255, 90),
    'matrix_state_read_weighed': (64, 56),
    'matrix_state_score_gradients': (64, 40),
    'matrix_state_state_gradients': (184, 108),
    'matrix_state_sweep': (144, 218),
}
"""The same at 128 key channels, where they differ."""

LOW_RANK = {'matrix_state_read_weighed': (64, 72), 'matrix_state_state_gradients': (216, 107)}
"""The same where values have keys of their own."""

CHOSEN = {'attention_key_gradients': (168, 101), 'attention_query_gradients': (168, 131)}
"""The same with chosen blocks."""

SPILLED = {
    ('delta_rule', 'k=64, vector'): {'matrix_state_weight_gradients': 1088},
    ('delta_rule', 'k=128, no decay'): {'delta_rule_key_gradients': 16},
    ('delta_rule', 'k=128, vector'): {'matrix_state_weights': 208, 'matrix_state_weight_gradients': 784},
    ('diagonal_low_rank', 'k=64'): {'matrix_state_weight_gradients': 464},
    ('diagonal_low_rank', 'k=128'): {'matrix_state_weights': 48, 'matrix_state_weight_gradients': 480},
    ('linear_attention', 'k=64, vector'): {'matrix_state_weight_gradients': 544},
    ('linear_attention', 'k=128, vector'): {'matrix_state_weights': 48, 'matrix_state_weight_gradients': 512},
    ('linear_attention', 'k=128, constant, grouped'): {'matrix_state_read_gradients': 40},
    ('linear_attention', 'k=128, scalar, shared'): {'linear_attention_gradients': 416},
}
"""Bytes that a kernel may spill, stores and loads together, with the first call that has it; others none."""

REFUSED = {'long_conv': ('t=2048', 't=8192', 't=2048, float32', 't=2048, float32, packed')}
"""Calls that no kernel serves."""

EVERY = tuple(BESIDE)
"""Cores of which every call of `real()` is compiled; of others the first."""


@pytest.mark.slow
@pytest.mark.skipif(not compile_gpu.APART.exists(), reason='make compile-gpu installs the plugin for CUDA')
@pytest.mark.parametrize('core', sorted({*MOVED, *BESIDE}))
def test_kernels_compile_for_an_h100(core):
    command = [sys.executable, SCRIPT, *([] if core in EVERY else ['--first']), core]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert not any('error' in line for line in lines), next(line['error'] for line in lines if 'error' in line)
    # What was compiled before is not assembled again.
    assert lines[0]['kernels']
    refused = {line['call'] for line in lines if line['implementation'] == 'xla'}
    assert refused == set(REFUSED.get(core, ()))
    for line in (line for line in lines if line['call'] not in refused):
        assert line['implementation'] == 'mosaic_gpu', line
        if line['call'] in BESIDE.get(core, ()):
            assert line['beside MiB'] <= BESIDE[core][line['call']][line['what'] != 'forward'], line
        else:
            assert line['beside MiB'] <= MOVED[core] * line['arguments MiB'], line
        ceilings = KERNELS | WIDE if core in BESIDE and line['call'].startswith('k=128') else KERNELS
        ceilings |= CHOSEN if 'chosen' in line['call'] else LOW_RANK if core == 'diagonal_low_rank' else {}
        for kernel in line['kernels']:
            registers, shared = ceilings[kernel['kernel']]
            assert kernel['registers'] <= registers, line
            assert kernel['shared'] <= shared * 1024, line
            assert kernel['spilled'] <= SPILLED.get((core, line['call']), {}).get(kernel['kernel'], 0), line
            assert kernel['early'] == [], line
            assert kernel['constants'] == [], line


@pytest.mark.slow
@pytest.mark.skipif(not compile_gpu.APART.exists(), reason='make compile-gpu installs the plugin for CUDA')
@pytest.mark.parametrize('core', sorted({*MOVED, *BESIDE}))
def test_arrays_of_more_numbers_than_32_bits_count_are_addressed_with_64(core):
    command = [sys.executable, SCRIPT, '--large', core]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert not any('error' in line for line in lines), next(line['error'] for line in lines if 'error' in line)
    for line in lines:
        assert line['implementation'] == 'mosaic_gpu', line
        assert not any(line['offsets'].values()), line
    assert lines[0]['offsets']


LOG = """
// -----// IR Dump Before GpuModuleToAssemblyPass: mosaic-gpu-module-to-assembly //----- //
    %10 = builtin.unrealized_conversion_cast %9 : !llvm.struct<(ptr, ptr, i64)> to memref<327680x16384xbf16> loc(#1)
  gpu.module @kernel {
      %1 = llvm.mlir.constant(16384 : i32) : i32 loc(#1)
      %2 = llvm.mlir.constant(16384 : i64) : i64 loc(#1)
      %3 = nvvm.read.ptx.sreg.tid.x : i32 loc(#1)
      %4 = nvvm.read.ptx.sreg.ctaid.x range <i32, 0, 327680> : i32 loc(#1)
      %5 = llvm.sext %4 : i32 to i64 loc(#1)
      %6 = llvm.mul %5, %2 overflow<nsw> : i64 loc(#1)
      %7 = llvm.getelementptr %arg0[%6] : (!llvm.ptr, i64) -> !llvm.ptr, bf16 loc(#1)
      %8 = llvm.getelementptr %7[%3] : (!llvm.ptr, i32) -> !llvm.ptr, bf16 loc(#1)
  }
// -----// IR Dump Before CanonicalizerPass //----- //
"""


def test_offsets_of_too_few_bits_are_found():
    assert compile_gpu.narrow_offsets(LOG) == []
    narrow = LOG.replace('%6 = llvm.mul %5, %2 overflow<nsw> : i64', '%6 = llvm.mul %4, %1 : i32')
    assert compile_gpu.narrow_offsets(narrow) == ['%6 = llvm.mul %4, %1 : i32']
    (moved,) = compile_gpu.narrow_offsets(LOG.replace('%7[%3]', '%7[%4]'))
    assert moved.startswith('%8 = llvm.getelementptr')
    flat = LOG.replace('327680x16384', '5368709120')
    assert compile_gpu.narrow_offsets(flat) == ['a dimension of 5368709120x']


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
    # Minus one twice, which is printed as a number below zero.
    negative = FACTORS.replace('1065369472', '-1082081408')
    assert compile_gpu.constant_factors(negative) == ['6: %r5 is -1082081408']
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
