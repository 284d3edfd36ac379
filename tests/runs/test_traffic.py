"""What a compiled program reads and writes is read off its text."""

import functools

import jax
import jax.numpy as jnp
import pytest

from attnlab.runs.traffic import traffic

PROGRAM = """HloModule step

%layer (stacked: f32[8,100], index: s32[], x: f32[100]) -> f32[8,100] {
  %stacked = f32[8,100]{1,0} parameter(0)
  %x = f32[100]{0} parameter(2)
  %index = s32[] parameter(1)
  %row = f32[1,100]{1,0} dynamic-slice(%stacked, %index, %zero), dynamic_slice_sizes={1,100}
  %flat = f32[100]{0} bitcast(%row)
  %sum = f32[100]{0} add(%flat, %x)
  %new = f32[1,100]{1,0} bitcast(%sum)
  ROOT %put = f32[8,100]{1,0} dynamic-update-slice(%stacked, %new, %index, %zero)
}

%cond (t: (s32[], f32[8,100], f32[100])) -> pred[] {
  %limit = s32[]{:T(128)} constant(8)
  ROOT %less = pred[]{:S(6)} compare(%i, %limit), direction=LT
}

%body (t: (s32[], f32[8,100], f32[100])) -> (s32[], f32[8,100], f32[100]) {
  %t = (s32[], f32[8,100]{1,0}, f32[100]{0}) parameter(0)
  %i = s32[]{:S(6)} get-tuple-element(%t), index=0
  %all = f32[8,100]{1,0} get-tuple-element(%t), index=1
  %near = f32[100]{0:T(128)S(1)} get-tuple-element(%t), index=2
  %next = f32[8,100]{1,0} fusion(%all, %i, %near), kind=kLoop, calls=%layer
  ROOT %out = (s32[], f32[8,100]{1,0}, f32[100]{0}) tuple(%i, %next, %near)
}

ENTRY %main (p: f32[8,100], q: f32[200]) -> f32[8,100] {
  %p = f32[8,100]{1,0} parameter(0)
  %q = f32[200]{0} parameter(1)
  %part = ((f32[200]{0}), f32[100]{0:T(128)S(1)}, s32[]{:S(2)}) slice-start(%q), slice={[0:100]}
  %x = f32[100]{0:T(128)S(1)} slice-done(%part)
  %kernel = f32[8,100]{1,0} custom-call(%p, %x), custom_call_target="tpu_custom_call"
  %near = f32[100]{0:T(128)S(1)} custom-call(%x), custom_call_target="ConcatBitcast"
  %start = (s32[], f32[8,100]{1,0}, f32[100]{0}) tuple(%zero, %kernel, %near)
  %loop = (s32[], f32[8,100]{1,0}, f32[100]{0}) while(%start), condition=%cond, body=%body
  ROOT %end = f32[8,100]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_a_loop_moves_a_slice_and_an_update_each_time_and_nothing_on_the_chip():
    slice_started, kernel, row, limit = 400, 2 * 3200, 400, 4
    assert traffic(PROGRAM) == slice_started + kernel + 8 * (2 * row + limit)


@pytest.mark.parametrize('repeats', [1, 5])
def test_a_loop_counts_once_per_iteration(repeats):
    def program(x, repeats):
        return jax.lax.fori_loop(0, repeats, lambda i, x: jnp.tanh(x @ x), x)

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    compile_ = functools.partial(jax.jit, static_argnums=1)
    once, more = (traffic(compile_(program).lower(x, n).compile().as_text()) for n in (2, 2 + repeats))
    # A product and a map, each of which reads and writes all of it.
    least = repeats * 2 * 2 * 64 * 64 * 4
    assert least <= more - once <= 2 * least


PRODUCT = """HloModule step

%renamed (x: bf16[8,64]) -> bf16[8,64] {
  %x = bf16[8,64]{1,0} parameter(0)
  ROOT %bitcast = bf16[8,64]{1,0} bitcast(%x)
}

%rounded (x: f32[64,32]) -> bf16[64,32] {
  %x = f32[64,32]{1,0} parameter(0)
  ROOT %convert = bf16[64,32]{1,0} convert(%x)
}

%product (x: bf16[8,64], w: f32[64,32]) -> f32[8,32] {
  %x = bf16[8,64]{1,0} parameter(0)
  %w = f32[64,32]{1,0} parameter(1)
  %near = bf16[8,64]{1,0} fusion(%x), kind=kLoop, calls=%renamed
  %low = bf16[64,32]{1,0} fusion(%w), kind=kLoop, calls=%rounded
  ROOT %convolution = f32[8,32]{1,0} convolution(%near, %low), dim_labels=bf_io->bf
}

ENTRY %main (x: bf16[8,64], w: f32[64,32]) -> f32[8,32] {
  %x = bf16[8,64]{1,0} parameter(0)
  %w = f32[64,32]{1,0} parameter(1)
  ROOT %y = f32[8,32]{1,0} fusion(%x, %w), kind=kOutput, calls=%product
}
"""


def test_a_product_reads_what_it_is_given_under_another_name():
    assert traffic(PRODUCT) == 8 * 64 * 2 + 64 * 32 * 4 + 8 * 32 * 4


GATHERED = """HloModule step

