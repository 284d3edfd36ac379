import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from attnlab.testing.noise import noise
from pallas_kernels import checking_values, delta_rule, linear_attention, target, tiling
from pallas_kernels.cases import delta_rule as cases
from pallas_kernels.cases.drawing import Call
from pallas_kernels.matrix_state.chunks import MODERATE
from pallas_kernels.matrix_state.inverse import inverse, inverse_again
from pallas_kernels.matrix_state.products import Form, added_up
from tests.kernels import matrix_state

NARROW = ('shared queries and keys', 'packed scalar', 'packed vector', 'strong vector')
SMALL = ('two', 'threes and twos', 'packed constant')
GROUPED = ('packed scalar', 'sudden vector')
QUICK = ('grouped vector', 'packed scalar')
SERVED = [(name, jnp.float32) for name in cases.KERNEL] + [('several chunks, vector', jnp.bfloat16)]
SERVED += [(name, jnp.bfloat16) for name in ('keys alike', 'packed scalar', 'sudden vector')]
SERVED += [('several chunks', jnp.float16)]
DOCUMENTS = ('packed', 'packed constant', 'packed scalar', 'sudden vector')


def by_hand(q, k, v, beta, state, log_decay=None, segments=None):
    b, t, h = *q.shape[:2], state.shape[1]
    S, o = state.copy(), np.zeros((b, t, h, v.shape[3]))
    for row in range(b):
        for i in range(t):
            new = i > 0 and segments is not None and segments[row, i] != segments[row, i - 1]
            for head in range(h):
                query, key, value = (array[row, i, head * array.shape[2] // h] for array in (q, k, v))
                if new:
                    S[row, head] = 0
                elif log_decay is not None:
                    decay = log_decay[head] if log_decay.ndim == 1 else log_decay[row, i, head]
                    S[row, head] *= np.exp(np.broadcast_to(decay, key.shape))[:, None]
                erase = np.eye(len(key)) - beta[row, i, head] * np.outer(key, key)
                S[row, head] = erase @ S[row, head] + beta[row, i, head] * np.outer(key, value)
                o[row, i, head] = S[row, head].T @ query / np.sqrt(len(key))
    return o, S


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that a short call has several groups of several chunks."""
    monkeypatch.setattr(tiling, 'delta_rule', lambda *_: tiling.ChunkTile(steps=8, group=16))
    monkeypatch.setattr(tiling, 'delta_rule_tpu', lambda *_: tiling.ChunkTile(steps=16, group=32))


@pytest.mark.parametrize('name', cases.CASES)
def test_reference_is_the_definition(name, in_double):
    with jax.enable_x64(True):
        call = in_double(cases.call(name))
        actual = jax.jit(functools.partial(delta_rule, **call.options, implementation='reference'))(**call.arrays)
        numbers = {name: np.asarray(array) for name, array in {**call.arrays, **call.options}.items()}
        for one, other in zip(actual, by_hand(**numbers), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_numbers_worked_out_by_hand(implementation):
    def steps(*rows):
        return jnp.array(rows, jnp.float32)[None, :, None, :]

    half = jnp.log(jnp.array([[[[1.0, 0.5]], [[0.5, 0.25]]]]))
    o, state = delta_rule(
        steps([1, 2], [1, 1]), steps([1, 0], [0, 1]), steps([10], [5]), jnp.array([[[1.0], [0.5]]]), half, scale=2.0,
        state=jnp.array([[[[4.0], [8.0]]]]), implementation=implementation,
    )  # fmt: skip
    # (4, 8) decays to (4, 4); the key (1, 0) reads 4, which 10 replaces: S_1 = (10, 4), read by (1, 2): 18.
    # (10, 4) decays to (5, 1); the key (0, 1) reads 1, which 5 replaces by half: S_2 = (5, 3), read by (1, 1): 8.
    np.testing.assert_allclose(o[0, :, 0, 0], [36, 16], rtol=1e-6)
    np.testing.assert_allclose(state[0, 0, :, 0], [5, 3], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('name', SMALL)
def test_gradients_of_the_reference_are_differences(name, differences):
    differences(delta_rule, cases.call(name))


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [
        *((name, jnp.float32) for name in cases.CASES),
        *((name, jnp.bfloat16) for name in NARROW),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_xla_is_the_reference(name, dtype, comparison):
    matrix_state.check(comparison, delta_rule, name, cases.call(name, dtype), cases.CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize('name', GROUPED)
def test_groups_of_chunks_are_the_reference(name, small_tiles, comparison):
    matrix_state.check(comparison, delta_rule, name, cases.call(name), cases.CASES[name])


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [
        pytest.param(name, dtype, marks=() if name in QUICK else pytest.mark.slow, id=f'{name}-{dtype.__name__}')
        for name, dtype in SERVED
    ],
)
def test_kernels_for_tpus_are_the_reference(name, dtype, small_tiles, comparison):
    matrix_state.check_kernel(comparison, delta_rule, 'mosaic_tpu', name, cases.call(name, dtype), cases.CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize('name', ['several chunks', 'several chunks, vector'])
def test_kernels_for_tpus_are_the_reference_in_tiles_of_their_size(name, comparison):
    matrix_state.check_kernel(comparison, delta_rule, 'mosaic_tpu', name, cases.call(name), cases.CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize('name', ['packed scalar', 'sudden vector'])
def test_kernels_for_tpus_give_the_same_bits_twice(name, small_tiles, comparison):
    comparison.check_same_bits(delta_rule, cases.call(name), 'mosaic_tpu')


@pytest.mark.parametrize(
    ('k', 'v', 'message'),
    [
        (1024, 1024, 'a state has 1024 x 1024 numb'),
        (4096, 64, 'q and k have 4096 channels; expected at most 1024'),
    ],
)
def test_a_kernel_refuses_what_the_device_cannot_hold(k, v, message):
    q, values = (jax.ShapeDtypeStruct((1, 2, 1, channels), jnp.float32) for channels in (k, v))
    beta = jax.ShapeDtypeStruct((1, 2, 1), jnp.float32)
    with target.compiling_for(target.TPU_V5E), pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(delta_rule, implementation='mosaic_tpu'), q, q, values, beta)


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_with_keys_at_right_angles_it_is_linear_attention(implementation):
    """Nothing is ever overwritten then, and beta is a factor of the keys."""
    q, v = (noise(1, 16, 2, 16, seed=seed) for seed in (0, 1))
    k = jnp.broadcast_to(jnp.eye(16)[None, :, None], q.shape)
    beta = jax.nn.sigmoid(noise(1, 16, 2))
    with jax.default_matmul_precision('highest'):
        found = delta_rule(q, k, v, beta, implementation=implementation)
        expected = linear_attention(q, beta[..., None] * k, v, implementation='reference')
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_with_beta_one_the_last_value_of_a_key_is_read_back():
    k = jnp.broadcast_to(jnp.array([0.6, 0.8]), (1, 40, 1, 2))
    v = noise(1, 40, 1, 3)
    o, _ = delta_rule(k, k, v, jnp.ones((1, 40, 1)), scale=1.0, implementation='xla')
    np.testing.assert_allclose(o, v, rtol=1e-5, atol=1e-5)


def test_the_vector_form_with_one_decay_for_all_channels_is_the_scalar_reference(comparison):
    matrix_state.check_one_decay_for_all_channels(comparison, delta_rule, cases)


@pytest.mark.slow
@pytest.mark.parametrize(('decay', 'cuts'), [('scalar', (5, 32)), ('vector', (32,))])
def test_pieces_are_the_whole_forward_and_backward(decay, cuts, comparison):
    matrix_state.check_pieces(comparison, delta_rule, cases, decay, cuts)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['scalar', 'sudden vector'])
def test_under_vmap_and_remat(name, comparison):
    matrix_state.check_vmap_and_remat(comparison, delta_rule, cases, name)


@pytest.mark.parametrize('name', DOCUMENTS)
def test_nothing_passes_between_documents_or_from_the_future(name):
    matrix_state.check_reach(delta_rule, cases.call(name), (4, 31, 32, 40, 66), 'xla')


@pytest.mark.slow
@pytest.mark.parametrize('name', ['packed scalar', 'sudden vector'])
def test_nothing_passes_between_documents_in_kernels_for_tpus(name, small_tiles):
    matrix_state.check_reach(delta_rule, cases.call(name), (32, 40), 'mosaic_tpu')


@pytest.mark.slow
@pytest.mark.parametrize('name', ['packed scalar', 'sudden vector'])
def test_nothing_passes_between_documents_in_kernels_for_gpus(name):
    matrix_state.check_reach(delta_rule, cases.call(name, jnp.bfloat16), (32, 40), 'mosaic_gpu')


@pytest.mark.parametrize('decay', [None, 'scalar', 'vector'])
def test_no_steps_at_all(decay):
    matrix_state.check_no_steps(delta_rule, cases.call('no decay' if decay is None else decay))


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_types_and_defaults(implementation):
    matrix_state.check_types_and_defaults(delta_rule, cases, implementation)


@pytest.mark.parametrize('t', [1000, pytest.param(65536, marks=pytest.mark.slow)], ids=lambda t: f'{t} steps')
@pytest.mark.parametrize('letters', ['b t h', 'b t h k'])
def test_strong_decays_over_many_steps(letters, t, comparison, monkeypatch):
    case = cases.Case(b=1, t=t, k=8, v=8, heads=(1, 1, 1), decay=letters, strength=25.0)
    monkeypatch.setitem(cases.CASES, 'long', case)
    matrix_state.check(comparison, delta_rule, f'long {letters} {t}', cases.call('long', jnp.bfloat16), case)


@pytest.mark.parametrize('platform', ['cpu', 'tpu'])
@pytest.mark.parametrize(('size', 'most'), [(16, 1.0), (64, 1.0), (64, 2.0)])
def test_inverse_of_keys_alike(size, most, platform):
    """Where powers of the matrix grow: keys that have much in common, betas up to 2."""
    keys = np.random.default_rng(0).standard_normal((size, 32)) + 2
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    strict = np.tril(most * keys @ keys.T, -1)
    expected = np.linalg.inv(np.eye(size) + strict)
    found = inverse(jnp.asarray(strict, jnp.float32), platform)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize('most', [1.0, 2.0])
def test_inverse_in_products_of_parts(most):
    """As kernels for TPUs have it beside products of bfloat16, to less than what those round."""
    keys = np.random.default_rng(0).standard_normal((2, 64, 32)) + np.array([2.0, 0.0])[:, None, None]
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    strict = np.tril(most * keys @ keys.swapaxes(1, 2), -1)
    expected = np.linalg.inv(np.eye(64) + strict)
    cotangent = np.random.default_rng(1).standard_normal(strict.shape)
    transposed = expected.swapaxes(1, 2)
    gradient = np.tril(-transposed @ cotangent @ transposed, -1)
    form, cotangent = Form(jnp.bfloat16, jnp.float32), jnp.asarray(cotangent, jnp.float32)
    found, pull = jax.vjp(lambda strict: inverse_again(strict, None, form), jnp.asarray(strict, jnp.float32))
    again = jax.vjp(lambda strict: inverse_again(strict, found, form), jnp.asarray(strict, jnp.float32))[1]
    for ours, right in ((found, expected), (pull(cotangent)[0], gradient), (again(cotangent)[0], gradient)):
        worst = np.abs(ours - right).max(axis=(1, 2)) / np.abs(right).max(axis=(1, 2))
        assert worst.max() < 2**-12, worst


def test_sums_in_parts_lose_nothing():
    """Of numbers of 24 bits each, some of which would round the others off."""
    which = jnp.tril(jnp.ones((1, 16, 16)))
    array = noise(1, 16, 4, seed=0) * jnp.exp(8 * noise(1, 16, 1, seed=1))
    form = Form(jnp.bfloat16, jnp.float32)
    sums, pull = jax.vjp(lambda array: added_up(which, array, form), array)
    for ours, given in ((sums, array), (pull(sums)[0][:, ::-1], sums[:, ::-1])):
        right = np.cumsum(np.asarray(given, np.float64), axis=1)
        size = np.cumsum(np.abs(np.asarray(given, np.float64)), axis=1)
        assert np.all(np.abs(ours - right) <= 2**-20 * size)


@pytest.mark.parametrize(
    ('heads', 'together'),
    [((4, 4, 4), 4), ((8, 2, 8), 4), ((8, 4, 8), 2), ((1, 1, 4), 4), ((6, 2, 3), 1), ((6, 6, 3), 2), ((3, 3, 3), 1)],
)
def test_heads_of_a_program_share_arrays_or_have_their_own(heads, together):
    h = max(heads)
    assert tiling.heads_tpu(2, h, set(heads), 64, 128, size=2) == together
    assert tiling.heads_tpu(2, h, set(heads), 64, 128, size=4) == min(together, 2), 'VMEM'
    assert tiling.heads_tpu(2, h, set(heads), 256, 256, size=2) == 1, 'VMEM'
    if h == 4:
        assert tiling.heads_tpu(1, h, set(heads), 64, 64, size=2) == 2, 'both cores'


def test_what_a_repeated_key_holds_does_not_grow_in_bfloat16():
    """With strengths near two every write turns the memory around, and so does every chunk, of a sum of ones and twos.

    The inverse rounded to bfloat16 made it grow by half in every chunk.
    """
    key, value = (noise(1, 1, 1, 64, seed=seed) for seed in range(2))
    key = (key / jnp.linalg.norm(key)).astype(jnp.bfloat16)
    beta = jnp.full((1, 512, 1), 1.9993 / jnp.sum(jnp.square(key.astype(jnp.float32))))
    k, v = (jnp.broadcast_to(a, (1, 512, 1, 64)).astype(jnp.bfloat16) for a in (key, value))
    with target.compiling_for(target.interpreted('mosaic_tpu')):
        _, found = delta_rule(k, k, v, beta)
    _, expected = delta_rule(k, k, v, beta, implementation='reference')
    assert np.linalg.norm(found - expected) < np.linalg.norm(expected)


def test_long_keys_where_a_chunk_nearly_decays_away(comparison):
    """Products with later keys, which nothing reads, overflow there; they made the gradients of strengths NaN."""
    t, length = 32, 100.0
    key = noise(1, 1, 1, 16, seed=0)
    key = jnp.broadcast_to(length * key / jnp.linalg.norm(key), (1, t, 1, 16))
    arrays = {
        'q': key / length,
        'k': key,
        'v': noise(1, t, 1, 4, seed=1),
        'beta': jnp.full((1, t, 1), 1 / length**2),
        'log_decay': jnp.full((1, t, 1, 16), -0.999 * 2 * MODERATE / (t - 1)).at[:, 0].set(0),
    }
    comparison.check(delta_rule, 'long keys', Call(arrays, {}), t * 16, implementation='xla')


def test_memory_is_linear_in_length():
    matrix_state.check_memory_is_linear(delta_rule, 'bthk', 'bthk', 'bthk', 'bth', 'bth')


@pytest.mark.slow
@pytest.mark.parametrize('name', ['packed scalar', 'sudden vector'])
def test_twice_the_same_bits(name, comparison):
    comparison.check_same_bits(delta_rule, cases.call(name), 'xla')


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ({'q': jnp.zeros((1, 2, 3))}, ValueError, r'delta_rule: q has shape \(1, 2, 3\); expected b t hq k'),
        ({'k': jnp.zeros((1, 2, 2, 4))}, ValueError, r'k has shape .*; expected b t hk k with b=1, t=2, k=3'),
        ({'v': jnp.zeros((1, 3, 2, 2))}, ValueError, r'v has shape \(1, 3, 2, 2\); expected b t hv v with b=1, t=2'),
        ({'beta': jnp.zeros((1, 2))}, ValueError, r'beta has shape \(1, 2\); expected b t h with b=1, t=2, h=2'),
        ({'beta': jnp.zeros((1, 2, 2), int)}, TypeError, 'beta has type int32 .*; expected a floating-point type'),
        ({'log_decay': jnp.zeros(3)}, ValueError, r'log_decay has shape \(3,\); expected h with h=2'),
        ({'log_decay': jnp.zeros((1, 2))}, ValueError, r'log_decay has shape \(1, 2\); expected b t h k'),
        ({'log_decay': jnp.zeros((1, 2, 2, 2))}, ValueError, r'expected b t h k with b=1, t=2, h=2, k=3'),
        ({'state': jnp.zeros((1, 2, 2, 3))}, ValueError, r'state has shape \(1, 2, 2, 3\); expected b h k v'),
        ({'segments': jnp.zeros((2, 2), jnp.int32)}, ValueError, r'segments has shape \(2, 2\); expected b t'),
        ({'segments': jnp.zeros((1, 2))}, TypeError, 'segments has type float32 .*; expected an integer type'),
        ({'implementation': 'cuda'}, ValueError, "implementation is 'cuda'; expected None or one of"),
        ({'implementation': 'mosaic_tpu'}, NotImplementedError, "'mosaic_tpu' cannot serve: the platform is cpu"),
    ],
)  # fmt: skip
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        delta_rule(**{**cases.call('two').arrays, **arguments})


def test_decays_above_one_are_an_error():
    arrays = cases.call('packed scalar').arrays
    arrays['log_decay'] = arrays['log_decay'].at[0, 1, 0].set(0.5)
    with pytest.raises(ValueError, match=r'delta_rule: log_decay has entries up to 0\.5; expected at most 0'):
        delta_rule(**arrays, implementation='reference')
    with checking_values():
        checked = jax.jit(checkify.checkify(lambda arrays: delta_rule(**arrays)))
        assert 'log_decay has entries up to 0.5; expected at most 0' in checked(arrays)[0].get()


def test_gradients_of_decays_do_not_reach_other_documents():
    """Not even as what rounding leaves of sums that cancel: over a chunk that three documents share."""
    q, k, v, decay = (noise(1, 24, 2, 8, seed=seed) for seed in range(4))
    beta, segments = jnp.full((1, 24, 2), 0.5), jnp.repeat(jnp.array([[1, 2, 3]]), 8, axis=1)

    def second(log_decay):
        out, _ = delta_rule(q, k, v, beta, log_decay, segments=segments, implementation='xla')
        return jnp.sum(out[:, 8:16] * v[:, 8:16])

    gradient = jax.grad(second)(-0.1 * jnp.abs(decay))
    assert jnp.all(gradient[:, :8] == 0) and jnp.all(gradient[:, 16:] == 0) and jnp.any(gradient[:, 8:16] != 0)
