import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.testing.noise import noise
from pallas_kernels import dispatch, selective_scan, target, tiling
from pallas_kernels.cases import selective_scan as cases
from pallas_kernels.tiling import ScanTile, SpanTile

NARROW = ('prime', 'packed')
A100 = target.Target('gpu', 'NVIDIA A100-SXM4-80GB', '8.0')


@pytest.fixture(params=['in order', 'at once'])
def steps(request, monkeypatch):
    """The two portable forms, by the device that calls are traced for; that of GPUs in chunks of 16 steps."""
    monkeypatch.setattr(tiling, 'selective_scan_at_once', lambda t, numbers: ScanTile(steps=max(1, min(16, t))))
    with target.compiling_for(A100) if request.param == 'at once' else contextlib.nullcontext():
        yield request.param


def by_hand(x, dt, A, B, C, D, state, segments=None):
    y = np.zeros(x.shape)
    state = state.copy()
    for row in range(x.shape[0]):
        for t in range(x.shape[1]):
            if t > 0 and segments is not None and segments[row, t] != segments[row, t - 1]:
                state[row] = 0
            for channel in range(x.shape[2]):
                for n in range(A.shape[1]):
                    past = np.exp(dt[row, t, channel] * A[channel, n]) * state[row, channel, n]
                    state[row, channel, n] = past + dt[row, t, channel] * x[row, t, channel] * B[row, t, n]
                    y[row, t, channel] += state[row, channel, n] * C[row, t, n]
                y[row, t, channel] += D[channel] * x[row, t, channel]
    return y, state


@pytest.mark.parametrize('name', cases.CASES)
def test_reference_is_the_definition(name, in_double):
    with jax.enable_x64(True):
        call = in_double(cases.call(name))
        actual = selective_scan(**call.arrays, **call.options, implementation='reference')
        numbers = {name: np.asarray(array) for name, array in {**call.arrays, **call.options}.items()}
        for one, other in zip(actual, by_hand(**numbers), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_numbers_worked_out_by_hand(implementation):
    def column(*numbers):
        return jnp.array(numbers)[None, :, None]

    half = -jnp.log(2.0)[None, None]  # A step of one halves the state, a step of two quarters it.
    y, state = selective_scan(
        column(1.0, 3.0), column(2.0, 1.0), half, column(5.0, 1.0), column(1.0, 10.0), jnp.array([100.0]),
        state=jnp.array([[[8.0]]]), implementation=implementation,
    )  # fmt: skip
    # 8 / 4 + 2 * 1 * 5 = 12, then 12 / 2 + 1 * 3 * 1 = 9.
    np.testing.assert_allclose(y[0, :, 0], [12 + 100, 90 + 300], rtol=1e-6)
    np.testing.assert_allclose(state, [[[9.0]]], rtol=1e-6)


@pytest.mark.parametrize('name', ['two', 'packed'])
def test_gradients_of_the_reference_are_differences(name, differences):
    differences(selective_scan, cases.call(name))


@pytest.mark.usefixtures('steps')
@pytest.mark.parametrize(
    ('name', 'dtype'),
    [(name, jnp.float32) for name in cases.CASES] + [(name, jnp.bfloat16) for name in NARROW],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_xla_is_the_reference(name, dtype, comparison):
    case = cases.CASES[name]
    everything = case.b * case.t * case.n
    call = cases.call(name, dtype)
    comparison.check(selective_scan, name, call, case.t * case.n, implementation='xla', A=everything, D=everything)


@pytest.mark.parametrize('name', NARROW)
def test_all_rows_at_a_step_are_the_reference(name, comparison):
    case, call = cases.CASES[name], cases.call(name)
    everything = case.b * case.t * case.n
    with target.compiling_for(target.TPU_V5E):
        comparison.check(selective_scan, name, call, case.t * case.n, implementation='xla', A=everything, D=everything)


@pytest.mark.parametrize(('name', 'dtype'), [('prime', jnp.float32), ('packed', jnp.float32), ('packed', jnp.bfloat16)])
def test_one_chunk_at_once_is_the_reference(name, dtype, comparison):
    case, call = cases.CASES[name], cases.call(name, dtype)
    assert tiling.selective_scan_at_once(case.t, case.b * case.d * case.n).steps == case.t
    everything = case.b * case.t * case.n
    with target.compiling_for(A100):
        comparison.check(selective_scan, name, call, case.t * case.n, implementation='xla', A=everything, D=everything)


@pytest.mark.usefixtures('steps')
@pytest.mark.parametrize('name', NARROW)
def test_xla_in_double_is_the_reference(name, in_double, comparison):
    with jax.enable_x64(True):
        call = in_double(cases.call(name))
        found, expected = (comparison.evaluate(selective_scan, call, form) for form in ('xla', 'reference'))
        for what, array in found.items():
            assert array.dtype == np.float64, what
            np.testing.assert_allclose(array, expected[what], rtol=1e-11, atol=1e-11, err_msg=what)


@pytest.mark.usefixtures('steps')
def test_gradients_have_the_types_of_operands(comparison):
    call = cases.call('packed')
    narrow = {name: array.astype(jnp.bfloat16) for name, array in call.arrays.items()}
    found = comparison.evaluate(selective_scan, call._replace(arrays=narrow), 'xla')
    assert [found[f'gradient of {name}'].dtype for name in narrow] == [jnp.bfloat16] * len(narrow)
    assert found['output 1'].dtype == np.float32


def test_the_gradient_of_rates_of_16_bits_is_rounded_after_the_sum_over_rows():
    x, dt, B, C = (1 + noise(256, 3, size, seed=place) for place, size in enumerate((8, 8, 4, 4)))
    A = -jnp.exp(noise(8, 4)).astype(jnp.bfloat16)

    def gradient(A):
        (y, _), pull = jax.vjp(lambda A: selective_scan(x, jnp.abs(dt), A, B, C, implementation='xla'), A)
        return pull((y, jnp.zeros((256, 8, 4))))[0]

    found, exact = gradient(A), gradient(A.astype(jnp.float32))
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=2**-8)


def trips(jaxpr):
    """The iterations of the loops in a program, inner ones as often as they run."""
    found = 0
    for equation in getattr(jaxpr, 'jaxpr', jaxpr).eqns:
        inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda value: hasattr(value, 'eqns'))
        within = sum(trips(value) for value in inner if hasattr(value, 'eqns'))
        found += equation.params['length'] * (1 + within) if equation.primitive.name == 'scan' else within
    return found


