"""What devices exchange is read off the text of a compiled program."""

import pytest

from attnlab.runs.collectives import Exchange, exchanges

PROGRAM = """HloModule step

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (input: f32[256,128]) -> f32[64,128] {
  %all-reduce.9 = f32[256,128]{1,0:T(8,128)} all-reduce(%input), channel_id=7, replica_groups={{0,1,2,3}}, to_apply=%sum
  ROOT %slice = f32[64,128]{1,0} dynamic-slice(%all-reduce.9, %c), dynamic_slice_sizes={64,128}
}

%all-reduce-scatter.2 (input: f32[256,128]) -> f32[64,128] {
  %all-reduce.8 = f32[256,128]{1,0:T(8,128)} all-reduce(%input), channel_id=7, replica_groups={{0,1,2,3}}, to_apply=%sum
  ROOT %slice = f32[64,128]{1,0} dynamic-slice(%all-reduce.8, %c), dynamic_slice_sizes={64,128}
}

%start (p: bf16[64,32]) -> bf16[256,32] {
  ROOT %all-gather.1 = bf16[256,32]{1,0} all-gather(%p), channel_id=3, replica_groups=[1,4]<=[4], dimensions={0}
}

%continued (p: bf16[64,32]) -> bf16[256,32] {
  ROOT %all-gather.2 = bf16[256,32]{1,0:S(1)} all-gather(%p), channel_id=3, replica_groups=[1,4]<=[4], dimensions={0}
}

%cond (t: (s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(6)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%body (t: (s32[])) -> (s32[]) {
  %one = bf16[256,32]{1,0} fusion(%x), kind=kCustom, calls=%start
  %two = bf16[256,32]{1,0} fusion(%x), kind=kCustom, calls=%continued
  %part = f32[64,128]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
  %other = f32[64,128]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.2
}

ENTRY %main (x: f32[4]) -> f32[] {
  %loop = (s32[]) while(%start), condition=%cond, body=%body, metadata={op_name="while"}
  %both = (f32[100]{0}, f32[28]{0}) all-reduce(%u, %v), channel_id=9, replica_groups=mesh['a'=2,'b'=4] {'b'}, to=%sum
  %near = f32[10]{0} collective-permute(%u), channel_id=11, source_target_pairs={{0,1},{1,0}}
}
"""


