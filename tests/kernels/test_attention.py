import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Softmax, attention, tiling
from pallas_kernels.cases import attention as cases
from pallas_kernels.cases.drawing import Call

SHORT = tuple(name for name in cases.CASES if name != 'long')
NARROW = ('prime', 'bias', 'everything')
SMALL = ('more queries', 'bias', 'everything')


def by_hand(q, k, v, *, causal, window, sinks, segments=None, weights=None, slopes=None, log_forget=None, bias=None):
    b, t, h, key_dim = q.shape
    s, g = k.shape[1:3]
    output = np.zeros((b, t, h, v.shape[3]))
    if bias is not None:
        bias = np.broadcast_to(bias, (b, h, t, s))
    pair = segments if isinstance(segments, tuple) else (segments, segments)
    for row, i, head in np.ndindex(b, t, h):
        group, position = head // (h // g), i + s - t
        scores = {}
        for j in range(s):
            hidden = causal and j > position
            hidden |= window is not None and abs(position - j) >= window and j >= sinks
            hidden |= segments is not None and pair[0][row, i] != pair[1][row, j]
            hidden |= bias is not None and np.isneginf(bias[row, head, i, j])
            if hidden:
                continue
            score = q[row, i, head] @ k[row, j, group] / np.sqrt(key_dim)
            if weights is not None:
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
        actual = attention(**call.arrays, **call.options, implementation='reference')
        numbers = {name: np.asarray(array) for name, array in call.arrays.items()}
        options = jax.tree.map(np.asarray, {'segments': call.options.get('segments')})
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


@pytest.mark.parametrize('name', SMALL)
def test_gradients_of_the_reference_are_differences(name, differences):
    differences(attention, cases.call(name))


@pytest.mark.parametrize(
    ('name', 'path'),
    [
        (name, path)
        for name in SHORT
        for path in (('kept', 'blocks', 'recomputed') if name in NARROW else ('kept', 'blocks'))
    ],
    indirect=['path'],
)
def test_xla_is_the_reference(name, path, comparison):
    check(comparison, name, cases.call(name), cases.CASES[name].sizes())


@pytest.mark.parametrize('path', ['kept', 'blocks'], indirect=True)
@pytest.mark.parametrize('name', NARROW)
def test_xla_is_the_reference_in_bfloat16(name, path, comparison):
    check(comparison, name, cases.call(name, jnp.bfloat16), cases.CASES[name].sizes())


def test_a_length_beyond_one_block_is_the_reference(comparison):
    case = cases.CASES['long']
    assert tiling.attention(case.t, case.t) is not None
    check(comparison, 'long', cases.call('long'), case.sizes())


def test_one_key_is_read_whole_and_passes_no_gradient_to_queries(path):
    q, k, v = (jax.random.normal(jax.random.key(place), (2, 1, 2, 16)) for place in range(3))
    output, pull = jax.vjp(lambda q, k, v: attention(q, k, v, implementation='xla'), q, k, v)
    dq, dk, dv = pull(jnp.ones_like(v))
    np.testing.assert_allclose(output, v, rtol=1e-6)
    np.testing.assert_allclose(dv, jnp.ones_like(v), rtol=1e-6)
    np.testing.assert_allclose(dq, 0 * q, atol=1e-5)
    np.testing.assert_allclose(dk, 0 * k, atol=1e-5)


@pytest.mark.parametrize('hidden_by', ['position', 'bias', 'segments', 'window'])
@pytest.mark.parametrize('path', ['kept', 'blocks'], indirect=True)
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
    q = jax.random.normal(jax.random.key(0), (1, t, 2, 16))
    k, v = (jax.random.normal(jax.random.key(place), (1, s, 2, 16)) for place in (1, 2))

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


def test_no_keys_at_all():
    q, k = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 0, 2, 4))
    for implementation in ('reference', 'xla'):
        output, pull = jax.vjp(lambda q: attention(q, k, k, implementation=implementation), q)  # noqa: B023
        np.testing.assert_array_equal(output, jnp.zeros_like(q))
        np.testing.assert_array_equal(pull(output + 1)[0], jnp.zeros_like(q))


def test_large_biases(path, comparison):
    # Whole numbers, so that scores of 1e4 have no rounding that would excuse an error.
    q, k = (jax.random.randint(jax.random.key(place), (1, 37, 2, 16), -1, 2).astype(jnp.float32) for place in (0, 1))
    v = jax.random.normal(jax.random.key(2), (1, 37, 2, 16))
    bias = 1e4 * jax.random.rademacher(jax.random.key(3), (1, 1, 37, 37), jnp.float32)
    call = Call({'q': q, 'k': k, 'v': v, 'bias': bias}, {'scale': 1.0})
    actual = comparison.evaluate(attention, call, 'xla')
    expected = comparison.reference(attention, 'large biases', call)
    for name, array in actual.items():
        # Weights that are computed again come from a logarithm of the normaliser, as fine as the largest score.
        again = name != 'output 0' and path != 'kept'
        rounding = jnp.finfo(jnp.float32).eps * (1e4 if again else 16 * 37**0.5)
        error = np.abs(array - expected[name]).max() / np.sqrt(np.square(expected[name]).mean())
        assert error < 4 * rounding, name


@pytest.mark.parametrize('path', ['kept', 'blocks'], indirect=True)
def test_large_products_stay_finite_and_pick_the_largest(path):
    q, k = (jax.random.randint(jax.random.key(place), (1, 37, 2, 64), -32, 33).astype(jnp.float32) for place in (0, 1))
    v = jax.random.normal(jax.random.key(2), (1, 37, 2, 8))
    scores = np.einsum('bthk,bshk->bhts', q, k)
    assert np.abs(scores).max() > 8e3
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


@pytest.mark.parametrize('path', ['kept', 'blocks'], indirect=True)
def test_twice_the_same_bits(path, comparison):
    call = cases.call('everything')
    first, second = (comparison.evaluate(attention, call, 'xla') for _ in range(2))
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


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
        ({'implementation': 'flash'}, ValueError, "implementation is 'flash'; expected None or one of"),
        ({'implementation': 'mosaic_gpu'}, NotImplementedError, "'mosaic_gpu' cannot serve: the platform is cpu"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        attention(**{'q': ZEROS, 'k': ZEROS, 'v': ZEROS, **arguments})
