"""The form of `attention` for TPUs: interpreted on this machine, and lowered for a device that is not there."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.testing.noise import noise
from pallas_kernels import attention, dispatch, target, tiling
from pallas_kernels.attention import maps
from pallas_kernels.attention.mosaic_tpu import sweep
from pallas_kernels.attention.problem import Rule
from pallas_kernels.cases import attention as cases
from pallas_kernels.cases.drawing import Call

# Every interpreted case takes a few seconds, most of which compiles the interpreted kernels.
QUICK = {
    'float32': ('everything',),
    'bfloat16': ('tiles',),
}
QUICK_MAPS = {'float32': ('self-adjust',), 'bfloat16': ('sigmoid',)}
LOWERED_MAPS = ('softpick', 'sigmoid', 'sparsemax', 'normalised self-adjust')


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Calls of a few dozen queries and keys have several tiles."""
    monkeypatch.setattr(tiling, 'attention_tpu', lambda t, s: tiling.AttentionTile(queries=16, keys=32))


def pairs(names, quick):
    """Types with names, those that are not quick marked as slow."""
    return [
        pytest.param(dtype, name, marks=() if name in quick[dtype] else pytest.mark.slow)
        for dtype in quick
        for name in names
    ]


def check(comparison, name, call, what='', **judged):
    sizes = cases.CASES[name].sizes()
    scores = sizes['t'] * sizes['s']
    reduction = max(sizes['t'] * sizes['h'] // sizes['g'], sizes['s'], sizes['k'])
    sums = dict.fromkeys(('slopes', 'log_forget', 'bias', 'sink_scores', 'temperature'), sizes['b'] * scores)
    comparison.check(attention, f'{name} {what}', call, reduction, implementation='mosaic_tpu', **judged, **sums)


@pytest.mark.parametrize(('dtype', 'name'), pairs(cases.KERNEL, QUICK))
def test_interpreted_is_the_reference(dtype, name, comparison):
    check(comparison, name, cases.call(name, dtype))


@pytest.mark.parametrize(('dtype', 'weights'), pairs(cases.MAPS, QUICK_MAPS))
def test_every_map_interpreted_is_the_reference(dtype, weights, comparison):
    check(comparison, 'masked', cases.call('masked', dtype, cases.MAPS[weights]), weights)


@pytest.mark.slow
@pytest.mark.parametrize('shape', ['b h 1 s', '1 h t s', 'b 1 t 1', '1 h 1 1', '1 1 t s'])
def test_the_gradient_of_a_bias_is_summed_where_it_does_not_vary(shape, comparison):
    # Weights that do not add up to one, else the gradient of what is the same for all keys is zero.
    call = cases.call('prime', weights=cases.MAPS['sigmoid'])
    sizes = cases.CASES['prime'].sizes()
    bias = noise(*(sizes.get(letter, 1) for letter in shape.split()))
    check(comparison, 'prime', Call(call.arrays | {'bias': bias}, call.options), f'bias {shape}')


def test_means_are_within_the_range_of_float16_where_sums_are_not():
    q, k, v = (jnp.full((1, n, 1, 16), x, jnp.float16) for n, x in ((1, 1.0), (60, 100.0), (60, 40.0)))
    with target.compiling_for(target.interpreted('mosaic_tpu')):
        output = attention(q, k, v, weights=maps.Relu(), causal=False, implementation='mosaic_tpu')
    assert output.dtype == jnp.float16
    np.testing.assert_array_equal(output, 16000.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    'dtypes', [('float16',) * 3, ('bfloat16', 'float32', 'bfloat16'), ('float32', 'bfloat16', 'float16')]
)
def test_other_types(dtypes, comparison):
    call = cases.call('narrow values')
    arrays = {name: array.astype(dtype) for (name, array), dtype in zip(call.arrays.items(), dtypes, strict=True)}
    # The kernel multiplies in the coarsest type of its operands.
    coarsest = max(map(jnp.dtype, dtypes), key=lambda dtype: jnp.finfo(dtype).eps)
    check(comparison, 'narrow values', Call(arrays, call.options), dtype=coarsest)


def test_queries_that_no_step_goes_over_are_in_no_sum(comparison):
    """Keys are seen from five tiles of six, so that steps of five pad queries to ten, four of which nobody writes."""
    arrays = {name: noise(1, 96, 1, 16) for name in ('q', 'k', 'v')} | {'slopes': jnp.array([0.25])}
    call = Call(arrays, {'window': 40})
    sums = {'slopes': 96 * 96}
    comparison.check(attention, 'slopes in a window', call, 96, implementation='mosaic_tpu', **sums)


def test_two_runs_give_the_same_bits(comparison):
    comparison.check_same_bits(attention, cases.call('bias of keys', jnp.bfloat16), 'mosaic_tpu')


def test_hidden_keys_leave_no_trace():
    """Huge keys and values of another document do not reach this one, not even in the last bit."""
    call = cases.call('packed')
    row = {name: array[:1] for name, array in call.arrays.items()}
    segments = call.options['segments'][:1]
    other = (segments[0] == 3)[None, :, None, None]
    moved = {'q': row['q'], **{name: jnp.where(other, 1e9, row[name]) for name in ('k', 'v')}}
    with target.compiling_for(target.interpreted('mosaic_tpu')):
        run = jax.jit(lambda arrays: attention(**arrays, segments=segments, implementation='mosaic_tpu'))
        before, after = run(row), run(moved)
    np.testing.assert_array_equal(before[0, segments[0] != 3], after[0, segments[0] != 3])


POSITIONS = [
    (t, s, causal, window, sinks)
    for t, s in ((70, 70), (33, 100), (100, 33), (1, 65), (65, 1), (32, 64))
    for causal in (True, False)
    for window, sinks in ((None, 0), (1, 0), (17, 0), (17, 40), (500, 3))
]


def test_every_visible_pair_of_tiles_is_listed_and_those_called_whole_are():
    tile = tiling.attention_tpu(1, 1)
    for t, s, causal, window, sinks in POSITIONS:
        rule = Rule(maps.Softmax(), 1.0, causal, window, sinks)
        call = sweep.Call(target.TPU_V5E, rule, {'b': 1, 'g': 1, 'r': 1, 't': t, 's': s}, tile, 256)
        distance = np.arange(t)[:, None] + s - t - np.arange(s)
        visible = (distance >= 0) if causal else np.ones((t, s), bool)
        if window is not None:
            visible &= (abs(distance) < window) | (np.arange(s) < sinks)
        visible = np.pad(visible, ((0, -t % tile.queries), (0, -s % tile.keys)))
        blocks = visible.reshape(visible.shape[0] // tile.queries, tile.queries, -1, tile.keys)
        seen = {(int(i), int(j)) for i, j in np.argwhere(blocks.any((1, 3)))}
        for visits, first, missing in (
            (call.by_queries(), 0, np.flatnonzero(~blocks.any((1, 2, 3)))),
            (call.by_queries(together=False), 0, np.flatnonzero(~blocks.any((1, 2, 3)))),
            (call.by_keys(), 1, np.flatnonzero(~blocks.any((0, 1, 3)))),
        ):
            listed, n = visits.pairs, visits.together
            assert 1 <= n <= 8
            groups = {(i, j // n) if first == 0 else (i // n, j) for i, j in seen}
            assert len(listed) == len(set(listed)), (t, s, rule)
            assert groups <= set(listed), (t, s, rule)
            # Sums of which nothing is visible are begun and ended all the same, and so written as zeros.
            assert sorted(pair[first] for pair in set(listed) - groups) == list(missing), (t, s, rule)
            assert [pair[first] for pair in listed] == sorted(pair[first] for pair in listed)
        visits = sweep.Sweep('attention_forward', (1, 1), call, 'bgrp', 't', call.by_queries())
        for i, j in itertools.product(range(blocks.shape[0] + 2), range(blocks.shape[2] + 2)):
            some, every = map(bool, visits.sight(jnp.int32(i), jnp.int32(j), {}))
            assert some == ((i, j) in seen), (t, s, rule, i, j)
            if some:
                assert every == blocks[i, :, j].all(), (t, s, rule)


def shapes(k, v=None, t=2048, s=None, g=16, dtype=jnp.bfloat16, **others):
    """A call of the size of models."""
    sizes = {'q': (t, 16, k), 'k': (s or t, g, k), 'v': (s or t, g, v or k)}
    arrays = {name: jax.ShapeDtypeStruct((2, *size), dtype) for name, size in sizes.items()}
    return arrays | {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in others.items()}


SEGMENTS = {'segments': jax.ShapeDtypeStruct((2, 2048), jnp.int32)}
CHOICES = {'chosen': jax.ShapeDtypeStruct((2, 2048, 2, 32), bool), 'block': 64}
FEATURES = {
    'float32': (shapes(64, dtype=jnp.float32), {}),
    'float16': (shapes(64, dtype=jnp.float16), {}),
    'windows': (shapes(128), {'window': 1000, 'sinks': 4}),
    'documents': (shapes(128), SEGMENTS),
    'grouped heads': (shapes(16, g=2, log_forget=(2, 2048, 16)), {}),
    'bias of keys': (shapes(128, bias=(2, 1, 1, 2048)), {}),
    'chosen blocks': (shapes(64, g=2), {**SEGMENTS, **CHOICES}),
    'other sizes': (shapes(100, 24, t=7, s=1001), {}),
    'everything': (
        shapes(256, g=2, log_forget=(2, 2048, 16), slopes=(16,), bias=(1, 16, 2048, 2048)),
        {'window': 1024, 'sinks': 4, 'weights': maps.Softmax(soft_cap=30.0), **SEGMENTS},
    ),
}


def lower(arrays, options):
    """Lowers forward and backward for a TPU, and returns how many kernels there are."""
    constant = {name: option for name, option in options.items() if isinstance(option, jax.ShapeDtypeStruct)}
    fixed = {name: option for name, option in options.items() if name not in constant}

    def run(arrays, constant):
        output, pull = jax.vjp(lambda arrays: attention(**arrays, **constant, **fixed), arrays)
        return output, pull(output)

    with target.compiling_for(target.TPU_V5E), dispatch.ledger() as entries:
        lowered = jax.jit(run).trace(arrays, constant).lower(lowering_platforms=('tpu',))
    assert entries[0].implementation == 'mosaic_tpu'
    return lowered.as_text().count('custom_call @tpu_custom_call')


@pytest.mark.parametrize('name', FEATURES)
def test_lowered_for_a_tpu(name, monkeypatch):
    monkeypatch.undo()
    arrays, options = FEATURES[name]
    # One forward and two backward, and one for the bias.
    assert lower(arrays, options) == 3 + ('bias' in arrays)


def test_lowered_under_remat_and_vmap(monkeypatch):
    monkeypatch.undo()
    arrays = [jax.ShapeDtypeStruct((3, *shape.shape), shape.dtype) for shape in shapes(64).values()]

    def loss(*arrays):
        return jnp.sum(jax.vmap(jax.checkpoint(attention))(*arrays))

    with target.compiling_for(target.TPU_V5E):
        lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).trace(*arrays).lower(lowering_platforms=('tpu',))
    # One forward and two backward, and one that makes again what the backward pass needs.
    assert lowered.as_text().count('custom_call @tpu_custom_call') == 4


@pytest.mark.parametrize(
    'weights',
    [pytest.param(name, marks=() if name in LOWERED_MAPS else pytest.mark.slow) for name in cases.MAPS],
)
def test_every_map_is_lowered_for_a_tpu(weights, monkeypatch):
    monkeypatch.undo()
    assert lower(shapes(128), {'weights': cases.MAPS[weights]}) == 3


def test_tiles_are_of_whole_registers_and_waste_little(monkeypatch):
    monkeypatch.undo()
    for t, s in itertools.product((1, 15, 128, 129, 1000, 1100, 8191, 8192, 2**17), repeat=2):
        tile = tiling.attention_tpu(t, s)
        for n, size in ((t, tile.queries), (s, tile.keys)):
            assert size % (128 if n > 128 else 16) == 0
            assert size <= 512
            assert -(-n // size) * size - n < max(16, 128 * -(-n // 512))
    assert tiling.attention_tpu(8192, 8192) == tiling.AttentionTile(queries=512, keys=512)


@pytest.mark.parametrize(
    ('t', 's', 'options', 'message'),
    [
        (0, 5, {}, 'there is nothing to compute'),
        (5, 0, {}, 'there is nothing to compute'),
        (
            2**21,
            2**21,
            {},
            'its queries see keys in 263168 grid steps; expected at most 65536, from shorter rows or a',
        ),
        (
            512,
            512,
            {'chosen': jax.ShapeDtypeStruct((1, 512, 2, 32), bool), 'block': 16},
            'blocks have 16 keys; expected at least 18, of which a tile of 512 keys meets 30 or fewer',
        ),
    ],
)
def test_refusals(t, s, options, message, monkeypatch):
    monkeypatch.undo()
    q, k = jax.ShapeDtypeStruct((1, t, 2, 16), jnp.bfloat16), jax.ShapeDtypeStruct((1, s, 2, 16), jnp.bfloat16)
    with target.compiling_for(target.TPU_V5E), pytest.raises(NotImplementedError, match=message):
        arrays = {name: option for name, option in options.items() if isinstance(option, jax.ShapeDtypeStruct)}
        fixed = {name: option for name, option in options.items() if name not in arrays}
        run = lambda q, k, arrays: attention(q, k, k, **arrays, **fixed, implementation='mosaic_tpu')  # noqa: E731
        jax.eval_shape(run, q, k, arrays)


@pytest.mark.parametrize(('k', 'dtype', 'served'), [(1792, 'float32', True), (2048, 'float32', False)])
def test_heads_whose_tiles_vmem_does_not_hold_are_left_to_the_portable_form(k, dtype, served, monkeypatch):
    """Both were compiled for a v5e, where the second, before it was refused, took 70 of 64 MiB."""
    monkeypatch.undo()
    q = jax.ShapeDtypeStruct((1, 512, 1, k), dtype)
    with target.compiling_for(target.TPU_V5E), dispatch.ledger() as entries:
        jax.eval_shape(attention, q, q, q)
    refused = dict(entries[0].refused).get('mosaic_tpu', '')
    assert (entries[0].implementation == 'mosaic_tpu') == served == (not refused)
    if not served:
        assert refused == 'its tiles take 70 MiB of VMEM at k=2048 and v=2048; expected at most 64, from narrower heads'


def test_double_precision_is_refused():
    with jax.enable_x64(True), target.compiling_for(target.TPU_V5E):
        q = jnp.zeros((1, 3, 2, 16), jnp.float64)
        with pytest.raises(NotImplementedError, match='computed in float64; expected operands of at most 32 bits'):
            attention(q, q, q, implementation='mosaic_tpu')


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_statistics_are_of_the_scores_that_the_kernel_computes(dtype, monkeypatch):
    """On a TPU XLA rounds factors of float32 to bfloat16 by itself: statistics so found are of other weights."""
    monkeypatch.undo()  # tiles that a TPU has
    q = jax.ShapeDtypeStruct((1, 256, 2, 128), dtype)
    usual = jax.default_matmul_precision('default')  # of who runs it, not of tests
    with usual, target.compiling_for(target.TPU_V5E), dispatch.ledger() as entries:

        def call(q):
            return attention(q, q, q, weights=maps.Sparsemax())

        text = jax.jit(call).trace(q).lower(lowering_platforms=('tpu',)).as_text()
    assert [entry.implementation for entry in entries] == ['mosaic_tpu']
    products = re.findall(r'dot_general.*precision = \[(\w+), \w+\] : \(tensor<[^>]*x(\w+)>', text)
    products += [('DEFAULT', kind) for kind in re.findall(r'dot_general(?!.*precision).*: \(tensor<[^>]*x(\w+)>', text)]
    assert products and all(precision == 'HIGHEST' for precision, kind in products if kind == 'f32')
