"""Tables of measured tiles: what they may say, what they change, and what a bad one is answered with."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import delta_rule, dispatch, linear_scan, softmax, target, tiling, tuning

INTERPRETED = target.interpreted('mosaic_gpu')
KIND = target.H100.kind
ASKED = tuning.Asked('softmax_hopper', (('itemsize', 4), ('n', 8), ('o', 256)))
CALLS = {
    'attention_hopper': {'k': 128, 'v': 128, 'r': 1, 'vectors': 0, 'numbers': 3, 'bias': False},
    'delta_rule_hopper': {'k': 64, 'keys': 2},
    'selective_scan_gpu': {'b': 2, 't': 8192, 'blocks': 32, 'n': 16, 'x_bytes': 2, 'dt_bytes': 2},
    'linear_scan_gpu': {'b': 2, 't': 8192, 'blocks': 16, 'row': 512},
    'softmax_hopper': {'n': 16384, 'o': 8192, 'itemsize': 2},
}


def asked(rule):
    return tuning.Asked(rule, tuple(sorted(CALLS[rule].items())))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of tables, for the length of a test."""
    monkeypatch.setattr(tuning, 'TUNED', tmp_path)
    tuning.table.cache_clear()
    yield tmp_path
    tuning.table.cache_clear()


def write(folder, *entries, device=KIND):
    (folder / tuning.file_name(KIND)).write_text(json.dumps({'device': device, 'tiles': list(entries)}))


@pytest.mark.parametrize('rule', tuning.RULES)
def test_candidates_begin_with_the_rule_s_own_tile_and_survive_json(rule):
    found = tuning.candidates(asked(rule))
    assert found[0] == tuning.RULES[rule].heuristic(**CALLS[rule])
    assert len(set(found)) == len(found) > 1
    for tile in found:
        entry = json.loads(json.dumps(tuning.entry_of(asked(rule), tile)))
        assert tuning.entry('here', entry) == (asked(rule), tile)


def test_steps_of_attention_fit_in_shared_memory():
    sizes = CALLS['attention_hopper']
    for tile in tuning.candidates(asked('attention_hopper')):
        for kernel in ('forward', 'query_gradients', 'key_gradients'):
            bytes_used = tiling.attention_hopper_memory(kernel, getattr(tile, kernel), **sizes)
            assert bytes_used <= tiling.SHARED_MEMORY
            assert getattr(tile, kernel) in tiling.ATTENTION_STEPS


def test_spans_and_tiles_of_time_divide_it():
    for rule in ('linear_scan_gpu', 'selective_scan_gpu'):
        assert all(8192 % (tile.rows * tile.spans) == 0 for tile in tuning.candidates(asked(rule)))


def test_tiles_of_selective_scan_fit_in_shared_memory():
    sizes = {'n': 64, 'x_bytes': 4, 'dt_bytes': 4}
    found = tuning.candidates(
        tuning.Asked('selective_scan_gpu', (('b', 2), ('blocks', 32), *sizes.items(), ('t', 8192)))
    )
    assert {tile.rows for tile in found} == {8}
    assert all(tiling.selective_scan_gpu_memory(tile.rows, **sizes) <= tiling.SHARED_MEMORY for tile in found)


def test_a_table_takes_the_place_of_the_rule_for_its_call_alone(folder):
    sizes = dict(ASKED.call)
    rule, other = tuning.candidates(ASKED)[:2]
    write(folder, tuning.entry_of(ASKED, other))
    assert tuning.tile(target.H100, tiling.softmax_hopper, **sizes) == other != rule
    assert tuning.source(target.H100, tiling.softmax_hopper, **sizes) == tuning.TABLE
    assert tuning.tile(target.H100, tiling.softmax_hopper, 16, 256, 4) == tiling.softmax_hopper(16, 256, 4)
    another = target.Target('gpu', 'NVIDIA H200', '9.0')
    assert tuning.tile(another, tiling.softmax_hopper, **sizes) == rule
    with tuning.trying(ASKED, rule):
        assert tuning.tile(target.H100, tiling.softmax_hopper, **sizes) == rule


