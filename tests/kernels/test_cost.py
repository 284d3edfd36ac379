"""What calls cost, against their definitions: counted by hand, one by one, or by XLA, which sees into references."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Softmax, cost, counting, dispatch, target, tiling, tuning
from pallas_kernels.attention import blocks
from pallas_kernels.attention.problem import Rule
from pallas_kernels.mosaic_gpu import launch


def test_visible_pairs_are_those_of_a_mask():
    sizes, windows = ((1, 1), (5, 5), (3, 7), (7, 3), (1, 6)), ((None, 0), (1, 0), (3, 0), (3, 2), (2, 5), (9, 1))
    for (t, s), (window, sinks), causal in itertools.product(sizes, windows, (True, False)):
        keys, distance = np.arange(s), np.arange(t)[:, None] + s - t - np.arange(s)
        visible = (distance >= 0) if causal else np.ones((t, s), bool)
        if window is not None:
            visible &= (abs(distance) < window) | (keys < sinks)
        found = cost.visible_pairs(t, s, causal=causal, window=window, sinks=sinks)
        assert found == visible.sum(), (t, s, window, sinks, causal)


def tiles_seen(t, s, queries, keys, causal, window):
    """The tiles of a mask with something in them."""
    distance = np.arange(t)[:, None] + s - t - np.arange(s)
    visible = (distance >= 0) if causal else np.ones((t, s), bool)
    if window is not None:
        visible &= abs(distance) < window
    visible = np.pad(visible, ((0, -t % queries), (0, -s % keys)))
    return int(visible.reshape(-(-t // queries), queries, -1, keys).any((1, 3)).sum())


@pytest.mark.parametrize(
    ('causal', 'window', 't', 's'), [(True, 128, 2048, 2048), (True, None, 1500, 2100), (False, 300, 2048, 2048)]
)
def test_executed_attention_counts_whole_tiles(causal, window, t, s):
    sizes = {'b': 2, 't': t, 's': s, 'h': 6, 'g': 2, 'k': 64, 'v': 128, 'causal': causal, 'window': window}
    call = {name: cost.attention(**sizes, implementation=name) for name in ('xla', 'mosaic_tpu', 'mosaic_gpu')}

    def scores(queries, keys):
        return 12 * queries * keys * tiles_seen(t, s, queries, keys, causal, window)

    done = scores(512, 512)
    assert call['xla'].executed.forward.flops == 2 * done * (64 + 128)
    assert call['xla'].executed.forward.exponentials == call['xla'].executed.backward.exponentials == done
    # Scores again, and two products for each gradient of a factor.
    assert call['xla'].executed.backward.flops == 2 * done * (3 * 64 + 2 * 128)
    tile = tiling.attention_tpu(t, s)
    done = scores(tile.queries, tile.keys)
    assert call['mosaic_tpu'].executed.forward.flops == 2 * done * (64 + 128)
    assert call['mosaic_tpu'].executed.backward.flops == 2 * done * (4 * 64 + 3 * 128)
    steps = tiling.attention_hopper(64, 128, 3, vectors=0, numbers=3, bias=False)
    found = call['mosaic_gpu'].executed
    assert found.forward.flops == 2 * scores(128, steps.forward) * (64 + 128)
    of_queries, of_keys = scores(128, steps.query_gradients), scores(steps.key_gradients, 128)
    assert found.backward.flops == 2 * (of_queries * (2 * 64 + 128) + of_keys * (2 * 64 + 2 * 128))
    assert found.backward.exponentials == of_queries + of_keys


@pytest.mark.parametrize(('k', 'v', 'turns'), [(64, 128, 1), (192, 192, 2)])
def test_executed_attention_on_hopper_has_the_tiles_that_its_kernels_ask_for(k, v, turns):
    arrays = [jax.ShapeDtypeStruct((1, 330, heads, size), jnp.bfloat16) for heads, size in ((6, k), (2, k), (2, v))]

    def loss(*arrays):
        return pallas_kernels.attention(*arrays).astype(jnp.float32).sum()

    with target.compiling_for(target.H100), tuning.recording() as asked, dispatch.ledger() as entries:
        jax.eval_shape(jax.grad(loss, (0, 1, 2)), *arrays)
    tile = tiling.attention_hopper(**dict(asked[0].call))
    assert tile.together == (turns == 1)
    of_queries, of_keys = (
        6 * queries * keys * tiles_seen(330, 330, queries, keys, True, None)
        for queries, keys in ((128, tile.query_gradients), (tile.key_gradients, 128))
    )
    found = entries[0].cost.executed.backward
    # Of keys and values apart, the scores are computed for each.
    assert found.flops == 2 * (of_queries * (2 * k + v) + of_keys * (2 * k + 2 * v + (turns - 1) * k))
    assert found.exponentials == of_queries + turns * of_keys


def test_a_narrow_window_in_blocks_costs_the_blocks():
    rule = Rule(Softmax(), 1.0, True, 128, 0)
    tile = tiling.attention(8192, 8192)
    done = len(blocks.pairs(rule, 8192, 8192, tile)) * tile.queries * tile.keys
    call = cost.attention(b=1, t=8192, s=8192, h=1, g=1, k=64, v=64, window=128, implementation='xla')
    assert call.executed.forward.exponentials == done == 31 * 512 * 512
    assert call.model.forward.exponentials == 128 * 8192 - 127 * 128 // 2


@functools.cache
def _arrays(core: str):
    def draw(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    # One step of recurrences, of loops over which XLA counts one turn.
    q, v, beta = draw(2, 1, 3, 64), draw(2, 1, 3, 32), draw(2, 1, 3)
    rows = draw(2, 1, 256)
    return {
        'attention': {'q': draw(2, 50, 4, 64), 'k': draw(2, 60, 2, 64), 'v': draw(2, 60, 2, 128)},
        'linear_attention': {'q': q, 'k': q, 'v': v, 'log_decay': q},
        'delta_rule': {'q': q, 'k': q, 'v': v, 'beta': beta, 'log_decay': q},
        'diagonal_low_rank': {'q': q, 'k': q, 'v': v, 'a': q, 'b': q, 'log_decay': q},
        'linear_scan': {'x': rows, 'decay': rows},
        'short_conv': {'x': draw(2, 50, 256), 'taps': draw(4, 256), 'bias': draw(256)},
        'selective_scan': {'x': rows, 'dt': rows, 'A': draw(256, 16), 'B': draw(2, 1, 16), 'C': draw(2, 1, 16)},
        'softmax': {'x': draw(64, 256)},
        'cross_entropy': {'hidden': draw(64, 128), 'embedding': draw(1000, 128)},
    }[core]


OPTIONS = {'attention': {'causal': False}, 'cross_entropy': {'labels': np.zeros(64, np.int32)}}


def entry(core: str, arrays, **options) -> dispatch.Entry:
    with dispatch.ledger() as entries:
        jax.eval_shape(lambda arrays: getattr(pallas_kernels, core)(**arrays, **options), arrays)
    return entries[0]


@pytest.mark.parametrize(
    'core',
    [
        'attention',
        'linear_attention',
        'delta_rule',
        'diagonal_low_rank',
        'linear_scan',
        'selective_scan',
        'short_conv',
        'softmax',
        'cross_entropy',
    ],
)
def test_operations_are_those_that_xla_counts_in_the_reference(core):
    """Which counts sums, masks and gradients that nobody needs as well, but no exponentials."""
    arrays, options = _arrays(core), OPTIONS.get(core, {}) | {'implementation': 'reference'}
    known = entry(core, arrays, **options).cost.model

    def forward(arrays):
        return getattr(pallas_kernels, core)(**arrays, **options)

    def both(arrays, cotangents):
        outputs, pull = jax.vjp(forward, arrays)
        return outputs, pull(cotangents)

    found = {
        'forward': jax.jit(forward).lower(arrays),
        'both': jax.jit(both).lower(arrays, jax.eval_shape(forward, arrays)),
    }
    counted = {name: lowered.compile().cost_analysis()['flops'] for name, lowered in found.items()}
    assert 0.8 < counted['forward'] / known.forward.flops < 1.45
    assert 0.8 < counted['both'] / (known.forward.flops + known.backward.flops) < 1.45


@pytest.mark.parametrize('core', ['attention', 'linear_attention', 'delta_rule', 'selective_scan', 'cross_entropy'])
def test_the_model_costs_the_same_whatever_form_runs(core):
    costs = {}
    for implementation, here in {'xla': None, 'mosaic_gpu': target.H100, 'mosaic_tpu': target.TPU_V5E}.items():
        arrays = {
            name: jax.ShapeDtypeStruct((x.shape[0], 128, *x.shape[2:]), jnp.bfloat16) if x.ndim > 2 else x
            for name, x in _arrays(core).items()
        }
        if core == 'cross_entropy':
            arrays = {name: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for name, x in arrays.items()}
        with target.compiling_for(here or target.current()):
            found = entry(core, arrays, **OPTIONS.get(core, {}))
        assert found.implementation == implementation
        costs[implementation] = found.cost
    assert len({found.model for found in costs.values()}) == 1
    # Small portable calls of these two keep what others compute again.
    again = [costs[name] for name in costs if name != 'xla' or core not in ('attention', 'cross_entropy')]
    assert all(found.executed.backward.flops > found.model.backward.flops for found in again)


def flops(closed) -> list[int]:
    """The operations of the calls in a program, those in loops once."""
    found = []
    for equation in getattr(closed, 'jaxpr', closed).eqns:
        if equation.primitive is counting.call:
            found.append(equation.params['model'].flops)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')):
            found += flops(inner) if hasattr(inner, 'eqns') else []
    return found


def test_calls_are_counted_not_computed():
    x = jax.ShapeDtypeStruct((2, 8, 4), jnp.float32)
    known = cost.linear_scan(b=2, t=8, d=4).model

    def loss(x):
        h, last = pallas_kernels.linear_scan(jnp.tanh(x), x)
        return jnp.sum(h) + jnp.sum(last)

    # Traced before, too: what was found then is not taken for what is counted now.
    assert flops(jax.make_jaxpr(jax.jit(loss))(x)) == []
    both = [known.forward.flops, known.backward.flops]
    with counting.counting():
        assert flops(jax.make_jaxpr(jax.jit(loss))(x)) == both[:1]
        gradient = jax.make_jaxpr(jax.grad(loss))(x)
        again = jax.make_jaxpr(jax.grad(jax.checkpoint(loss)))(x)
        mapped = jax.make_jaxpr(jax.vmap(loss))(jax.ShapeDtypeStruct((5, *x.shape), x.dtype))
    assert flops(gradient) == both
    assert sorted(flops(again)) == sorted([*both, known.forward.flops])
    assert flops(mapped) == [5 * known.forward.flops]
    assert [aval.shape for aval in gradient.out_avals] == [x.shape]
    assert flops(jax.make_jaxpr(jax.jit(loss))(x)) == []


def test_integers_and_missing_arguments_have_no_gradients():
    q = jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((2, 8), jnp.int32)

    def loss(q, segments):
        return jnp.sum(pallas_kernels.attention(q, q, q, segments=segments).astype(jnp.float32))

    with counting.counting():
        gradient = jax.make_jaxpr(jax.grad(loss))(q, segments)
    assert [aval.dtype for aval in gradient.out_avals] == [jnp.bfloat16]
    assert len(flops(gradient)) == 2


B, T, H, K, V = 2, 256, 3, 64, 32
FLOATS = {'log_decay', 'beta', 'state', 'A', 'D'}
"""Arguments that are in float32 whatever the type of the others."""
MATRIX = {'q': (B, T, H, K), 'k': (B, T, H, K), 'v': (B, T, H, V), 'state': (B, H, K, V)}
ROWS = {'x': (B, T, 24), 'state': (B, 24)}
CALLS = {
    'attention': {'q': (B, T, H, K), 'k': (B, 200, H, K), 'v': (B, 200, H, V)},
    'linear_attention': MATRIX,
    'linear_attention scalar': MATRIX | {'log_decay': (B, T, H)},
    'linear_attention vector': MATRIX | {'log_decay': (B, T, H, K)},
    'delta_rule': MATRIX | {'beta': (B, T, H)},
    'delta_rule scalar': MATRIX | {'beta': (B, T, H), 'log_decay': (B, T, H)},
    'delta_rule vector': MATRIX | {'beta': (B, T, H), 'log_decay': (B, T, H, K)},
    'delta_rule erase': MATRIX | {'beta': (B, T, H), 'erase': (B, T, H, K), 'log_decay': (B, T, H, K)},
    'diagonal_low_rank': MATRIX | {'a': (B, T, H, K)},
    'diagonal_low_rank scalar': MATRIX | {'a': (B, T, H, K), 'log_decay': (B, T, H)},
    'diagonal_low_rank vector': MATRIX | {'a': (B, T, H, K), 'b': (B, T, H, K), 'log_decay': (B, T, H, K)},
    'linear_scan': ROWS | {'decay': (B, T, 24)},
    'selective_scan': {
        'x': (B, T, 24),
        'dt': (B, T, 24),
        'A': (24, 16),
        'B': (B, T, 16),
        'C': (B, T, 16),
        'D': (24,),
        'state': (B, 24, 16),
    },
    'long_conv': {'x': (B, T, 24), 'kernel': (100, 24)},
    'short_conv': {'x': (B, T, 24), 'taps': (4, 24), 'bias': (24,)},
    'softmax': {'x': (64, 200)},
    'softmax_topk': {'x': (64, 200)},
    'cross_entropy': {'hidden': (64, 32), 'embedding': (500, 32)},
}
GIVEN = {
    'short_conv': {'activation': 'silu'},
    'softmax_topk': {'k': 5},
    'cross_entropy': {'labels': np.zeros(64, np.int32)},
}
READ = {'softmax': ['y'], 'linear_scan': ['decay', 'state', 'y'], 'attention': ['q', 'k', 'v', 'y']}
"""What is read of arguments and results for the gradients, where it is not the arguments."""


def called(name, dtype):
    """A function of arrays, and their shapes."""
    core = name.partition(' ')[0]
    arrays = {
        argument: jax.ShapeDtypeStruct(shape, jnp.float32 if argument in FLOATS else dtype)
        for argument, shape in CALLS[name].items()
    }
    return core, arrays, GIVEN.get(core, {})


def size(arrays) -> int:
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays))


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('name', CALLS)
def test_bytes_are_those_of_the_arrays_that_are_read_and_written(name, dtype):
    core, arrays, given = called(name, dtype)
    known = entry(core, arrays, **given, implementation='reference').cost.model
    results = jax.eval_shape(lambda arrays: getattr(pallas_kernels, core)(**arrays, **given), arrays)
    labels = [array for array in given.values() if hasattr(array, 'dtype')]
    assert known.forward.bytes == size([arrays, labels, results])
    if core in READ:
        everything = arrays | {'y': jax.tree.leaves(results)[0]}
        read = [everything[array] for array in READ[core]]
    else:
        # The places of the largest are a result that has no gradient, but is needed for that of the other.
        read = [arrays, labels]
    assert known.backward.bytes == size([read, results, arrays])


BY_HAND = {
    'attention': (B * H * T * 200, 0),
    'linear_attention': (0, 0),
    'linear_attention scalar': (B * T * H, 0),
    'linear_attention vector': (B * T * H * K, 0),
    'delta_rule': (0, 0),
    'delta_rule scalar': (B * T * H, 0),
    'delta_rule vector': (B * T * H * K, 0),
    'delta_rule erase': (B * T * H * K, 0),
    'diagonal_low_rank': (0, 0),
    'diagonal_low_rank scalar': (B * T * H, 0),
    'diagonal_low_rank vector': (B * T * H * K, 0),
    'linear_scan': (0, 0),
    'selective_scan': (B * T * 24 * 16, 0),
    'long_conv': (0, 0),
    # Of sums that are no result, and cannot be kept.
    'short_conv': (B * T * 24, B * T * 24),
    'softmax': (64 * 200, 0),
    # The weights of all that is not among the largest are no result, and cannot be kept.
    'softmax_topk': (64 * 200, 64 * 200),
    'cross_entropy': (64 * 500, 0),
}


@pytest.mark.parametrize('name', CALLS)
def test_exponentials_by_hand(name):
    core, arrays, given = called(name, jnp.float32)
    options = {'causal': False} if core == 'attention' else {}
    known = entry(core, arrays, **given, **options, implementation='reference').cost.model
    assert (known.forward.exponentials, known.backward.exponentials) == BY_HAND[name]


@pytest.mark.parametrize('name', [*CALLS, 'attention in blocks', 'attention recomputed', 'cross_entropy in parts'])
def test_executed_exponentials_are_those_in_the_program(name, monkeypatch):
    """Of portable forms, the moderate decays of vectors."""
    if name == 'attention in blocks':
        monkeypatch.setattr(tiling, 'attention', lambda t, s: tiling.AttentionTile(64, 64))
    if name == 'attention recomputed':
        monkeypatch.setattr(tiling, 'keeps_weights', lambda count: False)
    if name == 'cross_entropy in parts':
        monkeypatch.setattr(tiling, 'cross_entropy', lambda n, o: 32)
    core, arrays, given = called(name if name in CALLS else name.partition(' ')[0], jnp.float32)

    def forward(arrays):
        return getattr(pallas_kernels, core)(**arrays, **given, implementation='xla')

    def both(arrays, cotangents):
        results, pull = jax.vjp(forward, arrays)
        return results, pull(cotangents)

    known = entry(core, arrays, **given, implementation='xla').cost.executed
    results = jax.eval_shape(forward, arrays)
    cotangents = jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0), results
    )
    once = exponentials(jax.make_jaxpr(forward)(arrays).jaxpr)
    twice = exponentials(jax.make_jaxpr(both)(arrays, cotangents).jaxpr)
    # Besides, some a row or a chunk.
    slack = 8 * max(array.size // array.shape[-1] for array in arrays.values())
    assert 0 <= once - known.forward.exponentials <= max(slack, 0.02 * once)
    assert 0 <= twice - once - known.backward.exponentials <= max(slack, 0.02 * twice)


def exponentials(jaxpr) -> int:
    """The numbers of which a program takes exponentials, in the lesser branch of each condition."""
    found = 0
    for equation in jaxpr.eqns:
        parts = [
            part for part in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program) if is_program(part)
        ]
        inner = [exponentials(getattr(part, 'jaxpr', part)) for part in parts]
        match equation.primitive.name:
            case 'exp' | 'logistic':
                found += equation.outvars[0].aval.size
            case 'scan':
                found += equation.params['length'] * sum(inner)
            case 'cond':
                found += min(inner)
            case _:
                found += sum(inner)
    return found


def is_program(value) -> bool:
    return hasattr(value, 'eqns') or hasattr(value, 'jaxpr')


@pytest.mark.parametrize(('k', 'v'), [(64, 64), (128, 128), (128, 256), (64, 192), (256, 128)])
@pytest.mark.parametrize('decay', [None, 'scalar', 'vector'])
@pytest.mark.parametrize('core', ['linear_attention', 'delta_rule'])
def test_executed_costs_on_hopper_are_those_of_the_kernels_that_run(core, decay, k, v, monkeypatch):
    b, t, h = 1, 192, 2
    shapes = {'q': (b, t, h, k), 'k': (b, t, h, k), 'v': (b, t, h, v)}
    shapes |= {'beta': (b, t, h)} if core == 'delta_rule' else {}
    shapes |= {} if decay is None else {'log_decay': (b, t, h) if decay == 'scalar' else (b, t, h, k)}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    started = []

    def kernel(*given, kernel=launch.kernel, **options):
        started.append(options['cost'])
        return kernel(*given, **options)

    def both(arrays):
        results, pull = jax.vjp(lambda arrays: getattr(pallas_kernels, core)(**arrays), arrays)
        return pull(results)

    monkeypatch.setattr(launch, 'kernel', kernel)
    with target.compiling_for(target.H100):
        known = entry(core, arrays).cost.executed
        ahead = len(started)
        jax.eval_shape(both, arrays)
    # The same kernels forward once more, and then those of the backward pass.
    passes = started[:ahead], started[2 * ahead :]
    assert started[ahead : 2 * ahead] == passes[0]
    for expected, costs in zip((known.forward, known.backward), passes, strict=True):
        found = sum(costs, cost.Cost())
        assert expected.flops == pytest.approx(found.flops, rel=0.01)
        assert expected.exponentials == pytest.approx(found.exponentials, rel=0.02)


def test_operations_of_the_largest_weights_by_hand():
    # Forward a difference and a sum for each number, and a division for each of the 5 largest.
    call = cost.softmax_topk(n=64, o=200, k=5)
    assert call.model.forward.flops == 64 * (2 * 200 + 5)
    # Backward a difference and a product for each number; of the largest the sum of products, and y (dy - D).
    assert call.model.backward.flops == 64 * (2 * 200 + 4 * 5)
    assert call.executed == call.model


def test_a_short_convolution_on_hopper_computes_whole_tiles():
    small, whole = (cost.short_conv(b=1, t=t, d=d, w=8, implementation='mosaic_gpu') for t, d in ((65, 136), (64, 256)))
    assert small.executed.forward.flops * 65 * 136 == small.model.forward.flops * 128 * 256
    assert whole.executed.forward == whole.model.forward
    # Of seven tokens behind the tile the gradients of the inputs, once more.
    assert whole.executed.backward.flops - whole.model.backward.flops == 7 * 256 * 2 * 8
