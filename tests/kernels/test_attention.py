import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from attnlab.testing.contract import compare_with_differences
from attnlab.testing.noise import noise
from attnlab.testing.tolerances import assert_close
from pallas_kernels import (
    AdaptiveSoftmax,
    ClippedSoftmax,
    Entmax,
    Entmax15,
    NormalisedSelfAdjustSoftmax,
    PowerSoftmax,
    Relu,
    ScalableSoftmax,
    SelfAdjustSoftmax,
    Sigmoid,
    Softmax,
    Softpick,
    Sparsemax,
    SquaredRelu,
    StableMax,
    TaylorSoftmax,
    attention,
    checking_values,
    dispatch,
    target,
    tiling,
    visible_counts,
)
from pallas_kernels.attention import problem
from pallas_kernels.attention.maps import Block
from pallas_kernels.cases import attention as cases

SHORT = tuple(name for name in cases.CASES if name not in ('long', 'tiles'))
NARROW = ('prime', 'bias', 'everything')
SMALL = ('more queries', 'bias', 'everything')


def by_hand(
    q,
    k,
    v,
    *,
    weights,
    causal,
    window,
    sinks,
    scale=None,
    segments=None,
    slopes=None,
    log_forget=None,
    bias=None,
    temperature=None,
    sink_scores=None,
    chosen=None,
    block=None,
):
    b, t, h, key_dim = q.shape
    s, g = k.shape[1:3]
    output = np.zeros((b, t, h, v.shape[3]))
    if bias is not None:
        bias = np.broadcast_to(bias, (b, h, t, s))
    pair = segments if isinstance(segments, tuple) else (segments, segments)
    for row, i, head in np.ndindex(b, t, h):
        group, position = head // (h // g), i + s - t
        scores = {}
        # The last place of which the document begins: a run of equal segments, whose number may come again.
        first = (
            0
            if segments is None
            else max(j for j in range(i + 1) if j == 0 or (pair[0][row, j] != pair[0][row, j - 1]))
        )
        for j in range(s):
            hidden = causal and j > position
            hidden |= window is not None and abs(position - j) >= window and j >= sinks
            hidden |= segments is not None and pair[0][row, i] != pair[1][row, j]
            hidden |= bias is not None and np.isneginf(bias[row, head, i, j])
            hidden |= chosen is not None and (j < first or not chosen[row, i, group, (j - first) // block])
            if hidden:
                continue
            score = q[row, i, head] @ k[row, j, group] * (scale or 1 / np.sqrt(key_dim))
            if temperature is not None:
                score *= temperature[row, i, head]
            if weights.soft_cap is not None:
                score = weights.soft_cap * np.tanh(score / weights.soft_cap)
            if bias is not None:
                score += bias[row, head, i, j]
            if slopes is not None:
                score -= slopes[head] * abs(position - j)
            if log_forget is not None:
                score += log_forget[row, j + 1 : i + 1, head].sum()
            scores[j] = score
        highest = max(scores.values(), default=0)
        total = sum(np.exp(score - highest) for score in scores.values())
        total += 0 if sink_scores is None else np.exp(sink_scores[head] - highest)
        for j, score in scores.items():
            output[row, i, head] += np.exp(score - highest) / total * v[row, j, group]
    return output


@pytest.fixture(params=['kept', 'recomputed', 'blocks'])
def path(request, monkeypatch):
    """Each way through the portable form, and at the end the assertion that it was taken."""
    taken = []

    def tile(t, s):
        taken.append('blocks' if request.param == 'blocks' else 'dense')
        return tiling.AttentionTile(queries=min(8, t), keys=min(16, s)) if request.param == 'blocks' else None

    def keeps(count):
        taken.append('weights')
        return request.param == 'kept'

    monkeypatch.setattr(tiling, 'attention', tile)
    monkeypatch.setattr(tiling, 'keeps_weights', keeps)
    yield request.param
    assert set(taken) == ({'blocks'} if request.param == 'blocks' else {'dense', 'weights'})


def check(comparison, name, call, sizes):
    """Compares the portable form with the reference."""
    queries_of_a_key = sizes['t'] * sizes['h'] // sizes['g']
    scores = sizes['t'] * sizes['s']
    sums = {'slopes': sizes['b'] * scores, 'log_forget': scores, 'bias': sizes['b'] * scores}
    reduction = max(queries_of_a_key, sizes['s'], sizes['k'])
    comparison.check(attention, name, call, reduction, implementation='xla', **sums)


@pytest.mark.parametrize('name', SHORT)
def test_reference_is_the_definition(name, in_double):
    with jax.enable_x64(True):
        call = in_double(cases.call(name))
        actual = jax.jit(lambda arrays: attention(**arrays, **call.options, implementation='reference'))(call.arrays)
        numbers = {name: np.asarray(array) for name, array in call.arrays.items()}
        options = {name: call.options.get(name) for name in ('segments', 'chosen')}
        options = jax.tree.map(np.asarray, options)
        expected = by_hand(**numbers, **{**call.options, **options})
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_numbers_worked_out_by_hand(implementation):
    # Scores 0 and log 3: weights 1/4 and 3/4.
    q, k = jnp.ones((1, 1, 1, 1)), jnp.log(jnp.array([1.0, 3.0])).reshape(1, 2, 1, 1)
    v = jnp.array([[8.0, 0.0], [4.0, 1.0]]).reshape(1, 2, 1, 2)
    np.testing.assert_allclose(attention(q, k, v, implementation=implementation)[0, 0, 0], [5, 0.75], rtol=1e-6)
    # A scale of two squares the odds: 1/10 and 9/10.
    np.testing.assert_allclose(
        attention(q, k, v, scale=2.0, implementation=implementation)[0, 0, 0], [4.4, 0.9], rtol=1e-6
    )
    # A slope of minus log 3 and a bias of log 3 each undo the difference.
    for added in ({'slopes': -jnp.log(jnp.array([3.0]))}, {'bias': jnp.log(jnp.array([3.0, 1])).reshape(1, 1, 1, 2)}):
        even = attention(q, k, v, **added, implementation=implementation)
        np.testing.assert_allclose(even[0, 0, 0], [6, 0.5], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('name', SMALL)
def test_gradients_of_the_reference_are_differences(name, differences):
    differences(attention, cases.call(name))


@pytest.mark.parametrize(
    ('name', 'path'),
    [(name, path) for name in SHORT for path in (('kept', 'recomputed', 'blocks') if name in NARROW else ('blocks',))],
    indirect=['path'],
)
def test_xla_is_the_reference(name, path, comparison):
    check(comparison, name, cases.call(name), cases.CASES[name].sizes())


@pytest.mark.parametrize(('name', 'path'), [('bias', 'kept'), ('everything', 'blocks')], indirect=['path'])
def test_xla_is_the_reference_in_bfloat16(name, path, comparison):
    check(comparison, name, cases.call(name, jnp.bfloat16), cases.CASES[name].sizes())


@pytest.mark.parametrize('path', [pytest.param('kept', marks=pytest.mark.slow), 'blocks'], indirect=True)
@pytest.mark.parametrize('kind', cases.MAPS)
def test_every_map_is_its_reference(kind, path, comparison):
    call = cases.call('masked', weights=cases.MAPS[kind])
    check(comparison, f'masked, {kind}', call, cases.CASES['masked'].sizes())


# Of those left out, two round large scores, and the threshold of the third falls on whole numbers, where it bends.
@pytest.mark.slow
@pytest.mark.parametrize('path', ['blocks'], indirect=True)
@pytest.mark.parametrize('kind', sorted(cases.MAPS.keys() - {'scalable softmax', 'entmax 1.2', 'sparsemax'}))
def test_every_map_of_large_scores_is_its_reference(kind, path, comparison):
    call = cases.call('large', weights=cases.MAPS[kind])
    check(comparison, f'large, {kind}', call, cases.CASES['large'].sizes())


def test_a_length_beyond_one_block_is_the_reference(comparison):
    case = cases.CASES['long']
    assert tiling.attention(case.t, case.t) is not None
    check(comparison, 'long', cases.call('long'), case.sizes())


def test_one_key_is_read_whole_and_passes_no_gradient_to_queries(path):
    q, k, v = (noise(2, 1, 2, 16, seed=place) for place in range(3))
    output, pull = jax.vjp(lambda q, k, v: attention(q, k, v, implementation='xla'), q, k, v)
    dq, dk, dv = pull(jnp.ones_like(v))
    np.testing.assert_allclose(output, v, rtol=1e-6)
    np.testing.assert_allclose(dv, jnp.ones_like(v), rtol=1e-6)
    np.testing.assert_allclose(dq, 0 * q, atol=1e-5)
    np.testing.assert_allclose(dk, 0 * k, atol=1e-5)


@pytest.mark.parametrize('hidden_by', ['position', 'bias', 'segments', 'window'])
@pytest.mark.parametrize('path', [pytest.param('kept', marks=pytest.mark.slow), 'blocks'], indirect=True)
def test_a_query_that_sees_nothing_reads_zeros_and_passes_no_gradient(hidden_by, path):
    t, s = (13, 5) if hidden_by == 'position' else (13, 21)
    blind = np.zeros(t, bool)
    options = {}
    if hidden_by == 'position':
        blind[: t - s] = True
    if hidden_by == 'bias':
        blind[3] = True
        options['bias'] = jnp.zeros((1, 1, t, 1)).at[:, :, 3].set(-jnp.inf)
    if hidden_by == 'segments':
        blind[[0, 7, 8]] = True
        documents = jnp.where(jnp.asarray(blind), 9, 1)[None]
        options.update(segments=(documents, jnp.ones((1, s), jnp.int32)), causal=False)
    if hidden_by == 'window':
        t, s, blind = 13, 5, np.arange(13) < 13 - 5 - 2
        options.update(window=3, causal=False)
    q = noise(1, t, 2, 16)
    k, v = (noise(1, s, 2, 16, seed=place) for place in (1, 2))

    for implementation in ('reference', 'xla'):

        @jax.jit
        def run(q, k, v, implementation=implementation):
            output, pull = jax.vjp(lambda *args: attention(*args, **options, implementation=implementation), q, k, v)
            return output, *pull(jnp.full_like(output, 1e3))

        output, dq, dk, dv = run(q, k, v)
        assert not output[:, blind].any()
        assert output[:, ~blind].all()
        assert not dq[:, blind].any()
        assert dq[:, ~blind].any()
        assert dv.any()
        assert all(np.isfinite(array).all() for array in (output, dq, dk, dv))


def test_scores_below_all_others_weigh_nothing(path):
    """The lowest number as a mask is no minus infinity, and queries that see nothing else read zeros in every form."""
    case, call = cases.CASES['prime'], cases.call('prime')
    bias = jnp.zeros((1, 1, case.t, 1)).at[:, :, 9].set(-jnp.inf).at[:, :, 20].set(jnp.finfo(jnp.float32).min)
    found = {}
    for form in ('reference', 'xla'):
        output, pull = jax.vjp(lambda arrays: attention(**arrays, bias=bias, implementation=form), call.arrays)  # noqa: B023
        found[form] = {'output': output} | pull(noise(*output.shape))[0]
        assert not output[:, [9, 20]].any()
        assert not found[form]['q'][:, [9, 20]].any()
    for what, expected in found['reference'].items():
        assert_close(found['xla'][what], expected, dtype=jnp.float32, reduction=2 * case.t, what=what)


@pytest.mark.parametrize(('keys', 'key', 'value', 'expected'), [(4096, 4.0, 10.0, 80.0), (600, 4.0, 20.0, 160.0)])
@pytest.mark.parametrize('path', ['kept', 'blocks'], indirect=True)
def test_means_are_within_the_range_of_float16_where_sums_are_not(keys, key, value, expected, path):
    q, k, v = (jnp.full((1, n, 1, 4), x, jnp.float16) for n, x in ((1, 1.0), (keys, key), (keys, value)))
    for form in ('reference', 'xla'):
        output = attention(q, k, v, weights=Relu(), causal=False, implementation=form)
        assert output.dtype == jnp.float16
        np.testing.assert_array_equal(output, expected)


def test_no_keys_at_all():
    q, k = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 0, 2, 4))
    for implementation in ('reference', 'xla'):
        output, pull = jax.vjp(lambda q: attention(q, k, k, implementation=implementation), q)  # noqa: B023
        np.testing.assert_array_equal(output, jnp.zeros_like(q))
        np.testing.assert_array_equal(pull(output + 1)[0], jnp.zeros_like(q))


@pytest.mark.parametrize('path', ['kept', 'blocks'], indirect=True)
def test_large_products_stay_finite_and_pick_the_largest(path):
    q, k = jnp.asarray(np.random.default_rng(44).integers(-32, 33, (2, 1, 37, 2, 64)), jnp.float32)
    v = noise(1, 37, 2, 8)
    scores = np.einsum('bthk,bshk->bhts', q, k)
    second, first = np.moveaxis(np.sort(scores)[..., -2:], -1, 0)
    assert np.abs(scores).max() > 8e3 and np.min(first - second) > 20
    output, pull = jax.vjp(lambda *arrays: attention(*arrays, scale=1.0, causal=False, implementation='xla'), q, k, v)
    expected = np.stack([v[0, scores[0, head].argmax(-1), head] for head in range(2)], axis=1)
    np.testing.assert_allclose(output[0], expected, rtol=1e-5, atol=1e-5)
    assert all(np.isfinite(gradient).all() for gradient in pull(output))


@pytest.mark.parametrize('path', ['kept', 'blocks'], indirect=True)
def test_hidden_keys_leave_no_trace(path):
    """Huge keys and values of another document do not reach this one, not even in the last bit."""
    call = cases.call('packed')
    row = {name: array[:1] for name, array in call.arrays.items()}
    segments = call.options['segments'][:1]
    other = (segments[0] == 3)[None, :, None, None]
    moved = {'q': row['q'], **{name: jnp.where(other, 1e9, row[name]) for name in ('k', 'v')}}
    run = jax.jit(lambda arrays: attention(**arrays, segments=segments, implementation='xla'))
    before, after = run(row), run(moved)
    np.testing.assert_array_equal(before[0, segments[0] != 3], after[0, segments[0] != 3])


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_outputs_have_the_type_of_the_values(implementation):
    q = jnp.ones((1, 3, 2, 4), jnp.bfloat16)
    assert attention(q, q, q, implementation=implementation).dtype == jnp.bfloat16
    assert attention(q, q, q.astype(jnp.float32), implementation=implementation).dtype == jnp.float32


def test_one_integer_array_of_segments_serves_queries_and_keys():
    call = cases.call('packed')
    segments = call.options['segments']
    one = attention(**call.arrays, segments=segments)
    two = attention(**call.arrays, segments=(segments, segments))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize('path', ['recomputed', 'blocks'], indirect=True)
def test_under_vmap_and_remat(path, comparison):
    call = cases.call('prime')

    def mapped(q, k, v, *, implementation, **options):
        if implementation == 'reference':
            return attention(q, k, v, implementation=implementation, **options)

        @jax.checkpoint
        def row(*arrays):
            return attention(*(array[None] for array in arrays), implementation=implementation, **options)[0]

        return jax.vmap(row)(q, k, v)

    comparison.check(mapped, 'mapped', call, 2 * 37, implementation='xla')


@pytest.mark.slow
@pytest.mark.parametrize('path', ['kept', 'blocks'], indirect=True)
def test_twice_the_same_bits(path, comparison):
    call = cases.call('everything')
    comparison.check_same_bits(attention, call, 'xla')


SCORES = jnp.array([2.0, 1.0, 0.5, -1.0, -3.0])


def one_row(weights, implementation, scores=SCORES, **options):
    """The weights that one query gives to keys of these scores."""
    n = scores.size
    arrays = {'q': jnp.ones((1, 1, 1, 1)), 'k': scores.reshape(1, n, 1, 1), 'v': jnp.eye(n).reshape(1, n, 1, n)}
    options = {'scale': 1.0, 'causal': False, 'implementation': implementation, **options}
    return attention(**arrays, weights=weights, **options)[0, 0, 0]


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_weights_worked_out_by_hand(implementation):
    expected = {
        Softmax(): [0.606968, 0.223291, 0.135433, 0.030219, 0.004090],
        Softmax(soft_cap=2.0): [0.493247, 0.270983, 0.175503, 0.042674, 0.017593],
        ScalableSoftmax(0.43): [0.497140, 0.248841, 0.176053, 0.062346, 0.015620],
        SelfAdjustSoftmax(): [1.213935, 0.223291, 0.067716, -0.030219, -0.012269],
        NormalisedSelfAdjustSoftmax(): [0.606968, 0.178633, 0.094803, 0.012088, 0],
        Softpick(): [0.617993, 0.166204, 0.062749, 0, 0],
        Sigmoid(-np.log(5)): [0.596418, 0.352187, 0.247976, 0.068533, 0.009859],
        Relu(): [0.4, 0.2, 0.1, 0, 0],
        SquaredRelu(): [4, 1, 0.25, 0, 0],
        PowerSoftmax(4, 0.0): [0.161514, 0.010095, 0.000631, 0.010095, 0.817666],
        PowerSoftmax(4, 1e-3): [0.161382, 0.010086, 0.000630, 0.010086, 0.816998],
        StableMax(): [0.413793, 0.275862, 0.206897, 0.068966, 0.034483],
        TaylorSoftmax(): [5 / 12.125, 2.5 / 12.125, 1.625 / 12.125, 0.5 / 12.125, 2.5 / 12.125],
        ClippedSoftmax(1.0, -0.03): [0.595177, 0.199990, 0.109496, 0.001126, 0],
        AdaptiveSoftmax(): [0.703536, 0.186457, 0.095990, 0.013097, 0.000920],
        Sparsemax(): [1, 0, 0, 0, 0],
        Entmax15(): [0.814649, 0.162070, 0.023280, 0, 0],
        Entmax(1.25): [0.712040, 0.199831, 0.087320, 0.000808, 0],
    }
    rows = jax.jit(lambda: [one_row(weights, implementation) for weights in expected])()
    for weights, row in zip(expected, rows, strict=True):
        np.testing.assert_allclose(row, expected[weights], atol=2e-6, err_msg=str(weights))
    sink = one_row(Softmax(), implementation, sink_scores=jnp.zeros(1))
    np.testing.assert_allclose(sink, [0.560893, 0.206341, 0.125152, 0.027925, 0.003779], atol=2e-6)


def test_maps_that_are_others():
    """One map at the end of its range is another map, in values and gradients."""
    counts = visible_counts(6)
    pairs = {
        'entmax at 2': ({'weights': Entmax(2.0)}, {'weights': Sparsemax()}),
        'entmax at 1.5': ({'weights': Entmax(1.5)}, {'weights': Entmax15()}),
        'nothing clipped': ({'weights': ClippedSoftmax(1.0, 0.0)}, {}),
        'a sink of minus infinity': ({'sink_scores': jnp.full(2, -jnp.inf)}, {}),
        'a cap far off': ({'weights': Softmax(soft_cap=1e4)}, {}),
        'temperatures of one': ({'temperature': jnp.ones(2)}, {}),
        'a power of two': ({'weights': PowerSoftmax(2, 0.0)}, {'weights': PowerSoftmax(2, 1e-12)}),
        'scalable': ({'weights': ScalableSoftmax(0.7)}, {'temperature': jnp.tile(0.7 * jnp.log(counts), (1, 1, 2))}),
    }
    arrays = [noise(1, 6, 2, 4, seed=place) for place in range(3)]

    @jax.jit
    def run(arrays):
        def both(options):
            output, pull = jax.vjp(lambda *arrays: attention(*arrays, **options), *arrays)
            return output, pull(jnp.cos(output))

        return {name: (both(one), both(other)) for name, (one, other) in pairs.items()}

    for name, (one, other) in run(arrays).items():
        jax.tree.map(lambda a, b, name=name: np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name), one, other)


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_equal_scores(implementation):
    for score in (3.0, -3.0):
        scores = jnp.full(4, score)
        np.testing.assert_allclose(one_row(SelfAdjustSoftmax(), implementation, scores), jnp.full(4, score / 4), 1e-6)
        even = jnp.full(4, 0.25 if score > 0 else 0)
        np.testing.assert_allclose(one_row(NormalisedSelfAdjustSoftmax(), implementation, scores), even, 1e-6)
    for weights in (NormalisedSelfAdjustSoftmax(), Softpick(), PowerSoftmax(), SelfAdjustSoftmax()):
        assert not one_row(weights, implementation, jnp.zeros(4)).any()


