import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, linear_scan, target, tiling
from pallas_kernels.cases import linear_scan as cases

NARROW = ('prime', 'constant', 'packed, reverse')
SMALL = ('two', 'packed', 'packed, reverse', 'complex', 'complex decay', 'complex input')


def by_hand(x, decay, state, *, reverse, segments=None):
    b, t, d = x.shape
    decay = np.broadcast_to(decay, x.shape)
    h, outputs = state.copy(), np.zeros(x.shape, np.result_type(x, decay, state))
    order = list(range(t))[::-1] if reverse else list(range(t))
    for row in range(b):
        before = None
        for i in order:
            for channel in range(d):
                past = state[row, channel] if before is None else outputs[row, before, channel]
                if before is not None and segments is not None and segments[row, before] != segments[row, i]:
                    past = 0
                outputs[row, i, channel] = decay[row, i, channel] * past + x[row, i, channel]
            before = i
    return outputs, h if t == 0 else outputs[:, order[-1]]


@pytest.mark.parametrize('name', cases.CASES)
def test_reference_is_the_definition(name, in_double):
    with jax.enable_x64(True):
        call = in_double(cases.call(name))
        actual = linear_scan(**call.arrays, **call.options, implementation='reference')
        expected = by_hand(
            **{name: np.asarray(array) for name, array in call.arrays.items()},
            reverse=call.options['reverse'],
            segments=np.asarray(call.options['segments']) if 'segments' in call.options else None,
        )
        for one, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-13)


def test_numbers_worked_out_by_hand():
    x, decay = jnp.array([[[1.0], [2.0], [3.0]]]), jnp.array([0.5])
    for implementation in ('reference', 'xla'):
        h, final = linear_scan(x, decay, state=jnp.array([[4.0]]), implementation=implementation)
        np.testing.assert_array_equal(h[0, :, 0], [3, 3.5, 4.75])
        assert final[0, 0] == 4.75
        h, final = linear_scan(
            x,
            decay,
            state=jnp.array([[4.0]]),
            segments=jnp.array([[1, 1, 2]]),
            reverse=True,
            implementation=implementation,
        )
        np.testing.assert_array_equal(h[0, :, 0], [2, 2, 5])
        assert final[0, 0] == 2


@pytest.mark.parametrize('name', SMALL)
def test_gradients_of_the_reference_are_differences(name, differences):
    differences(linear_scan, cases.call(name))