def loops(jaxpr):
    """The lengths of the loops of a program, the outer ones alone."""
    for equation in getattr(jaxpr, 'jaxpr', jaxpr).eqns:
        if equation.primitive.name == 'scan':
            yield equation.params['length']
        else:
            inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda value: hasattr(value, 'eqns'))
            yield from (length for value in inner if hasattr(value, 'eqns') for length in loops(value))


def both_ways(arrays, options):
    outputs, pull = jax.vjp(lambda arrays: selective_scan(**arrays, **options, implementation='xla'), arrays)
    return pull(outputs)


def test_a_cpu_takes_rows_one_after_another_and_has_no_reductions_in_a_step():
    case, call = cases.CASES['packed'], cases.call('packed')
    on_cpu = jax.make_jaxpr(lambda: both_ways(call.arrays, call.options))()
    assert set(loops(on_cpu)) == {case.b}
    assert 'reduce_sum[axes=(1,)' not in str(on_cpu)
    with target.compiling_for(target.TPU_V5E):
        on_tpu = jax.make_jaxpr(lambda: both_ways(call.arrays, call.options))()
    assert case.b not in set(loops(on_tpu))
    assert 'reduce_sum[axes=(1,)' in str(on_tpu)


@pytest.mark.parametrize('name', cases.real())
def test_gpus_have_no_loop_over_steps(name):
    call = cases.real()[name]
    b, t, d = call.arrays['x'].shape
    steps = tiling.selective_scan_at_once(t, b * d * call.arrays['A'].shape[1]).steps

    found = {}
    for here in (A100, target.Target('cpu', 'cpu')):
        with target.compiling_for(here):
            # A function of its own for each, as a trace is kept for the next call of the same.
            jaxpr = jax.make_jaxpr(lambda *given: both_ways(*given))(call.arrays, call.options)
        found[here.platform] = trips(jaxpr)
    assert steps >= 32
    assert found['gpu'] == 2 * t // steps
    assert found['cpu'] > 3 * t