@pytest.mark.slow
@pytest.mark.parametrize('kind', cases.MAPS)
def test_gradients_of_maps_are_differences(kind):
    # No gradient flows through what the first two add to their sums, nor through the temperature of the third.
    weights = {
        'softpick': Softpick(1e-12),
        'power': PowerSoftmax(epsilon=0.0),
        'adaptive temperature': AdaptiveSoftmax(coefficients=(1.5,), lowest=-1.0),
    }.get(kind, cases.MAPS[kind])
    with jax.enable_x64(True):
        scores, along = jax.random.normal(jax.random.key(0), (2, 4, 7), jnp.float64)
        visible = jnp.arange(7)[None] < jnp.array([[7], [5], [3], [0]])
        compare_with_differences(kind, lambda scores: jnp.vdot(along, weights.weights(scores, visible)), 2 * scores)


@pytest.mark.parametrize('kind', ['softmax', *cases.MAPS])
def test_hidden_keys_weigh_nothing(kind):
    weights = cases.MAPS.get(kind, Softmax())
    visible = jnp.array([[True, False, True], [False, False, False]])
    block = Block(jnp.array([[30.0, 1e9, -2.0], [1e9, -1e9, 0.0]]), visible, jnp.arange(3)[None])

    def reduce(function, kinds, *rows):
        if isinstance(kinds, tuple):
            return [reduce(lambda *args, at=at: function(*args)[at], one, *rows) for at, one in enumerate(kinds)]
        empty = {'max': -jnp.inf, 'min': jnp.inf, 'sum': 0}[kinds.removeprefix('arg')]
        seen = jnp.where(visible, function(block, *rows), empty)
        if not kinds.startswith('arg'):
            return getattr(jnp, kinds)(seen, axis=-1, keepdims=True)
        first = jnp.where(visible.any(-1, keepdims=True), getattr(jnp, kinds)(seen, axis=-1, keepdims=True), -1)
        return getattr(jnp, kinds.removeprefix('arg'))(seen, axis=-1, keepdims=True), first

    statistics = weights.survey(reduce) if weights.surveys else weights.dense(block)[1]
    assert len(statistics) == len(weights.statistics)
    found = weights.recompute(block, statistics)
    delta = jnp.ones((2, 1))
    companion_delta = delta if weights.has_companion else None
    gradient = weights.score_gradient(block, found, statistics, jnp.full((2, 3), 1e3), delta, companion_delta)
    second = weights.companion(block, statistics) if weights.has_companion else jnp.zeros((2, 3))
    for array in (found, gradient, second, weights.weights(block.scores, visible)):
        assert np.isfinite(array).all()
        assert not array[~visible].any()
    assert found[visible].any()