@pytest.mark.parametrize('path', ['in order', 'in parallel'])
@pytest.mark.parametrize(
    ('name', 'dtype'),
    [(name, jnp.float32) for name in cases.CASES] + [(name, jnp.bfloat16) for name in NARROW],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_xla_is_the_reference(name, dtype, path, comparison, monkeypatch):
    taken = []

    def tile(t, platform):
        taken.append(t)
        return tiling.ScanTile(8) if path == 'in order' else None

    monkeypatch.setattr(tiling, 'linear_scan', tile)
    case = cases.CASES[name]
    call = cases.call(name, dtype)
    comparison.check(linear_scan, name, call, case.t, implementation='xla', decay=case.b * case.t * case.d)
    assert taken


@pytest.fixture
def small_tiles(monkeypatch):
    """Kernels with several tiles of time and channels in a small call."""
    monkeypatch.setattr(tiling, 'linear_scan_tpu', lambda t, d, numbers: tiling.StreamTile(rows=16, channels=128))


@pytest.mark.parametrize('implementation', dispatch.PLATFORM)
@pytest.mark.parametrize(
    ('name', 'dtype'),
    [
        ('packed, reverse', jnp.bfloat16),
        ('complex', jnp.float32),
        *(pytest.param(name, jnp.float32, marks=pytest.mark.slow) for name in cases.KERNEL if name != 'complex'),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_kernels_are_the_reference(name, dtype, implementation, comparison, small_tiles):
    case = cases.CASES[name]
    call = cases.call(name, dtype)
    comparison.check(linear_scan, name, call, case.t, implementation=implementation, decay=case.b * case.t * case.d)


@pytest.mark.parametrize(
    'name',
    ['packed', *(pytest.param(name, marks=pytest.mark.slow) for name in ('one decay', 'packed, reverse', 'complex'))],
)
def test_spans_of_time_are_the_whole(name, comparison, monkeypatch):
    monkeypatch.setattr(tiling, 'linear_scan_gpu', lambda b, t, blocks, row: tiling.SpanTile(rows=8, spans=t // 8))
    case = cases.CASES[name]
    call = cases.call(name)
    comparison.check(linear_scan, name, call, case.t, implementation='mosaic_gpu', decay=case.b * case.t * case.d)


@pytest.mark.parametrize('name', cases.real())
def test_kernels_lower_for_a_gpu_that_is_not_there(name, lowered_for_gpu):
    lowered = lowered_for_gpu(linear_scan, cases.real()[name])
    assert [entry[:3] for entry in lowered.entries] == [('linear_scan', 'mosaic_gpu', ())]
    assert lowered.kernels()


@pytest.mark.parametrize(
    ('b', 't', 'blocks', 'row', 'expected'),
    [
        (4, 8192, 16, 512, tiling.SpanTile(rows=32, spans=1)),
        (4, 8192, 16, 768, tiling.SpanTile(rows=16, spans=1)),
        (1, 8192, 16, 512, tiling.SpanTile(rows=32, spans=8)),
        (1, 8, 16, 2048, tiling.SpanTile(rows=8, spans=1)),
        (1, 520, 16, 512, tiling.SpanTile(rows=8, spans=1)),
    ],
)
def test_few_programs_cut_time_into_spans(b, t, blocks, row, expected):
    assert tiling.linear_scan_gpu(b, t, blocks, row) == expected


@pytest.mark.parametrize(
    ('t', 'd', 'numbers', 'expected'),
    [
        (8192, 2048, 1, tiling.StreamTile(rows=512, channels=512)),
        (8192, 384, 1, tiling.StreamTile(rows=672, channels=384)),
        (8192, 2048, 2, tiling.StreamTile(rows=512, channels=256)),
        (37, 5, 1, tiling.StreamTile(rows=48, channels=128)),
    ],
)
def test_a_block_on_a_tpu_has_whole_groups_of_steps(t, d, numbers, expected):
    assert tiling.linear_scan_tpu(t, d, numbers) == expected


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16, jnp.float32])
def test_outputs_have_the_type_of_x_and_the_state_is_wide(implementation, dtype):
    x = jnp.ones((1, 3, 2), dtype)
    h, final = linear_scan(x, x / 2, implementation=implementation)
    assert h.dtype == dtype
    assert final.dtype == jnp.float32
    h, final = linear_scan(x, (x / 2).astype(jnp.complex64), implementation=implementation)
    assert h.dtype == final.dtype == jnp.complex64


@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize('cuts', [(1,), (13, 29)])
def test_pieces_are_the_whole_forward_and_backward(cuts, reverse, comparison):
    call = cases.call('reverse' if reverse else 'prime')
    pieces = list(zip((0, *cuts), (*cuts, 37), strict=True))

    def in_pieces(x, decay, state, *, reverse, implementation):
        if implementation == 'reference':
            return linear_scan(x, decay, state=state, reverse=reverse, implementation=implementation)
        outputs = {}
        for start, end in pieces[::-1] if reverse else pieces:
            outputs[start], state = linear_scan(
                x[:, start:end], decay[:, start:end], state=state, reverse=reverse, implementation='xla'
            )
        return jnp.concatenate([outputs[start] for start, _ in pieces], axis=1), state

    comparison.check(in_pieces, f'pieces {cuts}', call, 37, implementation='xla')


def test_no_steps_at_all():
    x, state = jnp.zeros((2, 0, 3)), jnp.arange(6.0).reshape(2, 3)
    for implementation in ('reference', 'xla'):
        (h, final), pull = jax.vjp(
            lambda x, state: linear_scan(x, x, state=state, implementation=implementation),  # noqa: B023
            x,
            state,
        )
        assert h.shape == (2, 0, 3)
        np.testing.assert_array_equal(final, state)
        np.testing.assert_array_equal(pull((h, state))[1], state)


def test_a_document_of_one_token_each_forgets_everything():
    x = jnp.arange(1.0, 13).reshape(1, 12, 1)
    segments = jnp.arange(1, 13)[None]
    # An infinite past would be seen even through a decay of zero.
    h, _ = linear_scan(x, jnp.ones(1), state=jnp.zeros((1, 1)), segments=segments, implementation='xla')
    np.testing.assert_array_equal(h, x)


def test_under_vmap_and_remat(comparison):
    call = cases.call('prime')

    def mapped(x, decay, state, *, reverse, implementation):
        if implementation == 'reference':
            return linear_scan(x, decay, state=state, reverse=reverse, implementation=implementation)
        row = jax.checkpoint(
            lambda x, decay, state: linear_scan(
                x[None], decay[None], state=state[None], reverse=reverse, implementation=implementation
            )
        )
        return jax.tree.map(lambda array: array[:, 0], jax.vmap(row)(x, decay, state))

    comparison.check(mapped, 'mapped', call, 37, implementation='xla')


@pytest.mark.parametrize(
    'implementation', ['xla', *(pytest.param(name, marks=pytest.mark.slow) for name in dispatch.PLATFORM)]
)
def test_twice_the_same_bits(implementation, comparison):
    call = cases.call('packed')
    comparison.check_same_bits(linear_scan, call, implementation)


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ({'x': jnp.zeros((2, 3))}, ValueError, r'linear_scan: x has shape \(2, 3\); expected b t d'),
        ({'decay': jnp.zeros((2, 4, 5))}, ValueError, r'decay has shape \(2, 4, 5\); .* with b=2, t=3, d=5'),
        ({'decay': jnp.zeros((1, 2, 3, 5))}, ValueError, r'decay has shape \(1, 2, 3, 5\)'),
        ({'state': jnp.zeros((2, 4))}, ValueError, r'state has shape \(2, 4\); expected b d with b=2, d=5'),
        (
            {'segments': jnp.zeros((2, 4), jnp.int32)},
            ValueError,
            r'segments has shape \(2, 4\); expected b t with b=2, t=3',
        ),
        (
            {'segments': jnp.zeros((2, 3))},
            TypeError,
            'segments has type float32 and shape .*; expected an integer type',
        ),
        (
            {'x': jnp.zeros((2, 3, 5), jnp.int32)},
            TypeError,
            'x has type int32 and shape .*; expected a floating-point or complex',
        ),
        ({'implementation': 'triton'}, ValueError, "implementation is 'triton'; expected None or one of"),
        (
            {'implementation': 'mosaic_tpu'},
            NotImplementedError,
            "'mosaic_tpu' cannot serve: the platform is cpu",
        ),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        linear_scan(**{'x': jnp.zeros((2, 3, 5)), 'decay': jnp.zeros(5), **arguments})


@pytest.mark.parametrize('implementation', dispatch.PLATFORM)
@pytest.mark.parametrize(
    ('x', 'message'),
    [
        (jnp.zeros((2, 0, 5)), r'x has shape \(2, 0, 5\); expected no dimension of size zero'),
        (np.zeros((2, 3, 5)), 'computed in float64; expected operands of at most float32 or complex64'),
    ],
)
def test_kernels_refuse(x, message, implementation):
    with (
        jax.enable_x64(True),
        target.compiling_for(target.interpreted(implementation)),
        pytest.raises(NotImplementedError, match=message),
    ):
        linear_scan(jnp.asarray(x), jnp.zeros(5, jnp.float32), implementation=implementation)