def test_a_gradient_is_that_of_the_form_that_ran_wherever_it_is_traced(monkeypatch):
    monkeypatch.setattr(tiling, 'selective_scan_at_once', lambda t, numbers: ScanTile(steps=16))
    call = cases.call('packed')

    def run(arrays):
        return selective_scan(**arrays, **call.options, implementation='xla')

    with target.compiling_for(A100):
        outputs, pull = jax.vjp(run, call.arrays)
    expected = jax.vjp(run, call.arrays)[1](outputs)[0]
    for name, gradient in pull(outputs)[0].items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(('steps', 'barriers'), [(131, 1), (32, 0)])
def test_states_of_a_single_chunk_are_not_kept(steps, barriers, monkeypatch):
    """Compiled for an H100, eight such calls in a row keep seven arrays of states without the barrier, with it none."""
    monkeypatch.setattr(tiling, 'selective_scan_at_once', lambda t, numbers: ScanTile(steps=steps))
    call = cases.call('long and wide')
    with target.compiling_for(A100):
        outputs, pull = jax.vjp(lambda arrays: selective_scan(**arrays, implementation='xla'), call.arrays)
        assert str(jax.make_jaxpr(pull)(outputs)).count('optimization_barrier') == barriers


@pytest.mark.parametrize(
    ('t', 'numbers', 'steps'),
    [
        (8192, 2 * 2048 * 16, 256),
        (8191, 2 * 2048 * 16, 256),
        (300, 2 * 2048 * 16, 150),  # Two equal chunks.
        (8192, 64 * 2048 * 16, 32),
        (20, 64 * 2048 * 16, 20),
        (0, 2048, 1),
        (100, 0, 100),
    ],
)
def test_chunks_fill_a_gpu_and_little_memory(t, numbers, steps):
    assert tiling.selective_scan_at_once(t, numbers) == ScanTile(steps=steps)