def test_the_learned_sink_takes_its_share():
    # A score of log 3 and a sink of zero: the key weighs 3/4; a sink far above takes all, and nothing overflows.
    q, k, v = jnp.ones((1, 1, 1, 1)), jnp.log(3.0) * jnp.ones((1, 1, 1, 1)), 8 * jnp.ones((1, 1, 1, 1))
    for sink, expected in ((0.0, 6), (1e4, 0), (-1e4, 8)):
        output = attention(q, k, v, sink_scores=jnp.full(1, sink), implementation='xla')
        np.testing.assert_allclose(output, np.full((1, 1, 1, 1), expected), rtol=1e-6)


@pytest.mark.parametrize(
    'implementation', ['reference', 'xla', *(pytest.param(name, marks=pytest.mark.slow) for name in dispatch.PLATFORM)]
)
def test_a_bias_that_is_not_a_number_hides_no_key(implementation):
    call = cases.call('bias', jnp.bfloat16)
    arrays = call.arrays | {'bias': call.arrays['bias'].at[0, 1, 5, 2].set(jnp.nan)}
    here = target.interpreted(implementation) if implementation in dispatch.PLATFORM else target.current()
    with target.compiling_for(here):
        output = jax.jit(lambda arrays: attention(**arrays, **call.options, implementation=implementation))(arrays)
    expected = np.zeros(output.shape, bool)
    expected[0, 5, 1] = True
    np.testing.assert_array_equal(jnp.isnan(output), expected)


