"""The form of `attention` for Hopper: interpreted on this machine, and lowered for a device that is not there."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import lib

from pallas_kernels import attention, dispatch, target, tiling
from pallas_kernels.attention import maps
from pallas_kernels.attention.mosaic_gpu import output_sm90, passes, sm90
from pallas_kernels.attention.mosaic_gpu.sm90 import PAD, ROWS, Place, reach
from pallas_kernels.attention.problem import Rule
from pallas_kernels.cases import attention as cases
from pallas_kernels.cases.drawing import Call

# Every interpreted case takes about five seconds, most of which compiles the interpreted kernels.
QUICK = {
    'bfloat16': ('everything',),
    'float16': ('prime',),
}
QUICK_MAPS = ('softpick', 'sparsemax')


def marked(parameters, quick):
    """The parameters, those that are not quick marked as slow."""
    return [pytest.param(*one, marks=() if one in quick else pytest.mark.slow) for one in parameters]


def check(comparison, name, call, what=''):
    sizes = cases.CASES[name].sizes()
    scores = sizes['t'] * sizes['s']
    reduction = max(sizes['t'] * sizes['h'] // sizes['g'], sizes['s'], sizes['k'])
    sums = dict.fromkeys(('slopes', 'log_forget', 'bias', 'sink_scores', 'temperature'), sizes['b'] * scores)
    comparison.check(attention, f'{name} {what}', call, reduction, implementation='mosaic_gpu', **sums)


@pytest.mark.parametrize(
    ('dtype', 'name'),
    marked(
        list(itertools.product(QUICK, cases.KERNEL)),
        [(dtype, name) for dtype, names in QUICK.items() for name in names],
    ),
)
def test_interpreted_is_the_reference(dtype, name, comparison):
    check(comparison, name, cases.call(name, dtype))


@pytest.mark.parametrize(
    ('dtype', 'weights'),
    marked(
        [
            (dtype, name)
            for dtype, (name, weights) in itertools.product(QUICK, cases.MAPS.items())
            if dtype != 'float16' or not isinstance(weights, passes.UNBOUNDED)
        ],
        [('bfloat16', weights) for weights in QUICK_MAPS],
    ),
)
def test_every_map_interpreted_is_the_reference(dtype, weights, comparison):
    check(comparison, 'masked', cases.call('masked', dtype, cases.MAPS[weights]), weights)


@pytest.mark.parametrize('name', ['tiles', 'more queries'])
def test_warpgroups_that_take_turns_give_the_reference(name, comparison, monkeypatch):
    monkeypatch.setattr(output_sm90, 'TURNS_FROM', 0)  # else only rows of thousands of keys
    check(comparison, name, cases.call(name, jnp.bfloat16), 'in turns')


@pytest.mark.slow
def test_two_runs_give_the_same_bits(comparison):
    comparison.check_same_bits(attention, cases.call('bias of keys', jnp.bfloat16), 'mosaic_gpu')


@pytest.mark.slow
@pytest.mark.usefixtures('watched_for_races')
@pytest.mark.parametrize('turns_from', [0, output_sm90.TURNS_FROM])
@pytest.mark.parametrize('name', ['tiles', 'everything', 'chosen blocks of documents'])
def test_no_warpgroup_races_another(name, turns_from, comparison, monkeypatch):
    monkeypatch.setattr(output_sm90, 'TURNS_FROM', turns_from)
    check(comparison, name, cases.call(name, jnp.bfloat16), 'watched')


def shapes(k, v=None, g=16, b=4, t=8192, **others):
    """A call of the size of models."""
    arrays = {name: (b, t, heads, size) for name, heads, size in (('q', 16, k), ('k', g, k), ('v', g, v or k))}
    return {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in (arrays | others).items()}


SEGMENTS = {'segments': jax.ShapeDtypeStruct((4, 8192), jnp.int32)}


def choices(g, block=64):
    return {'chosen': jax.ShapeDtypeStruct((4, 8192, g, 8192 // block), bool), 'block': block}


FEATURES = {
    'k=64': (shapes(64), {}),
    'k=128': (shapes(128), {}),
    'every key': (shapes(128), {'causal': False}),
    'window and sinks': (shapes(128), {'window': 1024, 'sinks': 4}),
    'two-sided window': (shapes(64), {'window': 1000, 'causal': False}),
    'documents': (shapes(128), SEGMENTS),
    'forgetting': (shapes(64, log_forget=(4, 8192, 16)), {}),
    'slopes': (shapes(128, slopes=(16,)), {}),
    'soft cap': (shapes(64), {'weights': maps.Softmax(soft_cap=30.0)}),
    'grouped heads': (shapes(128, g=2, log_forget=(4, 8192, 16)), {}),
    'bias of keys': (shapes(128, bias=(4, 1, 1, 8192)), {}),
    'chosen blocks': (shapes(64, g=2), {**SEGMENTS, **choices(2)}),
    'other channels': (shapes(192, 80, t=1000), {}),
    'most channels': (shapes(256), {}),
    'documents, 64 channels': (shapes(64), SEGMENTS),
    'everything': (
        shapes(256, g=2, log_forget=(4, 8192, 16), slopes=(16,), bias=(1, 16, 8192, 8192)),
        {'window': 1024, 'sinks': 4, 'weights': maps.Softmax(soft_cap=30.0), **SEGMENTS},
    ),
}


@pytest.mark.parametrize('name', marked([(name,) for name in FEATURES], [(name,) for name in list(FEATURES)[:8:2]]))
def test_lowered_for_hopper(name, lowered_for_gpu):
    lowered = lowered_for_gpu(attention, Call(*FEATURES[name]))
    assert [entry.implementation for entry in lowered.entries] == ['mosaic_gpu']
    # One forward and two backward, or three where the gradients of keys and values take turns.
    assert lowered.kernels() == (4 if name in ('most channels', 'everything', 'other channels') else 3)


@pytest.mark.parametrize(
    'weights', marked([(name,) for name in cases.MAPS], [(name,) for name in (*QUICK_MAPS, 'normalised self-adjust')])
)
def test_every_map_is_lowered_for_hopper(weights, lowered_for_gpu):
    call = Call(shapes(128, t=1024), {'weights': cases.MAPS[weights]})
    assert lowered_for_gpu(attention, call, implementation='mosaic_gpu').kernels() >= 3


POSITIONS = [
    (t, s, causal, window, sinks, step)
    for t, s in ((300, 300), (130, 400), (400, 130), (1, 260), (260, 1), (128, 256))
    for causal in (True, False)
    for window, sinks in ((None, 0), (1, 0), (70, 0), (70, 140), (500, 3))
    for step in (32, 128)
]


@pytest.mark.parametrize('axis', [0, 1])
def test_every_visible_tile_is_visited_once_and_those_called_whole_are(axis):
    for t, s, causal, window, sinks, step in POSITIONS:
        call = sm90.Call(target.H100, Rule(maps.Softmax(), 1.0, causal, window, sinks), t, s, axis, step, False, True)
        queries, keys = np.arange(t)[:, None], np.arange(s)
        distance = queries + s - t - keys
        visible = (distance >= 0) if causal else np.ones((t, s), bool)
        if window is not None:
            visible &= (abs(distance) < window) | (keys < sinks)
        rows = t if axis == 0 else s
        visible = np.pad(visible, ((0, -t % PAD), (0, -s % PAD)))
        visible = visible if axis == 0 else visible.T
        firsts = {int(call.first(turn)) for turn in range(-(-rows // PAD))}
        assert firsts == set(range(0, rows, PAD))
        for first in firsts:
            steps, tile = call.steps(jnp.int32(first))
            visited = [int(tile(jnp.int32(turn))) for turn in range(int(steps))]
            needed = np.flatnonzero(visible[first : first + PAD].reshape(PAD, -1, step).any((0, 2)))
            assert len(visited) == len(set(visited)) and set(needed) <= set(visited), (t, s, causal, window, sinks)
            assert all(0 <= one * step < visible.shape[1] for one in visited)
            for one, row in itertools.product(visited, range(first, first + PAD, ROWS)):
                place = Place(row, one * step) if axis == 0 else Place(one * step, row)
                if bool(call.all_visible(place, True)):
                    assert visible[row : row + ROWS, one * step : (one + 1) * step].all()


def packed(rng, b, t, ends=0.01):
    """Documents one behind the other."""
    return np.cumsum(rng.random((b, t)) < ends, axis=1)


@pytest.mark.parametrize('axis', [0, 1])
def test_tiles_of_other_documents_are_left_out(axis):
    rng = np.random.default_rng(0)
    for t, s, causal, window, sinks, step in [place for place in POSITIONS if min(place[:2]) > 128 and place[-1] == 32]:
        both = packed(rng, 2, max(t, s))
        arbitrary = rng.integers(-3, 3, (2, t // 20 + 1)).repeat(20, axis=1)[:, :t]
        for queries, keys in ((both[:, -t:], both[:, -s:]), (arbitrary, packed(rng, 2, s))):
            call = sm90.Call(
                target.H100, Rule(maps.Softmax(), 1.0, causal, window, sinks), t, s, axis, step, False, True
            )
            distance = np.arange(t)[:, None] + s - t - np.arange(s)
            visible = np.broadcast_to((distance >= 0) if causal else True, (t, s))
            if window is not None:
                visible = visible & ((abs(distance) < window) | (np.arange(s) < sinks))
            visible = visible & (queries[:, :, None] == keys[:, None, :])
            visible = np.pad(visible, ((0, 0), (0, -t % PAD), (0, -s % PAD)))
            visible = visible if axis == 0 else visible.swapaxes(1, 2)
            firsts, ends, *_ = reach(call, jnp.asarray(queries), jnp.asarray(keys))
            for batch, block in itertools.product(range(2), range(firsts.shape[1])):
                steps, tile = call.steps(jnp.int32(block * PAD), (firsts[batch, block], ends[batch, block]))
                visited = [int(tile(jnp.int32(turn))) for turn in range(int(steps))]
                here = visible[batch, block * PAD : (block + 1) * PAD].reshape(PAD, -1, step).any((0, 2))
                needed = np.flatnonzero(here)
                assert len(visited) == len(set(visited)) and set(needed) <= set(visited), (t, s, causal, window, sinks)
                if window is None and t == s and queries is not arbitrary:
                    assert visited == list(needed)


@pytest.mark.parametrize('axis', [0, 1])
@pytest.mark.parametrize('step', [32, 128])
def test_tiles_called_alike_are_of_the_document_of_their_rows(axis, step):
    rng, t, s = np.random.default_rng(0), 700, 1000
    call = sm90.Call(target.H100, Rule(maps.Softmax(), 1.0, True, None, 0), t, s, axis, step, False, True)
    long = packed(rng, 4, s, ends=0.003)
    twice = np.where(long % 3, long, 0)  # a number that comes again behind others
    found = 0
    for queries, keys in ((long[:, -t:], long), (twice[:, -t:], twice)):
        rows, columns = (queries, keys) if axis == 0 else (keys, queries)
        *_, low, high = reach(call, jnp.asarray(queries), jnp.asarray(keys))
        for batch, block in itertools.product(range(len(long)), range(low.shape[1])):
            mine = set(rows[batch, block * PAD : (block + 1) * PAD])
            tiles = [set(columns[batch, start : start + step]) for start in range(0, columns.shape[1], step)]
            alike = [tile for tile, theirs in enumerate(tiles) if len(mine) == 1 and theirs == mine]
            claimed = list(range(int(low[batch, block]), int(high[batch, block])))
            assert set(claimed) <= set(alike)
            assert claimed == alike or (keys is twice and claimed == alike[: len(claimed)] != []), (claimed, alike)
            found += len(claimed)
    assert found > 20


def test_steps_fit_shared_memory_and_registers():
    def memory(*arrays):
        """Arrays begin at multiples of 1,024 bytes; sums over warps have 2,048, barriers a few."""
        return sum(-(-size // 1024) * 1024 for size in arrays) + 2048 + 256

    sizes = (64, 128, 192, 256)
    served = 0
    for k, v, r, vectors, numbers, bias in itertools.product(
        sizes, sizes, (1, 8, 32, 44, 48, 52, 56, 64, 96, 128), (0, 2, 3), (2, 3, 8), (False, True)
    ):
        tile = tiling.attention_hopper(k, v, r, vectors=vectors, numbers=numbers, bias=bias)
        if tile is None:
            assert r > 32
            continue
        served += 1
        for step, sums, read, *extra in (
            (tile.forward, v, max(vectors, 1), 512, 512),
            (tile.query_gradients, k, max(vectors, 1), 512, 512, 2 * 64 * 4 * tile.query_gradients * bias),
            (
                tile.key_gradients,
                k + v if tile.together else max(k, v),
                max(vectors, 1) + numbers,
                512 * r * bool(vectors),
            ),
        ):
            matrices = [128 * size * 2 for size in (k, v)] + [2 * step * size * 2 for size in (k, v)]
            # Two steps of a float32 number of columns lie behind one another, and a copy begins at 128 bytes.
            assert memory(*matrices, *[2 * 4 * step] * read, *extra) <= 227 * 1024
            assert 4 * step % 128 == 0
            # Sums, one tile of products and one of weights at least, in numbers of a thread of 232 registers.
            assert 64 * (sums + step) / 128 + 64 * step / 256 < 232
    assert served > 1000
    assert tiling.attention_hopper(128, 128, 1, vectors=0, numbers=3, bias=False) == tiling.HopperAttentionTile(
        forward=128, query_gradients=64, key_gradients=32, together=True
    )
    assert tiling.attention_hopper(320, 64, 1, vectors=0, numbers=3, bias=False) is None


@pytest.mark.parametrize(
    ('arrays', 'message'),
    [
        ({'dtype': jnp.float32}, 'have type float32; expected bfloat16 or float16'),
        ({'v_dtype': jnp.float16}, 'have type bfloat16, float16; expected'),
        ({'k': 320}, 'k=320 and v=320 at 2 query heads a group; expected at most 256 channels'),
        ({'t': 0}, 't=0'),
        ({'block': 4}, 'blocks have 4 keys; expected at least 5, of which a tile of 128 keys meets 30 or fewer'),
    ],
)
def test_refusals(arrays, message):
    dtype, k, t = arrays.get('dtype', jnp.bfloat16), arrays.get('k', 64), arrays.get('t', 16)
    q, key = jnp.zeros((1, t, 2, k), dtype), jnp.zeros((1, t, 1, k), dtype)
    block = arrays.get('block')
    options = {} if block is None else {'chosen': jnp.ones((1, t, 1, -(-t // block)), bool), 'block': block}
    with target.compiling_for(target.H100), pytest.raises(NotImplementedError, match=message):
        attention(q, key, key.astype(arrays.get('v_dtype', dtype)), **options, implementation='mosaic_gpu')


@pytest.mark.parametrize('weights', [maps.Relu(), maps.SquaredRelu()], ids=lambda weights: type(weights).__name__)
def test_weights_without_a_bound_are_refused_in_float16(weights):
    def served(dtype):
        q = jax.ShapeDtypeStruct((1, 16, 2, 64), dtype)
        with target.compiling_for(target.H100), dispatch.ledger() as entries:
            jax.eval_shape(lambda q: attention(q, q, q, weights=weights, causal=False), q)
        return dict(entries[0].refused).get('mosaic_gpu', '')

    message = f'type float16 and the weights are {type(weights).__name__}, which have no bound; expected bfloat16'
    assert message in served(jnp.float16)
    assert not served(jnp.bfloat16)


def test_other_devices_and_assemblers_that_err_are_refused(monkeypatch):
    q = jnp.zeros((1, 16, 2, 64), jnp.bfloat16)
    with (
        target.compiling_for(dataclasses.replace(target.H100, kind='NVIDIA A100', capability='8.0')),
        pytest.raises(NotImplementedError, match=r'NVIDIA A100 has compute capability 8\.0; expected 9\.0'),
    ):
        attention(q, q, q, implementation='mosaic_gpu')

    monkeypatch.setattr(passes, '_runtime', lambda: 12090)
    with target.compiling_for(target.H100):
        with pytest.raises(NotImplementedError, match=r'causal masks, .* of CUDA 12\.9 miscompiles; expected'):
            attention(q, q, q, implementation='mosaic_gpu')
        jax.eval_shape(lambda q: attention(q, q, q, causal=False, implementation='mosaic_gpu'), q)
        for version in (12060, 13000, None):
            monkeypatch.setattr(passes, '_runtime', lambda version=version: version)
            jax.eval_shape(lambda q: attention(q, q, q, implementation='mosaic_gpu'), q)


def test_the_assembler_is_that_of_the_runtime(monkeypatch):
    """Whatever package or toolkit it came with; no other is known where JAX keeps it elsewhere."""
    versions = types.SimpleNamespace(cuda_runtime_get_version=lambda: 12080)
    monkeypatch.setattr(lib, 'cuda_versions', versions)
    passes._runtime.cache_clear()
    try:
        assert passes._runtime() == 12080
        monkeypatch.delattr(lib, 'cuda_versions')
        passes._runtime.cache_clear()
        assert passes._runtime() is None
    finally:
        passes._runtime.cache_clear()