def test_the_ledger_says_what_chose_the_tiles_and_the_result_is_that_of_the_rule(folder):
    x = jax.random.normal(jax.random.key(0), (8, 256))
    dy = jax.random.normal(jax.random.key(1), (8, 256))

    def run():
        with target.compiling_for(INTERPRETED), dispatch.ledger() as entries, tuning.recording() as found:
            y, pull = jax.vjp(lambda x: softmax(x, implementation='mosaic_gpu'), x)
            results = y, *pull(dy)
        assert set(found) == {ASKED}
        return results, entries[0].tiles

    by_rule, chosen_by = run()
    assert chosen_by == tuning.HEURISTIC
    write(folder, tuning.entry_of(ASKED, tuning.candidates(ASKED)[1]))
    tuning.table.cache_clear()
    by_table, chosen_by = run()
    assert chosen_by == tuning.TABLE
    for one, other in zip(by_table, by_rule, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_what_a_call_is_named_by_is_what_its_kernel_asks_for(folder):
    """Of sizes that are padded: time to 8 steps, channels to 128."""
    x = jnp.ones((1, 13, 5))
    with target.compiling_for(INTERPRETED), tuning.recording() as found:
        jax.eval_shape(lambda x: linear_scan(x, 0.5 * x, implementation='mosaic_gpu'), x)
    rule = tiling.linear_scan_gpu(**dict(found[0].call))
    other = tiling.SpanTile(rows=16 if rule.rows == 8 else 8, spans=1)
    write(folder, tuning.entry_of(found[0], other))
    tuning.table.cache_clear()
    with target.compiling_for(INTERPRETED), dispatch.ledger() as entries:
        jax.eval_shape(lambda x: linear_scan(x, 0.5 * x, implementation='mosaic_gpu'), x)
    assert entries[0].tiles == tuning.TABLE


@pytest.mark.parametrize('keys', [2, 3])
def test_the_ledger_names_a_table_of_either_direction(keys, folder):
    shape = jax.ShapeDtypeStruct((1, 130, 1, 64), jnp.bfloat16)

    def both():
        def loss(q):
            return delta_rule(q, q, q, q[..., 0], implementation='mosaic_gpu')[0].astype(jnp.float32).sum()

        with target.compiling_for(INTERPRETED), dispatch.ledger() as entries, tuning.recording() as found:
            jax.eval_shape(jax.grad(loss), shape)
        return {dict(asked.call)['keys'] for asked in found}, entries[0].tiles

    assert both() == ({2, 3}, tuning.HEURISTIC)
    asked = tuning.Asked('delta_rule_hopper', (('k', 64), ('keys', keys)))
    write(folder, tuning.entry_of(asked, tuning.candidates(asked)[1]))
    tuning.table.cache_clear()
    assert both() == ({2, 3}, tuning.TABLE)


def test_tables_that_are_shipped_can_be_read():
    for path in tuning.TUNED.glob('*.json'):
        kind = json.loads(path.read_text())['device']
        assert path.name == tuning.file_name(kind) and tuning.read(path, kind)


GOOD = tuning.entry_of(ASKED, tuning.candidates(ASKED)[1])


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('', 'Expecting value'),
        ('[' * 100_000, 'recursion'),
        ('[]', 'a table is a list; expected an object'),
        ({'device': KIND}, 'a table has tiles=None; expected a list'),
        ({'device': 'TPU v5 lite', 'tiles': []}, "it is for 'TPU v5 lite'; expected"),
        ({'device': KIND, 'tiles': [3]}, r'tiles\[0\] is a int; expected an object'),
        ([{**GOOD, 'rule': 'os.system'}], r"tiles\[0\]: no rule is called 'os.system'; they are attention_hopper"),
        ([{**GOOD, 'call': {'n': 8}}], r'tiles\[0\]: call has n; expected itemsize, n, o'),
        ([{**GOOD, 'call': {**GOOD['call'], 'n': 8.0}}], r'tiles\[0\]: n is 8.0; expected int'),
        ([{**GOOD, 'call': {**GOOD['call'], 'n': True}}], r'tiles\[0\]: n is True; expected int'),
        ([{**GOOD, 'call': {**GOOD['call'], 'itemsize': 0}}], 'zero'),
        ([{**GOOD, 'tile': {**GOOD['tile'], 'rows': 3}}], r'tiles\[0\]: no kernel can run the tile'),
        ([{**GOOD, 'tile': None}], r'tiles\[0\]: no kernel can run the tile None'),
        ([GOOD, GOOD], r'tiles\[1\] is there twice'),
        (' ' * (tuning.LARGEST + 1), 'it has 1048577 bytes; expected 1048576 at most'),
    ],
)
def test_a_bad_table_is_one_line(text, message, folder):
    if isinstance(text, list):
        write(folder, *text)
    else:
        path = folder / tuning.file_name(KIND)
        path.write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(tuning.TableError, match=message) as caught:
        tuning.tile(target.H100, tiling.softmax_hopper, 8, 256, 4)
    assert '\n' not in str(caught.value) and tuning.file_name(KIND) in str(caught.value)


@pytest.mark.parametrize('core', ['softmax', 'linear_scan'])
def test_blackwell_is_refused_by_name(core):
    x = jnp.ones((1, 8, 128), jnp.bfloat16)
    calls = {'softmax': lambda: softmax(x), 'linear_scan': lambda: linear_scan(x, x)}
    with target.compiling_for(target.Target('gpu', 'NVIDIA B200', '10.0')), dispatch.ledger() as entries:
        jax.eval_shape(calls[core])
    assert entries[0].implementation == 'xla'
    reason = 'NVIDIA B200 has compute capability 10.0; expected 9.0 (Hopper)'
    assert dict(entries[0].refused)['mosaic_gpu'] == reason
