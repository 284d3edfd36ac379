import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from attnlab.testing.tolerances import assert_close
from pallas_kernels import (
    checking_values,
    dispatch,
    linear_attention,
    linear_attention_rows,
    linear_attention_sums,
    target,
    tiling,
)
from pallas_kernels.cases import linear_attention as cases
from tests.kernels import matrix_state

NARROW = ('shared queries and keys', 'packed scalar', 'packed vector', 'strong vector')
SMALL = ('two', 'threes and twos', 'packed constant')
GROUPED = ('no decay', 'constant', 'scalar', 'grouped vector', 'packed scalar', 'sudden vector')
DOCUMENTS = ('packed', 'packed constant', 'packed scalar', 'sudden vector')


def by_hand(q, k, v, state, log_decay=None, segments=None):
    b, t, h = *q.shape[:2], state.shape[1]
    S, o = state.copy(), np.zeros((b, t, h, v.shape[3]))
    for row in range(b):
        for i in range(t):
            new = i > 0 and segments is not None and segments[row, i] != segments[row, i - 1]
            for head in range(h):
                own = {'q': q[row, i, head * q.shape[2] // h], 'k': k[row, i, head * k.shape[2] // h]}
                if new:
                    S[row, head] = 0
                elif log_decay is not None:
                    decay = log_decay[head] if log_decay.ndim == 1 else log_decay[row, i, head]
                    S[row, head] *= np.exp(np.broadcast_to(decay, own['k'].shape))[:, None]
                S[row, head] += np.outer(own['k'], v[row, i, head * v.shape[2] // h])
                o[row, i, head] = S[row, head].T @ own['q'] / np.sqrt(q.shape[3])
    return o, S


ON_TPU = [(name, jnp.float32) for name in ('grouped', 'packed scalar', 'strong vector')]
ON_TPU += [('long', jnp.bfloat16), ('sudden vector', jnp.bfloat16)]
MORE_ON_TPU = [(name, jnp.float32) for name in cases.KERNEL + cases.VECTOR if (name, jnp.float32) not in ON_TPU]
MORE_ON_TPU += [('long vector', jnp.bfloat16), ('long sudden', jnp.float16)]
ON_GPU = [(name, jnp.bfloat16) for name in ('threes and twos of six', 'twos and threes of six', 'wide vector')]
ON_GPU += [('long', jnp.float16)]
SERVED = [('mosaic_tpu', *call) for call in ON_TPU] + [('mosaic_gpu', *call) for call in ON_GPU]
SERVED += [pytest.param('mosaic_tpu', *call, marks=pytest.mark.slow) for call in MORE_ON_TPU]
SERVED += [
    pytest.param('mosaic_gpu', name, dtype, marks=pytest.mark.slow)
    for name in cases.KERNEL + cases.VECTOR
    for dtype in (jnp.bfloat16, jnp.float16)
    # What decays to less than 6e-8 on its way into a product is zero in float16, where the reference has 2e-22.
    if (name, dtype) not in [*ON_GPU, ('strong scalar', jnp.float16), ('long sudden', jnp.float16)]
]


LOWERED = [(64, 'no decay'), (64, 'vector'), (128, 'no decay'), (128, 'scalar'), (128, 'constant, grouped')]


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that a short call has several groups of several chunks."""
    monkeypatch.setattr(tiling, 'linear_attention', lambda *_, vector: tiling.ChunkTile(steps=8, group=16))
    monkeypatch.setattr(tiling, 'linear_attention_tpu', lambda *_, vector: tiling.ChunkTile(steps=32, group=64))


@pytest.mark.parametrize('name', cases.CASES)
def test_reference_is_the_definition(name, in_double):
    with jax.enable_x64(True):
        call = in_double(cases.call(name))
        actual = jax.jit(functools.partial(linear_attention, **call.options, implementation='reference'))(**call.arrays)
        numbers = {name: np.asarray(array) for name, array in {**call.arrays, **call.options}.items()}
        for one, other in zip(actual, by_hand(**numbers), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_numbers_worked_out_by_hand(implementation):
    def steps(*rows):
        return jnp.array(rows, jnp.float32)[None, :, None, :]

    half = jnp.log(jnp.array([[[[1.0, 0.5]], [[0.5, 0.25]]]]))
    o, state = linear_attention(
        steps([1, 2], [1, 1]), steps([1, 0], [3, 1]), steps([10], [1]), half, scale=2.0,
        state=jnp.array([[[[4.0], [8.0]]]]), implementation=implementation,
    )  # fmt: skip
    # S_1 = (4 + 1 * 10, 8 / 2 + 0 * 10) = (14, 4), read by (1, 2): 22.
    # S_2 = (14 / 2 + 3 * 1, 4 / 4 + 1 * 1) = (10, 2), read by (1, 1): 12.
    np.testing.assert_allclose(o[0, :, 0, 0], [44, 24], rtol=1e-6)
    np.testing.assert_allclose(state[0, 0, :, 0], [10, 2], rtol=1e-6)


@pytest.mark.parametrize('name', SMALL)
def test_gradients_of_the_reference_are_differences(name, differences):
    differences(linear_attention, cases.call(name))


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [(name, jnp.float32) for name in cases.CASES] + [(name, jnp.bfloat16) for name in NARROW],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_xla_is_the_reference(name, dtype, comparison):
    matrix_state.check(comparison, linear_attention, name, cases.call(name, dtype), cases.CASES[name])


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
@pytest.mark.parametrize('name', ['grouped', 'packed constant', 'packed scalar', 'sudden vector', 'one'])
def test_sums_are_the_reads_of_a_value_of_one(name, implementation):
    """In value and gradient, from an incoming state; the column of the state too."""
    call = cases.call(name)
    heads = cases.CASES[name].heads
    ones = jnp.ones((*call.arrays['q'].shape[:2], max(heads), 1))
    arrays = {key: value for key, value in call.arrays.items() if key != 'v'}
    arrays['state'] = arrays['state'][..., 0]

    def sums(arrays):
        found, last = linear_attention_sums(**arrays, **call.options, implementation=implementation)
        return jnp.repeat(found, ones.shape[2] // found.shape[2], axis=2), last

    def reads(arrays):
        given = arrays | {'state': arrays['state'][..., None]}
        o, last = linear_attention(**given, v=ones, **call.options, implementation='reference')
        return o[..., 0], last[..., 0]

    def everything(run):
        outputs, pull = jax.vjp(run, arrays)
        return outputs, pull(jax.tree.map(jnp.cos, outputs))

    with jax.default_matmul_precision('highest'):
        found, expected = (jax.jit(everything, static_argnums=0)(run) for run in (sums, reads))
    steps = cases.CASES[name].t * cases.CASES[name].k * cases.CASES[name].b * max(heads)
    for actual, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(actual, wanted, dtype=jnp.float32, reduction=steps, what=name)


ROWS = ('vector', 'strong vector', 'packed vector', 'sudden vector', 'one')


@pytest.mark.parametrize('name', ROWS)
def test_rows_are_read_as_by_definition(name, small_tiles):
    """In value and gradient, from an incoming state, through several groups of chunks."""
    (arrays, options), sizes = _of_rows(name)

    def everything(implementation):
        def run(arrays):
            return linear_attention_rows(**arrays, **options, implementation=implementation)

        outputs, pull = jax.vjp(run, arrays)
        return outputs, pull(jax.tree.map(jnp.cos, outputs))

    with jax.default_matmul_precision('highest'):
        found, expected = (jax.jit(everything, static_argnums=0)(name) for name in ('xla', 'reference'))
    for actual, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(actual, wanted, dtype=jnp.float32, reduction=sizes.t * sizes.k * sizes.b, what=name)


def _of_rows(name):
    """A call of as many heads of all, with queries that have the channels of values."""
    call, case = cases.call(name), cases.CASES[name]
    heads, arrays = max(case.heads), dict(call.arrays)
    for key in ('q', 'k', 'v'):
        arrays[key] = jnp.repeat(arrays[key], heads // arrays[key].shape[2], axis=2)
    arrays['q'] = jnp.cos(arrays['v'][:, ::-1])
    if arrays['log_decay'].ndim < 4:
        arrays['log_decay'] = jnp.broadcast_to(arrays['log_decay'][..., None], arrays['k'].shape)
    return (arrays, call.options), case


def test_rows_by_hand():
    """Two steps of two rows with decays of their own, in both forms, and a step alone."""

    def steps(*rows):
        return jnp.array(rows, jnp.float32)[None, :, None]

    arrays = {'q': steps([2], [3]), 'k': steps([1, 0], [3, 1]), 'v': steps([10], [1])}
    decay = jnp.log(steps([0.5, 0.25], [0.5, 0.5]))
    start = jnp.array([[[[4.0], [8.0]]]])
    # S_1 = (4 / 2 + 1 * 10, 8 / 4 + 0 * 10) = (12, 2), times 2; S_2 = (12 / 2 + 3, 2 / 2 + 1) = (9, 2), times 3.
    for implementation in ('reference', 'xla'):
        o, state = linear_attention_rows(**arrays, log_decay=decay, state=start, implementation=implementation)
        np.testing.assert_allclose(o[0, :, 0], [[24, 4], [27, 6]], rtol=1e-6)
        np.testing.assert_allclose(state[0, 0, :, 0], [9, 2], rtol=1e-6)
        first = {key: array[:, :1] for key, array in arrays.items()}
        o, state = linear_attention_rows(**first, log_decay=decay[:, :1], state=start, implementation=implementation)
        np.testing.assert_allclose((o[0, 0, 0], state[0, 0, :, 0]), ([24, 4], [12, 2]), rtol=1e-6)
    with pytest.raises(NotImplementedError, match='no mosaic_gpu form of linear_attention_rows'):
        linear_attention_rows(**arrays, log_decay=decay, implementation='mosaic_gpu')
    with pytest.raises(ValueError, match='log_decay'):
        linear_attention_rows(**arrays, log_decay=decay[..., 0])


@pytest.mark.parametrize('name', GROUPED)
def test_groups_of_chunks_are_the_reference(name, small_tiles, comparison):
    matrix_state.check(comparison, linear_attention, name, cases.call(name), cases.CASES[name])


@pytest.mark.parametrize(
    ('implementation', 'name', 'dtype'), SERVED, ids=lambda value: value if isinstance(value, str) else value.__name__
)
def test_kernels_are_the_reference(implementation, name, dtype, small_tiles, comparison):
    matrix_state.check_kernel(
        comparison, linear_attention, implementation, name, cases.call(name, dtype), cases.CASES[name]
    )


@pytest.mark.parametrize('name', ['long', 'long vector'])
def test_kernels_for_tpus_are_the_reference_in_tiles_of_their_size(name, comparison):
    matrix_state.check_kernel(comparison, linear_attention, 'mosaic_tpu', name, cases.call(name), cases.CASES[name])


@pytest.mark.parametrize(
    'name',
    [
        'k=64, scalar',
        'k=128, vector',
        *(pytest.param(f'k={k}, {kind}', marks=pytest.mark.slow) for k, kind in LOWERED),
    ],
)
def test_kernels_for_gpus_are_lowered_at_the_size_of_models(name):
    def both(arrays):
        found, pull = jax.vjp(lambda arrays: linear_attention(**arrays), arrays)
        return found, pull(found)

    with target.compiling_for(target.H100), dispatch.ledger() as entries:
        lowered = jax.jit(both).trace(cases.real()[name].arrays).lower(lowering_platforms=('cuda',))
    assert [entry.implementation for entry in entries] == ['mosaic_gpu']
    # Forward: states and outputs. Backward: states again, their gradients, and those of q, and of k and v, together
    # where q has no more heads than k. With decays of key channels the weights of chunks come first, both times, and
    # those of q and k come after gradients of weights, of steps and of states.
    expected = 10 if 'vector' in name else 7 if 'grouped' in name else 6
    assert lowered.as_text().count('@mosaic_gpu') == expected


@pytest.mark.parametrize('decay', ['b t h', pytest.param('b t h k', marks=pytest.mark.slow)])
def test_values_of_any_width_fit_the_memory_of_a_gpu(decay):
    arrays = cases.draw('wide', cases.Case(b=1, t=64, k=64, v=1024, heads=(1, 1, 1), decay=decay), jnp.bfloat16).arrays

    def gradients(arrays):
        return jax.grad(lambda arrays: jnp.sum(linear_attention(**arrays)[0].astype(jnp.float32)))(arrays)

    with target.compiling_for(target.H100):
        jax.jit(gradients).trace(arrays).lower(lowering_platforms=('cuda',))


@pytest.mark.parametrize('t', [1000, pytest.param(65536, marks=pytest.mark.slow)])
@pytest.mark.parametrize('name', ['strong scalar', 'strong vector', 'sudden scalar', 'sudden vector'])
def test_decays_down_to_nothing_over_long_sequences(name, t, comparison):
    case = dataclasses.replace(cases.CASES[name], b=1, t=t, heads=(1, 1, 1), documents=None)
    call = cases.draw(name, case, jnp.bfloat16)
    assert call.arrays['log_decay'].min() < -49
    matrix_state.check(comparison, linear_attention, f'{name} over {t}', call, case)


@pytest.mark.parametrize(
    ('implementation', 'decay'),
    [
        ('xla', 'b t h k'),
        ('mosaic_tpu', 'b t h'),
        pytest.param('xla', 'b t h', marks=pytest.mark.slow),
        pytest.param('mosaic_tpu', 'b t h k', marks=pytest.mark.slow),
    ],
)
def test_where_everything_is_forgotten_nothing_overflows(implementation, decay, comparison):
    case = cases.Case(b=1, t=37, k=8, v=8, heads=(1, 1, 1), decay=decay)
    call = cases.draw('forgotten', case)
    call.arrays['log_decay'] = jnp.full_like(call.arrays['log_decay'], -1e4)
    found = comparison.evaluate(linear_attention, call, implementation)
    assert all(np.isfinite(array).all() for array in found.values())
    q, k, v = (np.asarray(call.arrays[name], np.float64) for name in 'qkv')
    own = np.einsum('bthk,bthk->bth', q, k)[..., None] * v / np.sqrt(8)
    assert_close(found['output 0'], own, dtype=jnp.float32, reduction=8, what='o')


def test_the_vector_form_with_one_decay_for_all_channels_is_the_scalar_reference(comparison):
    matrix_state.check_one_decay_for_all_channels(comparison, linear_attention, cases)


@pytest.mark.parametrize(('decay', 'cuts'), [('scalar', (1,)), ('scalar', (5, 32)), ('vector', (32,))])
def test_pieces_are_the_whole_forward_and_backward(decay, cuts, comparison):
    matrix_state.check_pieces(comparison, linear_attention, cases, decay, cuts)


@pytest.mark.parametrize('name', ['scalar', 'sudden vector'])
def test_under_vmap_and_remat(name, comparison):
    matrix_state.check_vmap_and_remat(comparison, linear_attention, cases, name)


@pytest.mark.parametrize('name', DOCUMENTS)
def test_nothing_passes_between_documents_or_from_the_future(name):
    matrix_state.check_reach(linear_attention, cases.call(name), (4, 31, 32, 40, 66), 'xla')


@pytest.mark.parametrize('name', ['packed scalar', 'sudden vector'])
def test_nothing_passes_between_documents_in_kernels_for_tpus(name, small_tiles):
    matrix_state.check_reach(linear_attention, cases.call(name), (32, 40), 'mosaic_tpu')


@pytest.mark.slow
@pytest.mark.parametrize('name', ['packed scalar', 'sudden vector'])
def test_nothing_passes_between_documents_in_kernels_for_gpus(name):
    matrix_state.check_reach(linear_attention, cases.call(name, jnp.bfloat16), (32, 40), 'mosaic_gpu')


@pytest.mark.slow
@pytest.mark.usefixtures('watched_for_races')
@pytest.mark.parametrize(
    ('k', 'v', 't', 'decay'),
    [(8, 200, 330, 'b t h'), (136, 150, 330, 'b t h'), (8, 200, 70, 'b t h k')],
    ids=['together', 'apart', 'vector'],
)
def test_copies_and_products_do_not_race(k, v, t, decay, comparison):
    """Slots are refilled, by chunks and by channels; gradients of keys and values are in one kernel or in two."""
    case = cases.Case(b=1, t=t, k=k, v=v, heads=(1, 1, 2), decay=decay)
    call = cases.draw('refilled', case, jnp.bfloat16)
    matrix_state.check_kernel(comparison, linear_attention, 'mosaic_gpu', f'refilled, k={k}, {decay}', call, case)


@pytest.mark.parametrize('decay', [None, 'scalar', 'vector'])
def test_no_steps_at_all(decay):
    matrix_state.check_no_steps(linear_attention, cases.call('no decay' if decay is None else decay))


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_types_and_defaults(implementation):
    matrix_state.check_types_and_defaults(linear_attention, cases, implementation)


@pytest.mark.parametrize('decay', [None, 'scalar', 'vector'])
def test_the_forward_pass_takes_a_quarter_of_the_memory_of_the_definition(decay):
    q = jax.ShapeDtypeStruct((4, 2048, 4, 64), jnp.float32)
    decays = {None: None, 'scalar': jax.ShapeDtypeStruct(q.shape[:3], jnp.float32), 'vector': q}

    def bytes_of(implementation):
        run = jax.jit(functools.partial(linear_attention, implementation=implementation))
        return run.lower(q, q, q, decays[decay]).compile().memory_analysis().temp_size_in_bytes

    assert 4 * bytes_of('xla') < bytes_of('reference')


def test_memory_is_linear_in_length():
    matrix_state.check_memory_is_linear(linear_attention, 'bthk', 'bthk', 'bthk', 'bth')


@pytest.mark.parametrize('name', ['packed scalar', 'sudden vector'])
def test_twice_the_same_bits(name, comparison):
    comparison.check_same_bits(linear_attention, cases.call(name), 'xla')


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ({'q': jnp.zeros((1, 2, 3))}, ValueError, r'linear_attention: q has shape \(1, 2, 3\); expected b t hq k'),
        ({'k': jnp.zeros((1, 2, 2, 4))}, ValueError, r'k has shape .*; expected b t hk k with b=1, t=2, k=3'),
        ({'v': jnp.zeros((1, 3, 2, 2))}, ValueError, r'v has shape \(1, 3, 2, 2\); expected b t hv v with b=1, t=2'),
        ({'v': jnp.zeros((1, 2, 3, 2)), 'state': None}, ValueError, 'q has 2 heads; expected a divisor of the 3 heads'),
        ({'log_decay': jnp.zeros(3)}, ValueError, r'log_decay has shape \(3,\); expected h with h=2'),
        ({'log_decay': jnp.zeros((1, 2))}, ValueError, r'log_decay has shape \(1, 2\); expected b t h k'),
        ({'log_decay': jnp.zeros((1, 2, 2, 2))}, ValueError, r'expected b t h k with b=1, t=2, h=2, k=3'),
        ({'state': jnp.zeros((1, 2, 2, 3))}, ValueError, r'state has shape \(1, 2, 2, 3\); expected b h k v'),
        ({'segments': jnp.zeros((2, 2), jnp.int32)}, ValueError, r'segments has shape \(2, 2\); expected b t'),
        ({'segments': jnp.zeros((1, 2))}, TypeError, 'segments has type float32 .*; expected an integer type'),
        ({'q': jnp.zeros((1, 2, 2, 3), int)}, TypeError, 'q has type int32 .*; expected a floating-point type'),
        ({'implementation': 'cuda'}, ValueError, "implementation is 'cuda'; expected None or one of"),
        ({'implementation': 'mosaic_tpu'}, NotImplementedError, "'mosaic_tpu' cannot serve: the platform is cpu"),
    ],
)  # fmt: skip
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        linear_attention(**{**cases.call('two').arrays, **arguments})


@pytest.mark.parametrize(
    ('here', 'name', 'dtype', 'message'),
    [
        (target.H100, 'scalar', jnp.float32, 'q, k and v have type float32, .* expected bfloat16 or float16'),
        (dataclasses.replace(target.H100, capability='8.0'), 'scalar', jnp.bfloat16, r'expected 9\.0'),
        (target.H100, 'most keys', jnp.bfloat16, 'have 4097 channels; expected at most 4096 with decays of their own'),
        (target.TPU_V5E, 'huge', jnp.float32, 'a state has 1024 x 1024 numbers; expected at most 262144'),
        (target.TPU_V5E, 'wide keys alone', jnp.float32, 'q and k have 8192 channels; expected at most 4096'),
        (target.TPU_V5E, 'wide values alone', jnp.float32, 'v has 8192 channels; expected at most 4096'),
        (target.TPU_V5E, 'keys that decay', jnp.float32, 'q and k have 2049 channels; expected at most 2048'),
    ],
)
def test_refusals(here, name, dtype, message):
    sizes = {
        'huge': cases.Case(b=1, t=2, k=1024, v=1024),
        'wide keys alone': cases.Case(b=1, t=2, k=8192, v=8),
        'wide values alone': cases.Case(b=1, t=2, k=8, v=8192),
        'most keys': cases.Case(b=1, t=2, k=4097, v=1, heads=(1, 1, 1), decay='b t h k'),
        'keys that decay': cases.Case(b=1, t=2, k=2049, v=1, heads=(1, 1, 1), decay='b t h k'),
    }
    call = cases.draw(name, (cases.CASES | sizes)[name], dtype)
    implementation = 'mosaic_gpu' if here.platform == 'gpu' else 'mosaic_tpu'
    with target.compiling_for(here), pytest.raises(NotImplementedError, match=message):
        linear_attention(**call.arrays, implementation=implementation)


def test_decays_above_one_are_an_error():
    arrays = cases.call('scalar').arrays
    arrays['log_decay'] = arrays['log_decay'].at[0, 3, 1].set(0.5)
    with pytest.raises(ValueError, match=r'linear_attention: log_decay has entries up to 0\.5; expected at most 0'):
        linear_attention(**arrays, implementation='reference')
    with checking_values():
        checked = jax.jit(checkify.checkify(lambda arrays: linear_attention(**arrays)))
        assert 'log_decay has entries up to 0.5; expected at most 0' in checked(arrays)[0].get()
        arrays['log_decay'] = jnp.minimum(arrays['log_decay'], 0)
        assert checked(arrays)[0].get() is None