@pytest.mark.parametrize('implementation', dispatch.PLATFORM)
@pytest.mark.parametrize(
    ('name', 'dtype'),
    [
        ('packed', jnp.float32),
        *(pytest.param(name, jnp.float32, marks=pytest.mark.slow) for name in cases.KERNEL if name != 'packed'),
        pytest.param('packed', jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param('prime', jnp.float16, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_kernels_are_the_reference(name, dtype, implementation, comparison, monkeypatch):
    monkeypatch.setattr(tiling, 'selective_scan_tpu', lambda d, n: 128)  # Several tiles of channels in a small call.
    case = cases.CASES[name]
    everything = case.b * case.t * case.n
    comparison.check(
        selective_scan,
        name,
        cases.call(name, dtype),
        case.t * case.n,
        implementation=implementation,
        A=everything,
        D=everything,
        B=case.t * case.d,
        C=case.t * case.d,
    )


@pytest.mark.parametrize(
    ('name', 'rows', 'spans'),
    [
        ('packed', 16, 5),  # Spans of 16 steps: documents start at steps 32 and 64, and at 5, 33 and 45.
        pytest.param('prime', 8, 2, marks=pytest.mark.slow),
        pytest.param('packed', 8, 3, marks=pytest.mark.slow),
        pytest.param('long and wide', 16, 4, marks=pytest.mark.slow),
        pytest.param('many numbers', 8, 2, marks=pytest.mark.slow),
    ],
)
def test_spans_of_time_are_the_reference(name, rows, spans, comparison, monkeypatch):
    monkeypatch.setattr(tiling, 'selective_scan_gpu', lambda b, t, blocks, n, x_bytes, dt_bytes: SpanTile(rows, spans))
    case = cases.CASES[name]
    everything = case.b * case.t * case.n
    comparison.check(
        selective_scan,
        name,
        cases.call(name),
        case.t * case.n,
        implementation='mosaic_gpu',
        A=everything,
        D=everything,
        B=case.t * case.d,
        C=case.t * case.d,
    )


@pytest.mark.parametrize(
    'name', ['n=16', *(pytest.param(name, marks=pytest.mark.slow) for name in cases.real() if name != 'n=16')]
)
def test_kernels_lower_for_a_gpu_that_is_not_there(name, lowered_for_gpu):
    lowered = lowered_for_gpu(selective_scan, cases.real()[name])
    assert [entry[:3] for entry in lowered.entries] == [('selective_scan', 'mosaic_gpu', ())]
    assert lowered.kernels()


@pytest.mark.parametrize(
    ('sizes', 'rows', 'spans'),
    [
        ((2, 8192, 32, 16, 2, 2), 16, 8),
        ((8, 8192, 32, 16, 2, 2), 16, 1),
        ((2, 8192, 32, 16, 4, 4), 16, 8),
        ((4, 8192, 32, 64, 2, 2), 8, 4),
        ((1, 8, 1, 16, 4, 4), 8, 1),
        ((1, 520, 1, 16, 2, 2), 16, 4),
        ((1, 2**16, 1, 16, 2, 2), 16, 32),
    ],
)
def test_spans_fill_a_gpu_and_tiles_its_shared_memory(sizes, rows, spans):
    assert tiling.selective_scan_gpu(*sizes) == SpanTile(rows, spans)
    assert tiling.selective_scan_gpu_memory(rows, *sizes[3:]) <= tiling.SHARED_MEMORY


@pytest.mark.parametrize(('d', 'n', 'channels'), [(2048, 16, 256), (384, 16, 128), (2048, 64, 128), (128, 8, 128)])
def test_channels_of_a_tile_divide_them_all(d, n, channels):
    assert tiling.selective_scan_tpu(d, n) == channels


@pytest.mark.usefixtures('steps')
@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_without_skip_or_state(implementation):
    call = cases.call('prime', jnp.bfloat16)
    without = {**call.arrays, 'D': None, 'state': None}
    zeros = {**call.arrays, 'D': jnp.zeros(5), 'state': jnp.zeros((2, 5, 3))}
    y, state = selective_scan(**without, implementation=implementation)
    assert y.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    for one, other in zip((y, state), selective_scan(**zeros, implementation=implementation), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures('steps')
@pytest.mark.parametrize('cuts', [(1,), (5, 32)])
def test_pieces_are_the_whole_forward_and_backward(cuts, comparison):
    call = cases.call('prime')
    pieces = list(zip((0, *cuts), (*cuts, 37), strict=True))

    def in_pieces(A, D, state, *, implementation, **inputs):
        if implementation == 'reference':
            return selective_scan(A=A, D=D, state=state, implementation=implementation, **inputs)
        outputs = []
        for start, end in pieces:
            piece = {name: array[:, start:end] for name, array in inputs.items()}
            y, state = selective_scan(A=A, D=D, state=state, implementation='xla', **piece)
            outputs.append(y)
        return jnp.concatenate(outputs, axis=1), state

    comparison.check(in_pieces, 'pieces', call, 37 * 3, implementation='xla')


@pytest.mark.usefixtures('steps')
def test_under_vmap_and_remat(comparison):
    call = cases.call('prime')

    def mapped(A, D, *, implementation, **inputs):
        if implementation == 'reference':
            return selective_scan(A=A, D=D, implementation=implementation, **inputs)

        def row(inputs):
            return selective_scan(
                A=A, D=D, implementation='xla', **{name: array[None] for name, array in inputs.items()}
            )

        return jax.tree.map(lambda array: array[:, 0], jax.vmap(jax.checkpoint(row))(inputs))

    comparison.check(mapped, 'mapped', call, 37 * 3, implementation='xla')


@pytest.mark.usefixtures('steps')
def test_no_steps_at_all():
    call = cases.call('two')
    inputs = {name: array[:, :0] for name, array in call.arrays.items() if name in ('x', 'dt', 'B', 'C')}
    for implementation in ('reference', 'xla'):

        def run(state, implementation=implementation):
            return selective_scan(A=call.arrays['A'], state=state, implementation=implementation, **inputs)

        (y, final), pull = jax.vjp(run, call.arrays['state'])
        assert y.shape == (1, 0, 5)
        np.testing.assert_array_equal(final, call.arrays['state'])
        np.testing.assert_array_equal(pull((y, final))[0], final)


@pytest.mark.usefixtures('steps')
def test_documents_do_not_see_each_other():
    call = cases.call('packed')
    alone = {name: array[:, 5:45] if name in ('x', 'dt', 'B', 'C') else array for name, array in call.arrays.items()}
    packed, _ = selective_scan(**call.arrays, **call.options, implementation='xla')
    expected, _ = selective_scan(**{**alone, 'state': None}, implementation='xla')
    np.testing.assert_allclose(packed[1, 5:45], expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    'implementation', ['xla', *(pytest.param(name, marks=pytest.mark.slow) for name in dispatch.PLATFORM)]
)
def test_twice_the_same_bits(implementation, comparison):
    call = cases.call('prime')
    comparison.check_same_bits(selective_scan, call, implementation)


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ({'x': jnp.zeros((1, 2))}, ValueError, r'selective_scan: x has shape \(1, 2\); expected b t d'),
        ({'A': jnp.zeros((4, 1))}, ValueError, r'A has shape \(4, 1\); expected d n with d=5'),
        ({'C': jnp.zeros((1, 2, 3))}, ValueError, r'C has shape \(1, 2, 3\); expected b t n with b=1, t=2, n=1'),
        ({'D': jnp.zeros((1, 5))}, ValueError, r'D has shape \(1, 5\); expected d with d=5'),
        (
            {'state': jnp.zeros((1, 1, 5))},
            ValueError,
            r'state has shape \(1, 1, 5\); expected b d n with b=1, d=5, n=1',
        ),
        ({'segments': jnp.zeros((2, 2), jnp.int32)}, ValueError, r'segments has shape \(2, 2\); expected b t'),
        (
            {'segments': jnp.zeros((1, 2))},
            TypeError,
            'segments has type float32 and shape .*; expected an integer type',
        ),
        (
            {'x': jnp.zeros((1, 2, 5), jnp.complex64)},
            TypeError,
            'x has type complex64 .*; expected a floating-point type',
        ),
        ({'implementation': 'cuda'}, ValueError, "implementation is 'cuda'; expected None or one of"),
        ({'implementation': 'mosaic_gpu'}, NotImplementedError, "'mosaic_gpu' cannot serve: the platform is cpu"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        selective_scan(**{**cases.call('two').arrays, **arguments})


@pytest.mark.parametrize(('n', 'served'), [(64, 36864), (61, 36864), (16, 147456)])
def test_states_that_the_memory_of_a_tpu_does_not_hold_are_refused(n, served):
    def run(d):
        shapes = {'x': (1, 2, d), 'dt': (1, 2, d), 'A': (d, n), 'B': (1, 2, n), 'C': (1, 2, n)}
        arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        return jax.eval_shape(lambda arrays: selective_scan(**arrays, implementation='mosaic_tpu'), arrays)

    with target.compiling_for(target.TPU_V5E):
        run(served)
        with pytest.raises(NotImplementedError, match=r'the state of a sequence has .* with padding; expected at most'):
            run(served + 1)


@pytest.mark.parametrize('implementation', dispatch.PLATFORM)
@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({name: jnp.zeros((1, 0, 5)) for name in ('x', 'dt')} | {name: jnp.zeros((1, 0, 1)) for name in 'BC'},
         r'x has shape \(1, 0, 5\), A \(5, 1\); expected no dimension of size zero'),
        ({'A': jnp.zeros((5, 65)), 'B': jnp.zeros((1, 2, 65)), 'C': jnp.zeros((1, 2, 65)), 'state': None},
         'the state of a channel has 65 numbers; expected at most 64'),
        ({'D': None, 'x': np.zeros((1, 2, 5))}, 'computed in float64; expected operands of at most float32'),
    ],
    ids=['no steps', 'many numbers', 'float64'],
)  # fmt: skip
def test_kernels_refuse(arguments, message, implementation):
    with (
        jax.enable_x64(True),
        target.compiling_for(target.interpreted(implementation)),
        pytest.raises(NotImplementedError, match=message),
    ):
        selective_scan(**{**cases.call('two').arrays, **arguments}, implementation=implementation)