def test_a_sink_that_is_not_a_number_is_one(path):
    call = cases.call('prime')
    for implementation in ('reference', 'xla'):
        sinks = jnp.zeros(4).at[2].set(jnp.nan)
        output = attention(**call.arrays, **call.options, sink_scores=sinks, implementation=implementation)
        np.testing.assert_array_equal(jnp.isnan(output).all(axis=(0, 1, 3)), [False, False, True, False])


@pytest.mark.parametrize('name', ['temperature', 'temperature of heads'])
def test_the_gradient_of_a_temperature_of_16_bits_is_rounded_once(name):
    call = cases.call('temperature', jnp.bfloat16)
    temperature = call.arrays['temperature'][0, 0] if name == 'temperature of heads' else call.arrays['temperature']

    def gradient(temperature):
        def run(temperature):
            return attention(**call.arrays | {'temperature': temperature}, implementation='xla')

        output, pull = jax.vjp(run, temperature)
        return pull(output)[0]

    found, exact = gradient(temperature), gradient(temperature.astype(jnp.float32))
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=2**-8)


@pytest.mark.parametrize('cut', [pytest.param(False, marks=pytest.mark.slow), True])
def test_visible_counts(cut, monkeypatch):
    if cut:
        monkeypatch.setattr(tiling, 'attention', lambda t, s: tiling.AttentionTile(2, 3))
    segments = jnp.array([[1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    counts = visible_counts(7, segments=segments)
    np.testing.assert_array_equal(counts[..., 0], [[1, 2, 1, 2, 3, 1, 2], [1, 2, 3, 4, 5, 6, 7]])
    bias = jnp.zeros((1, 2, 1, 7)).at[0, 1, 0, 3].set(-jnp.inf)
    np.testing.assert_array_equal(visible_counts(7, bias=bias)[0, :, 1], [1, 2, 3, 3, 4, 5, 6])
    for t, s in ((7, 7), (5, 9), (9, 5), (1, 6)):
        distance = np.arange(t)[:, None] + s - t - np.arange(s)
        for causal in (True, False):
            for window, sinks in ((None, 0), (1, 0), (3, 0), (3, 2), (4, 20), (20, 1), (2**31 - 1, 2**31)):
                near = True if window is None else (np.abs(distance) < window) | (np.arange(s) < sinks)
                expected = (((distance >= 0) | (not causal)) & near).sum(-1)
                found = visible_counts(t, s, causal=causal, window=window, sinks=sinks)
                np.testing.assert_array_equal(found[0, :, 0], expected)


def test_gates_above_one_are_errors():
    array, gates = jnp.ones((1, 3, 1, 4)), jnp.zeros((1, 3, 1)).at[0, 1].set(0.5)
    with pytest.raises(ValueError, match=r'log_forget has entries up to 0\.5; expected at most 0'):
        attention(array, array, array, log_forget=gates, implementation='reference')
    with checking_values():
        checked = checkify.checkify(lambda gates: attention(array, array, array, log_forget=gates))
        assert 'log_forget has entries up to 0.5' in checked(gates)[0].get()
        assert checked(-gates)[0].get() is None


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: Softmax(soft_cap=0.0), 'Softmax: soft_cap is 0.0; expected a positive, finite number, or None'),
        (lambda: Entmax(1.0), 'Entmax: alpha is 1.0; expected between 1.01 and 2'),
        (lambda: PowerSoftmax(3), 'PowerSoftmax: power is 3; expected an even positive number'),
        (lambda: PowerSoftmax(epsilon=-1.0), 'PowerSoftmax: epsilon is -1.0; expected at least 0'),
        (lambda: Softpick(0.0), 'Softpick: epsilon is 0.0; expected a positive number'),
        (lambda: ClippedSoftmax(0.9), 'ClippedSoftmax: zeta is 0.9; expected at least 1'),
        (lambda: ClippedSoftmax(gamma=0.1), 'ClippedSoftmax: gamma is 0.1; expected at most 0'),
    ],
)
def test_maps_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_cap_is_part_of_the_map():
    assert Softmax() == Softmax(soft_cap=None) != Softmax(soft_cap=1.0)