%begin (p: bf16[16]) -> (bf16[16], bf16[64]) {
  %p = bf16[16]{0} parameter(0)
  %gather = bf16[64]{0} all-gather(%p), channel_id=3, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %begun = (bf16[16]{0}, bf16[64]{0}) custom-call(%gather), custom_call_target="AsyncCollectiveStart"
}

%meanwhile (p: bf16[16], w: bf16[64], x: f32[100]) -> (f32[100], bf16[16], bf16[64], bf16[64]) {
  %x = f32[100]{0} parameter(2)
  %y = f32[100]{0} tanh(%x)
  %p = bf16[16]{0} parameter(0)
  %w = bf16[64]{0} parameter(1)
  %gather = bf16[64]{0} all-gather(%p), channel_id=3, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %all = (f32[100]{0}, bf16[16]{0}, bf16[64]{0}, bf16[64]{0}) tuple(%y, %p, %w, %gather)
}

%end (p: bf16[16], w: bf16[64]) -> bf16[64] {
  %p = bf16[16]{0} parameter(0)
  %w = bf16[64]{0} parameter(1)
  %gather = bf16[64]{0} all-gather(%p), channel_id=3, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %ended = bf16[64]{0} custom-call(%p, %w, %gather), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (p: bf16[16], x: f32[100]) -> bf16[64] {
  %p = bf16[16]{0} parameter(0)
  %x = f32[100]{0} parameter(1)
  %start = (bf16[16]{0}, bf16[64]{0}) fusion(%p), output_to_operand_aliasing={{0}: (0, {})}, calls=%begin
  %p.1 = bf16[16]{0} get-tuple-element(%start), index=0
  %w.1 = bf16[64]{0} get-tuple-element(%start), index=1
  %going = (f32[100]{0}, bf16[16]{0}, bf16[64]{0}, bf16[64]{0}) fusion(%p.1, %w.1, %x), PLACES, calls=%meanwhile
  %p.2 = bf16[16]{0} get-tuple-element(%going), index=1
  %w.2 = bf16[64]{0} get-tuple-element(%going), index=2
  ROOT %done = bf16[64]{0} fusion(%p.2, %w.2), output_to_operand_aliasing={{}: (1, {})}, calls=%end
}
""".replace('PLACES', 'output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {}), {3}: (1, {})}')


def test_a_gather_that_goes_on_beside_other_work_counts_once():
    part, whole, beside = 16 * 2, 64 * 2, 2 * 400
    assert traffic(GATHERED) == part + whole + beside


LIBRARY = """HloModule step

%taken (all: f32[8,100], i: s32[]) -> f32[1,100] {
  %all = f32[8,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %row = f32[1,100]{1,0} dynamic-slice(%all, %i, %zero), dynamic_slice_sizes={1,100}
}

%put (all: f32[8,100], i: s32[], row: f32[1,100]) -> f32[8,100] {
  %all = f32[8,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,100]{1,0} parameter(2)
  ROOT %new = f32[8,100]{1,0} dynamic-update-slice(%all, %row, %i, %zero)
}

%sliced (all: bf16[2,16,32], i: s32[], y: bf16[16,64]) -> (bf16[32,64], s8[4194304]) {
  %all = bf16[2,16,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[1,16,32]{2,1,0} dynamic-slice(%all, %i, %zero, %zero), dynamic_slice_sizes={1,16,32}
  %flat = bf16[16,32]{1,0} bitcast(%x)
  %y = bf16[16,64]{1,0} parameter(2)
  ROOT %product = (bf16[32,64]{1,0}, s8[4194304]{0}) custom-call(%flat, %y), custom_call_target="__cublas$lt$matmul"
}

ENTRY %main (all: f32[8,100], i: s32[], x: bf16[2,16,32], y: bf16[16,64], z: bf16[64,8]) -> bf16[16,8] {
  %all = f32[8,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[2,16,32]{2,1,0} parameter(2)
  %y = bf16[16,64]{1,0} parameter(3)
  %z = bf16[64,8]{1,0} parameter(4)
  %begun = ((f32[8,100]{1,0}, s32[]), f32[1,100]{1,0}, u32[]) fusion-start(%all, %i), kind=kLoop, calls=%taken
  %row = f32[1,100]{1,0} fusion-done(%begun)
  %next = ((f32[8,100]{1,0}, s32[], f32[1,100]{1,0}), f32[8,100]{1,0}, u32[]) fusion-start(%all, %i, %row), calls=%put
  %new = f32[8,100]{1,0} fusion-done(%next)
  %of_part = (bf16[32,64]{1,0}, s8[4194304]{0}) fusion(%x, %i, %y), kind=kCustom, calls=%sliced
  ROOT %of_whole = (bf16[16,8]{1,0}, s8[4194304]{0}) custom-call(%y, %z), custom_call_target="__cublas$gemm"
}
"""
"""As a program for GPUs is written: fusions that run meanwhile, products by a library with memory to work in."""


def test_on_gpus_fusions_that_run_meanwhile_count_once_and_memory_of_libraries_not():
    row, index = 100 * 4, 4
    of_part = (16 * 32 + 16 * 64 + 32 * 64) * 2 + index
    of_whole = (16 * 64 + 64 * 8 + 16 * 8) * 2
    assert traffic(LIBRARY) == 2 * (2 * row + index) + of_part + of_whole
