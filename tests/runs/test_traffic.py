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