ZEROS = jnp.zeros((2, 5, 4, 8))


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ({'q': ZEROS[0]}, ValueError, r'attention: q has shape \(5, 4, 8\); expected b t h k'),
        ({'k': ZEROS[:1]}, ValueError, r'k has shape \(1, 5, 4, 8\); expected b s g k with b=2, k=8'),
        ({'v': ZEROS[:, :3]}, ValueError, r'v has shape \(2, 3, 4, 8\); expected b s g v with b=2, s=5, g=4'),
        (
            {'k': ZEROS[:, :, :3], 'v': ZEROS[:, :, :3]},
            ValueError,
            'k has 3 heads; expected a divisor of the 4 heads of q',
        ),
        ({'q': ZEROS.astype(jnp.int32)}, TypeError, 'q has type int32 .*; expected a floating-point type'),
        ({'temperature': jnp.ones((2, 4))}, ValueError, r'temperature has shape \(2, 4\); expected b t h'),
        ({'sink_scores': jnp.ones(2)}, ValueError, r'sink_scores has shape \(2,\); expected h with h=4'),
        ({'sink_scores': jnp.ones(4), 'weights': Relu()}, ValueError, 'the weights are Relu; expected a softmax'),
        ({'window': 0}, ValueError, 'window is 0; expected at least 1, or None'),
        ({'sinks': 2}, ValueError, 'sinks is 2 and window None'),
        ({'window': 2, 'sinks': -1}, ValueError, 'sinks is -1 and window 2'),
        ({'slopes': jnp.zeros(3)}, ValueError, r'slopes has shape \(3,\); expected h with h=4'),
        (
            {'log_forget': ZEROS[..., 0], 'causal': False},
            ValueError,
            'log_forget needs a causal call .* causal is False',
        ),
        ({'log_forget': ZEROS[..., 0], 'k': ZEROS[:, :3], 'v': ZEROS[:, :3]}, ValueError, 't=5 and s=3'),
        ({'bias': jnp.zeros((5, 5))}, ValueError, r'bias has shape \(5, 5\); expected four dimensions'),
        ({'bias': jnp.zeros((2, 4, 5, 3))}, ValueError, r'bias has shape \(2, 4, 5, 3\); expected b h t s with .* s=5'),
        ({'segments': jnp.zeros((2, 5))}, TypeError, 'segments has type float32'),
        (
            {'segments': (jnp.zeros((2, 5), jnp.int32), jnp.zeros((2, 3), jnp.int32))},
            ValueError,
            r'segments\[1\] has shape \(2, 3\); expected b s with b=2, s=5',
        ),
        (
            {'chosen': jnp.ones((2, 5, 4, 3), bool)},
            ValueError,
            'chosen was given without block; expected both, or neither',
        ),
        ({'block': 2}, ValueError, 'block was given without chosen'),
        ({'chosen': jnp.ones((2, 5, 4, 3), bool), 'block': 0}, ValueError, 'block is 0; expected at least 1'),
        (
            {'chosen': jnp.ones((2, 5, 4, 2), bool), 'block': 2},
            ValueError,
            r'chosen has shape \(2, 5, 4, 2\); expected b t g n with b=2, t=5, g=4, n=3',
        ),
        (
            {'chosen': jnp.ones((2, 5, 4, 3)), 'block': 2},
            TypeError,
            'chosen has type float32 .*; expected bool',
        ),
        (
            {'chosen': jnp.ones((2, 5, 4, 3), bool), 'block': 2, 'causal': False},
            ValueError,
            'chosen needs a causal call with as many queries as keys; causal is False',
        ),
        (
            {'chosen': jnp.ones((2, 5, 4, 3), bool), 'block': 2, 'segments': (ZEROS[..., 0, 0].astype(jnp.int32),) * 2},
            ValueError,
            'chosen with a pair of segments; expected one array',
        ),
        ({'implementation': 'flash'}, ValueError, "implementation is 'flash'; expected None or one of"),
        ({'implementation': 'mosaic_gpu'}, NotImplementedError, "'mosaic_gpu' cannot serve: the platform is cpu"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        attention(**{'q': ZEROS, 'k': ZEROS, 'v': ZEROS, **arguments})


def test_factors_of_the_number_of_keys_count_those_in_chosen_blocks(path, comparison):
    call = cases.call('chosen blocks of documents', weights=ScalableSoftmax(0.43))
    check(comparison, 'counted in chosen blocks', call, cases.CASES['chosen blocks of documents'].sizes())


@pytest.mark.parametrize('implementation', dispatch.PLATFORM)
def test_kernels_refuse_numbers_of_documents_that_they_would_cut(implementation):
    q = jnp.zeros((1, 4, 2, 64), jnp.bfloat16)
    with jax.enable_x64(True), target.compiling_for(target.interpreted(implementation)):
        segments = jnp.array([[5, 5, 5 + 2**32, 5 + 2**32]])
        with pytest.raises(NotImplementedError, match='segments have type int64; expected 32 bits at most'):
            attention(q, q, q, segments=segments, implementation=implementation)


@pytest.mark.parametrize(('way', 'implementation', 'packed'), [('blocks', 'xla', False), ('dense', 'reference', True)])
def test_gates_far_along_a_row_have_their_digits(way, implementation, packed, monkeypatch):
    """After sums of 5e4, in float32, of which neighbours differ by multiples of 4e-3."""
    blocks = tiling.AttentionTile(queries=8, keys=16)
    monkeypatch.setattr(tiling, 'attention', lambda t, s: blocks if way == 'blocks' else None)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 24, 2, 4))
    gates = jax.nn.log_sigmoid(jax.random.normal(jax.random.key(1), (1, 24, 2))).at[:, 1].set(-5e4 - 0.123)
    segments = {'segments': jnp.array([[7] + [3] * 23])} if packed else {}

    def both(implementation, *arrays):
        def run(q, k, v, log_forget):
            return attention(q, k, v, log_forget=log_forget, **segments, implementation=implementation)

        output, pull = jax.vjp(run, *arrays)
        return output, pull(output)

    actual = jax.jit(both, static_argnums=0)(implementation, q, k, v, gates)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(array), jnp.float64) for array in (q, k, v, gates)]
        expected = jax.jit(both, static_argnums=0)('reference', *exact)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_differences_of_gates_at_65536_tokens():
    """The figures of `log_forget`, against float64: sums alone, which kernels take, and with what rounding took."""
    logits = jax.random.normal(jax.random.key(0), (1, 2**16, 1))
    log_forget = jax.nn.log_sigmoid(logits)
    array = jnp.zeros((1, 2**16, 1, 1))
    of = jax.jit(lambda log_forget: problem.canonical(array, array, array, None, None, log_forget, None))
    operands = of(log_forget)
    sums, rest = (np.asarray(x, np.float64).ravel() for x in (operands.query_forget, operands.query_rest))
    exact = np.cumsum(np.asarray(log_forget, np.float64).ravel())
    for lag in (1, 64, 4096):
        differences, expected = sums[lag:] - sums[:-lag], exact[lag:] - exact[:-lag]
        assert 1e-3 < np.abs(differences - expected).max() < 2e-2
        np.testing.assert_allclose(differences + rest[lag:] - rest[:-lag], expected, atol=2e-6)


def test_a_bias_that_attention_refuses_has_no_counts():
    with pytest.raises(TypeError, match=r'attention: bias has type bool and shape .*; expected a floating-point type'):
        visible_counts(4, bias=jnp.zeros((1, 1, 4, 4), bool))
    with pytest.raises(ValueError, match=r'attention: bias has shape \(4,\); expected'):
        visible_counts(4, bias=jnp.zeros(4))