def test_exchanges_count_every_turn_of_a_loop_and_every_channel_of_parts_once():
    assert exchanges(PROGRAM) == [
        Exchange('all-gather', 6, 6 * 256 * 32 * 2 * 3 // 4),
        Exchange('all-reduce', 1, 2 * 128 * 4 * 3 // 4),
        Exchange('reduce-scatter', 12, 12 * 256 * 128 * 4 * 3 // 4),
        Exchange('collective-permute', 1, 40),
    ]


RING = """HloModule step

%cond (t: (bf16[8], u32[])) -> pred[] {
  %limit = u32[]{:T(128)} constant(8)
  %t = (bf16[8]{0}, u32[]{:T(128)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%t), index=1
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%body (t: (bf16[8], u32[])) -> (bf16[8], u32[]) {
  %two = u32[]{:T(128)} constant(2)
  %t = (bf16[8]{0}, u32[]{:T(128)}) parameter(0)
  %x = bf16[8]{0} get-tuple-element(%t), index=0
  %i = u32[]{:T(128)} get-tuple-element(%t), index=1
  %sent = (bf16[8]{0}, bf16[8]{0}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=3, source_target_pairs={{0,1}}
  %came = bf16[8]{0} collective-permute-done(%sent)
  %other = bf16[8]{0} collective-permute(%came), channel_id=3, source_target_pairs={{1,0}}
  %next = u32[]{:T(128)} add(%i, %two)
  ROOT %out = (bf16[8]{0}, u32[]{:T(128)}) tuple(%came, %next)
}

ENTRY %main (x: bf16[8]) -> bf16[8] {
  %zero = u32[]{:T(128)} constant(START)
  %first = u32[]{:T(128)} copy(%zero)
  %start = (bf16[8]{0}, u32[]{:T(128)}) tuple(%x, %first)
  ROOT %loop = (bf16[8]{0}, u32[]{:T(128)}) while(%start), condition=%cond, body=%body
}
"""


@pytest.mark.parametrize(('start', 'turns'), [(0, 4), (3, 3)])
def test_turns_of_a_ring_follow_from_where_it_starts_and_how_it_counts(start, turns):
    text = RING.replace('START', str(start))
    assert exchanges(text) == [Exchange('collective-permute', 2 * turns, 2 * turns * 16)]


BRANCHES = """HloModule step

%less (i: s32[]) -> pred[] {
  %i = s32[] parameter(0)
  %limit = s32[] constant(6)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%cond (t: (s32[])) -> pred[] {
  %t = (s32[]) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  ROOT %fused = pred[] fusion(%j), kind=kLoop, calls=%less
}

%body (t: (s32[])) -> (s32[]) {
  %begun = ((bf16[16]{0}, bf16[4]{0}), (bf16[64]{0}, bf16[16]{0})) all-gather-start(%u, %v), channel_id=2, \
replica_groups=mesh['axis_0'=4] {'axis_0'}, dimensions={0}
  %ended = (bf16[64]{0}, bf16[16]{0}) all-gather-done(%begun)
  %scattered = ((f32[64]{0}), f32[16]{0}) reduce-scatter-start(%w), channel_id=3, replica_groups=[1,4]<=[4]
  %part = f32[16]{0} reduce-scatter-done(%scattered)
}

%finite (x: f32[8]) -> f32[8] {
  %summed = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%x), channel_id=4, replica_groups=[1,4]<=[4]
  ROOT %sum = f32[8]{0} all-reduce-done(%summed)
}

%other (x: f32[8]) -> f32[8] {
  ROOT %x = f32[8]{0} parameter(0)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %loop = (s32[]) while(%start), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  ROOT %either = f32[8]{0} conditional(%p, %x, %x), true_computation=%finite, false_computation=%other
}
"""
"""As a program for GPUs is written: asynchronous collectives, loops that compare in a fusion, two branches by name."""


def test_what_is_exchanged_in_loops_and_branches_on_gpus_is_counted():
    assert exchanges(BRANCHES) == [
        Exchange('all-gather', 6, 6 * (64 + 16) * 2 * 3 // 4),
        Exchange('all-reduce', 1, 2 * 8 * 4 * 3 // 4),
        Exchange('reduce-scatter', 6, 6 * 16 * 4 * 3),
    ]


COMBINED = """HloModule step

ENTRY %main (x: f32[4]) -> f32[] {
  %all = (f32[400]{0}, bf16[40]{0}) all-gather(%u, %v), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  %begun = ((f32[100]{0}, bf16[10]{0}), (f32[400]{0}, bf16[40]{0})) all-gather-start(%u, %v), channel_id=2, \
replica_groups=[1,4]<=[4], dimensions={0}
  %alone = (f32[100]{0}, f32[400]{0}) all-gather-start(%u), channel_id=3, replica_groups=[1,4]<=[4], dimensions={0}
  %parts = (f32[25]{0}, f32[10]{0}) reduce-scatter(%u, %v), channel_id=4, replica_groups=[1,4]<=[4], to_apply=%sum
  %summed = (f32[100]{0}, f32[10]{0}) all-reduce-start(%u, %v), channel_id=5, replica_groups=[1,4]<=[4], to_apply=%sum
}
"""


def test_of_several_that_are_combined_all_arrays_are_sent():
    assert exchanges(COMBINED) == [
        Exchange('all-gather', 3, (2 * (1600 + 80) + 1600) * 3 // 4),
        Exchange('all-reduce', 1, 2 * 440 * 3 // 4),
        Exchange('reduce-scatter', 1, 140 * 3),
    ]


def test_a_program_of_one_device_exchanges_nothing():
    assert exchanges('HloModule step\n\nENTRY %main (x: f32[4]) -> f32[4] {\n  ROOT %y = f32[4] add(%x, %x)\n}\n') == []
