import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.testing.noise import noise
from pallas_kernels import delta_rule, diagonal_low_rank, linear_attention, tiling
from pallas_kernels.cases import diagonal_low_rank as cases
from tests.kernels import matrix_state

NARROW = ('tied', 'packed vector', 'strong vector')
SMALL = ('two', 'tied')


def by_hand(q, k, v, a, state, b=None, log_decay=None, segments=None):
    rows, t, h = *q.shape[:2], state.shape[1]
    S, o = state.copy(), np.zeros((rows, t, h, v.shape[3]))
    b = k if b is None else b
    for row in range(rows):
        for i in range(t):
            new = i > 0 and segments is not None and segments[row, i] != segments[row, i - 1]
            for head in range(h):
                query, key, value, reads, writes = (
                    array[row, i, head * array.shape[2] // h] for array in (q, k, v, a, b)
                )
                decay = np.zeros(len(key))
                if log_decay is not None:
                    decay = log_decay[head] if log_decay.ndim == 1 else log_decay[row, i, head]
                if new:
                    S[row, head] = 0
                transition = np.diag(np.exp(np.broadcast_to(decay, key.shape))) + np.outer(writes, reads)
                S[row, head] = transition @ S[row, head] + np.outer(key, value)
                o[row, i, head] = S[row, head].T @ query / np.sqrt(len(key))
    return o, S


SERVED = [(name, jnp.float32) for name in cases.KERNEL]
SERVED += [('strong scalar', jnp.float32), ('constant', jnp.float32), ('sudden vector', jnp.bfloat16)]
"""The cases that kernels for TPUs serve in the tests."""


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that a short call has several groups of several chunks."""
    monkeypatch.setattr(tiling, 'delta_rule_tpu', lambda *_: tiling.ChunkTile(steps=16, group=32))


QUICK = ('two', 'no decay', 'packed scalar', 'packed tied')
"""Decays of key channels take ten seconds to compile; these cases, with decays that are not, are run every time."""


@pytest.mark.parametrize('name', cases.CASES)
def test_reference_is_the_definition(name, in_double):
    with jax.enable_x64(True):
        call = in_double(cases.call(name))
        actual = jax.jit(functools.partial(diagonal_low_rank, **call.options, implementation='reference'))(
            **call.arrays
        )
        numbers = {name: np.asarray(array) for name, array in {**call.arrays, **call.options}.items()}
        for one, other in zip(actual, by_hand(**numbers), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize('name', SMALL)
def test_gradients_of_the_reference_are_differences(name, differences):
    differences(diagonal_low_rank, cases.call(name))


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [
        pytest.param(
            name,
            dtype,
            marks=() if (name, dtype) in [(one, jnp.float32) for one in QUICK] else pytest.mark.slow,
            id=f'{name}-{dtype.__name__}',
        )
        for dtype, names in ((jnp.float32, cases.CASES), (jnp.bfloat16, NARROW))
        for name in names
    ],
)
def test_xla_is_the_reference(name, dtype, comparison):
    matrix_state.check(comparison, diagonal_low_rank, name, cases.call(name, dtype), cases.CASES[name])


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [
        pytest.param(
            name, dtype, marks=() if name == 'packed scalar' else pytest.mark.slow, id=f'{name}-{dtype.__name__}'
        )
        for name, dtype in SERVED
    ],
)
def test_kernels_for_tpus_are_the_reference(name, dtype, small_tiles, comparison):
    matrix_state.check_kernel(
        comparison, diagonal_low_rank, 'mosaic_tpu', name, cases.call(name, dtype), cases.CASES[name]
    )


@pytest.mark.parametrize(
    'name',
    [
        'packed scalar',
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ('no decay', 'grouped vector', 'reflecting vector', 'sudden vector')
        ),
    ],
)
def test_kernels_for_tpus_serve_erase_keys(name, small_tiles, comparison):
    matrix_state.check_kernel(
        comparison, delta_rule, 'mosaic_tpu', f'erase {name}', cases.erasing(name), cases.CASES[name]
    )


@pytest.mark.slow
@pytest.mark.parametrize('name', ['packed tied', 'sudden vector'])
def test_kernels_for_tpus_give_the_same_bits_twice(name, small_tiles, comparison):
    comparison.check_same_bits(diagonal_low_rank, cases.call(name), 'mosaic_tpu')


@pytest.mark.slow
@pytest.mark.parametrize('name', ['packed scalar', 'packed tied', 'sudden vector'])
def test_groups_of_chunks_are_the_reference(name, comparison, monkeypatch):
    monkeypatch.setattr(tiling, 'delta_rule', lambda *_: tiling.ChunkTile(steps=8, group=16))
    matrix_state.check(comparison, diagonal_low_rank, name, cases.call(name), cases.CASES[name])


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_numbers_worked_out_by_hand(implementation):
    def steps(*rows):
        return jnp.array(rows, jnp.float32)[None, :, None, :]

    o, state = diagonal_low_rank(
        steps([1, 2], [1, 1]), steps([1, 0], [0, 1]), steps([10], [5]), steps([1, 0], [0.5, 1]), steps([0, 2], [1, 0]),
        jnp.log(steps([1.0, 0.5], [0.5, 0.25])), scale=2.0, state=jnp.array([[[[4.0], [8.0]]]]),
        implementation=implementation,
    )  # fmt: skip
    # (4, 8) is read for (1, 0): 4. It decays to (4, 4), and gets 4 (0, 2) and 10 (1, 0): (14, 12), read by (1, 2): 38.
    # (14, 12) is read for (0.5, 1): 19. It decays to (7, 3), and gets 19 (1, 0) and 5 (0, 1): (26, 8), by (1, 1): 34.
    np.testing.assert_allclose(o[0, :, 0, 0], [76, 68], rtol=1e-6)
    np.testing.assert_allclose(state[0, 0, :, 0], [26, 8], rtol=1e-6)


def equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize('tied', [True, False])
def test_with_a_zero_it_is_linear_attention(tied):
    arrays = cases.call('vector').arrays
    arrays['a'] = jnp.zeros_like(arrays['a'])
    if tied:
        del arrays['b']
    found = diagonal_low_rank(**arrays, implementation='xla')
    del arrays['a']
    equal(found, linear_attention(**{n: arrays[n] for n in arrays if n != 'b'}, implementation='reference'))


@pytest.mark.parametrize('strength', [0.2, 25.0])
def test_the_delta_rule_is_a_special_case(strength):
    """Also where decays are strong: what erases is a decayed key."""
    q, k, v = (noise(2, 40, 2, 8, seed=seed) for seed in range(3))
    k /= jnp.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -2 * strength * jax.nn.sigmoid(noise(2, 40, 2, 8, seed=3))
    beta = 2 * jax.nn.sigmoid(noise(2, 40, 2, seed=4))
    weighted, reads = beta[..., None] * k, -jnp.exp(log_decay) * k
    expected = delta_rule(q, k, v, beta, log_decay, implementation='reference')
    equal(diagonal_low_rank(q, weighted, v, reads, weighted, log_decay, implementation='xla'), expected)
    equal(diagonal_low_rank(q, k, beta[..., None] * v, beta[..., None] * reads, None, log_decay), expected)


@pytest.mark.parametrize(
    'name',
    [
        *('no decay', 'packed scalar'),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ('grouped', 'reflecting vector', 'sudden vector')),
    ],
)
def test_erase_keys_of_their_own(name, comparison):
    matrix_state.check(comparison, delta_rule, f'erase {name}', cases.erasing(name), cases.CASES[name])


def test_erase_keys_that_are_the_keys_change_nothing():
    arrays = cases.erasing('reflecting vector').arrays
    del arrays['erase']
    with_erase = delta_rule(**arrays, erase=arrays['k'], implementation='reference')
    equal(with_erase, delta_rule(**arrays, implementation='reference'))
    equal(delta_rule(**arrays, erase=arrays['k']), with_erase)


def test_erase_by_hand():
    """One step in float64: a state of which `e` reads what has decayed."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        k, e, v, state = rng.normal(size=4), rng.normal(size=4), rng.normal(size=3), rng.normal(size=(4, 3))
        decay, beta = rng.uniform(size=4), 0.7
        left = (np.eye(4) - beta * np.outer(k, e)) @ np.diag(decay) @ state + beta * np.outer(k, v)
        shaped = {n: jnp.asarray(x)[None, None, None] for n, x in {'k': k, 'erase': e, 'v': v}.items()}
        for implementation in ('reference', 'xla'):
            _, found = delta_rule(
                shaped['k'], **shaped, beta=jnp.full((1, 1, 1), beta), log_decay=jnp.log(decay)[None, None, None],
                state=jnp.asarray(state)[None, None], implementation=implementation,
            )  # fmt: skip
            np.testing.assert_allclose(found[0, 0], left, rtol=1e-12)


@pytest.mark.parametrize('tied', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_nothing_passes_between_documents_or_from_the_future(tied):
    """Not even as what rounding leaves of sums that cancel: over chunks that documents share."""
    q, k, v, a, b = (noise(1, 70, 2, 8, seed=seed) / 3 for seed in range(5))
    segments = jnp.repeat(jnp.array([1, 2, 3]), jnp.array([9, 40, 21]), total_repeat_length=70)[None]

    def second(arrays):
        b = None if tied else arrays['b']
        given = [arrays[n] for n in 'qkva']
        out, _ = diagonal_low_rank(*given, b, arrays['log_decay'], segments=segments, implementation='xla')
        return jnp.sum(jnp.sin(out[:, 9:45]))

    arrays = dict(zip('qkvab', (q, k, v, a, b), strict=True))
    for strength in (0.1, 30.0):
        arrays['log_decay'] = -strength * jnp.abs(noise(1, 70, 2, 8, seed=9))
        for name, gradient in jax.jit(jax.grad(second))(arrays).items():
            assert not jnp.any(gradient[:, :9]) and not jnp.any(gradient[:, 45:]), name
            assert jnp.any(gradient[:, 9:45]) or (tied and name == 'b'), name


@pytest.mark.slow
def test_pieces_are_the_whole_forward_and_backward(comparison):
    matrix_state.check_pieces(comparison, diagonal_low_rank, cases, 'vector', (5, 32))


def test_no_steps_at_all():
    matrix_state.check_no_steps(diagonal_low_rank, cases.call('vector'))


@pytest.mark.parametrize('t', [1000, pytest.param(65536, marks=pytest.mark.slow)], ids=lambda t: f'{t} steps')
@pytest.mark.parametrize(
    ('letters', 'strength'),
    [('b t h', 25.0), *(pytest.param('b t h k', strength, marks=pytest.mark.slow) for strength in (25.0, 0.3))],
)
def test_decays_over_many_steps(letters, strength, t, comparison, monkeypatch):
    case = cases.Case(b=1, t=t, k=8, v=8, heads=(1, 1, 1), decay=letters, strength=strength)
    monkeypatch.setitem(cases.CASES, 'long', case)
    name = f'long {letters} {strength} {t}'
    matrix_state.check(comparison, diagonal_low_rank, name, cases.call('long', jnp.bfloat16), case)


def test_memory_is_linear_in_length():
    matrix_state.check_memory_is_linear(diagonal_low_rank, *5 * ('bthk',))


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ({'a': jnp.zeros((1, 2, 3))}, ValueError, r'diagonal_low_rank: a has shape \(1, 2, 3\); expected b t ha k'),
        ({'b': jnp.zeros((1, 2, 2, 4))}, ValueError, r'b has shape .*; expected b t hb k with b=1, t=2, k=3'),
        ({'a': jnp.zeros((1, 2, 2, 3), int)}, TypeError, 'a has type int32 .*; expected a floating-point type'),
        ({'b': jnp.zeros((1, 2, 3, 3))}, ValueError, 'b'),
        ({'implementation': 'mosaic_gpu'}, NotImplementedError, "'mosaic_gpu' cannot serve: the platform is cpu"),
    ],
)  # fmt: skip
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        diagonal_low_rank(**{**cases.call('two').arrays, **arguments})


def test_errors_of_erase():
    arrays = cases.erasing('no decay').arrays
    with pytest.raises(ValueError, match=r'delta_rule: erase has shape \(2, 37, 2, 3\); expected b t he k'):
        delta_rule(**{**arrays, 'erase': jnp.zeros((2, 37, 2, 3))})
    with pytest.raises(NotImplementedError, match="'mosaic_tpu' cannot serve: the platform is cpu"):
        delta_rule(**arrays, implementation='mosaic_tpu')
