import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cost, dispatch, long_conv, target
from pallas_kernels.cases import long_conv as cases


def by_hand(x, kernel, segments=None):
    y = np.zeros(x.shape)
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            for j in range(min(i + 1, len(kernel))):
                if segments is not None and len(set(segments[row, i - j : i + 1])) > 1:
                    break
                y[row, i] += kernel[j] * x[row, i - j]
    return y


@pytest.mark.parametrize('name', cases.CASES)
def test_reference_is_the_definition(name, in_double):
    with jax.enable_x64(True):
        call = in_double(cases.call(name))
        actual = long_conv(**call.arrays, **call.options, implementation='reference')
        numbers = {name: np.asarray(array) for name, array in {**call.arrays, **call.options}.items()}
        np.testing.assert_allclose(actual, by_hand(**numbers), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('name', ['few taps, packed'])
def test_gradients_of_the_reference_are_differences(name, differences):
    differences(long_conv, cases.call(name))


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [(name, jnp.float32) for name in cases.CASES] + [('packed transforms', jnp.bfloat16)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_xla_is_the_reference(name, dtype, comparison):
    case = cases.CASES[name]
    call = cases.call(name, dtype)
    comparison.check(long_conv, name, call, case.t, implementation='xla', kernel=case.b * case.t)


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [
        ('transforms', jnp.bfloat16),
        *(
            pytest.param(
                name, dtype, marks=() if (name, dtype) == ('blocks, packed', jnp.float32) else pytest.mark.slow
            )
            for name in cases.BLOCKS
            for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
            if (name, dtype) != ('transforms', jnp.bfloat16)
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_kernel_for_tpus_is_the_reference(name, dtype, comparison):
    case = cases.CASES[name]
    call = cases.call(name, dtype)
    comparison.check(long_conv, name, call, case.t, implementation='mosaic_tpu', kernel=case.b * case.t)


@pytest.mark.parametrize('form', ['mosaic_tpu', 'mosaic_gpu'])
def test_documents_are_apart_to_the_last_bit_in_kernels(form):
    call = cases.call('blocks, packed', jnp.bfloat16 if form == 'mosaic_gpu' else jnp.float32)
    x, kernel, segments = call.arrays['x'], call.arrays['kernel'], call.options['segments']
    changed = x.at[0, :100].add(1e6).at[1, 130].set(-1e6)
    with target.compiling_for(target.interpreted(form)):
        run = jax.jit(lambda x: long_conv(x, kernel, segments=segments, implementation=form))
        before, after = np.asarray(run(x)), np.asarray(run(changed))
    np.testing.assert_array_equal(before[0, 100:], after[0, 100:])
    for unseen in (slice(0, 130), slice(255, 300)):
        np.testing.assert_array_equal(before[1, unseen], after[1, unseen])
    assert (before[1, 130:255] != after[1, 130:255]).all()
    np.testing.assert_array_equal(before[2], after[2])


@pytest.mark.parametrize(
    'name', ['blocks, packed', *(pytest.param(name, marks=pytest.mark.slow) for name in cases.HOPPER[1:])]
)
def test_the_kernels_for_hopper_are_the_reference(name, comparison):
    case = cases.CASES[name]
    call = cases.call(name, jnp.bfloat16)
    comparison.check(long_conv, name, call, case.t, implementation='mosaic_gpu', kernel=case.b * case.t)


def test_taps_keep_sixteen_bits_on_hopper():
    """Those of bfloat16 are all one here, and differences of neighbours nothing."""
    kernel = 1 + 2.0**-12 * jnp.arange(100)[:, None]
    x = jnp.zeros((1, 100, 1), jnp.bfloat16).at[0, :2, 0].set(jnp.array([1, -1]))
    with target.compiling_for(target.interpreted('mosaic_gpu')):
        y = long_conv(x, kernel, implementation='mosaic_gpu')
    np.testing.assert_array_equal(y[0, 1:, 0], np.full(99, 2.0**-12))


@pytest.mark.slow
@pytest.mark.usefixtures('watched_for_races')
@pytest.mark.parametrize('name', ['blocks, packed', 'rows of two groups', 'many rows, packed'])
def test_no_copy_races_what_is_read_on_hopper(name, comparison):
    case = cases.CASES[name]
    call = cases.call(name, jnp.bfloat16)
    comparison.check(long_conv, name, call, case.t, implementation='mosaic_gpu', kernel=case.b * case.t)


def shapes(b, t, d, w, dtype):
    return jax.ShapeDtypeStruct((b, t, d), dtype), jax.ShapeDtypeStruct((w, d), jnp.float32)


@pytest.mark.parametrize(
    ('call', 'packed', 'message'),
    [
        (shapes(1, 100, 2, 16, jnp.float32), False, '16 taps; up to 16 are a sum of shifted rows'),
        (shapes(8, 32769, 2, 32769, jnp.float32), False, 't is 32769, with 32769 taps; Fourier transforms take less'),
        (shapes(8, 98305, 2, 98305, jnp.bfloat16), False, 't is 98305, with 98305 taps; Fourier transforms take less'),
        (shapes(8, 2**20, 2, 100, jnp.float32), False, 'VMEM has no room for a channel of as many tokens'),
    ],
)
def test_what_the_kernel_for_tpus_does_not_serve(call, packed, message):
    with target.compiling_for(target.TPU_V5E), pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(lambda x, kernel: long_conv(x, kernel, implementation='mosaic_tpu'), *call)
    with target.compiling_for(target.TPU_V5E), dispatch.ledger() as entries:
        jax.eval_shape(lambda x, kernel: long_conv(x, kernel), *call)
    assert entries[0].implementation == 'xla'


@pytest.mark.parametrize(
    ('call', 'packed', 'message'),
    [
        (shapes(8, 300, 2, 300, jnp.float32), True, 'x has type float32; expected bfloat16'),
        (shapes(8, 300, 2, 300, jnp.float16), True, 'x has type float16; expected bfloat16'),
        (shapes(1, 100, 2, 16, jnp.bfloat16), False, '16 taps; up to 16 are a sum of shifted rows'),
        (shapes(8, 385, 2, 385, jnp.bfloat16), False, 't is 385, with 385 taps; Fourier transforms take less'),
        (shapes(8, 8193, 2, 8193, jnp.bfloat16), True, 't is 8193, with 8193 taps; Fourier transforms take less'),
        (shapes(8, 384, 65536, 384, jnp.bfloat16), False, 'the grid is channel=65536'),
    ],
)
def test_what_the_kernels_for_hopper_do_not_serve(call, packed, message):
    x, kernel = call
    segments = jax.ShapeDtypeStruct(x.shape[:2], jnp.int32) if packed else None
    with target.compiling_for(target.H100), pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(
            lambda *call: long_conv(*call[:2], segments=call[2], implementation='mosaic_gpu'), *call, segments
        )
    with target.compiling_for(target.H100), dispatch.ledger() as entries:
        jax.eval_shape(lambda x, kernel, segments: long_conv(x, kernel, segments=segments), x, kernel, segments)
    assert entries[0].implementation == 'xla'


@pytest.mark.parametrize('name', ['t=2048, packed', 't=8192, 128 taps'])
def test_the_kernels_for_hopper_lower(name, lowered_for_gpu):
    lowered = lowered_for_gpu(long_conv, cases.real()[name])
    assert [entry[:3] for entry in lowered.entries] == [('long_conv', 'mosaic_gpu', ())]
    assert lowered.kernels() == 3


def test_long_rows_that_the_kernel_for_tpus_serves():
    """As many tokens as transforms would not do better with, and any number of documents, or of few taps."""
    segments = jax.ShapeDtypeStruct((8, 65536), jnp.int32)
    calls = [
        (*shapes(8, 32768, 2, 32768, jnp.float32), None),
        (*shapes(8, 98304, 2, 98304, jnp.bfloat16), None),
        (*shapes(8, 65536, 2, 512, jnp.float32), None),
        (*shapes(8, 65536, 2, 65536, jnp.float32), segments),
    ]
    for x, kernel, segments in calls:
        with target.compiling_for(target.TPU_V5E), dispatch.ledger() as entries:
            jax.eval_shape(lambda x, kernel, segments: long_conv(x, kernel, segments=segments), x, kernel, segments)
        assert entries[0].implementation == 'mosaic_tpu'


def test_documents_and_later_tokens_are_not_seen_to_the_last_bit():
    """Where a row has several documents; that of a long row of one document holds to rounding."""
    call = cases.call('packed transforms')
    x, kernel, segments = call.arrays['x'], call.arrays['kernel'], call.options['segments']
    changed = x.at[0, 100].set(1e6).at[1, 2].set(jnp.inf)
    run = jax.jit(lambda x: long_conv(x, kernel, segments=segments, implementation='xla'))
    before, after = np.asarray(run(x)), np.asarray(run(changed))
    np.testing.assert_array_equal(before[0, :100], after[0, :100])
    np.testing.assert_array_equal(before[0, 140:], after[0, 140:])
    np.testing.assert_array_equal(before[1, 3:], after[1, 3:])
    assert (before[0, 100:140] != after[0, 100:140]).all()


@pytest.mark.parametrize('packed', [False, True])
def test_few_taps_of_a_long_row_take_no_transforms(packed):
    segments = jax.ShapeDtypeStruct((1, 65536), jnp.int32) if packed else None

    def both(x, kernel, segments):
        y, pull = jax.vjp(lambda x, kernel: long_conv(x, kernel, segments=segments, implementation='xla'), x, kernel)
        return y, pull(y)

    shapes = jax.ShapeDtypeStruct((1, 65536, 2), jnp.float32), jax.ShapeDtypeStruct((4, 2), jnp.float32)
    program = str(jax.make_jaxpr(both)(*shapes, segments))
    assert 'fft' not in program and 'dot_general' not in program


def test_the_row_does_not_wrap_around():
    x, kernel = jnp.zeros((1, 128, 1)).at[0, -1].set(1e6), jnp.ones((128, 1))
    y = long_conv(x, kernel, implementation='xla')
    np.testing.assert_allclose(y[0, :-1], 0, atol=1)
    np.testing.assert_allclose(y[0, -1], 1e6)


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_no_tokens_and_the_type_of_x(implementation):
    kernel = jnp.ones((3, 2))
    assert long_conv(jnp.zeros((2, 0, 2)), kernel, implementation=implementation).shape == (2, 0, 2)
    y = long_conv(jnp.ones((1, 70, 2), jnp.bfloat16), kernel, implementation=implementation)
    assert y.dtype == jnp.bfloat16 and y[0, -1, 0] == 3


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ({'x': jnp.zeros((2, 3))}, ValueError, r'long_conv: x has shape \(2, 3\); expected b t d'),
        ({'kernel': jnp.zeros((2, 4))}, ValueError, r'kernel has shape \(2, 4\); expected w d with d=5'),
        ({'kernel': jnp.zeros((0, 5))}, ValueError, 'kernel has no taps; expected at least 1'),
        ({'kernel': jnp.zeros((3, 5), jnp.complex64)}, TypeError, 'kernel has type complex64'),
        ({'segments': jnp.zeros((2, 3))}, TypeError, 'segments has type float32'),
        ({'implementation': 'mosaic_tpu'}, NotImplementedError, "'mosaic_tpu' cannot serve: the platform is cpu"),
        ({'implementation': 'mosaic_gpu'}, NotImplementedError, "'mosaic_gpu' cannot serve: the platform is cpu"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        long_conv(**{'x': jnp.zeros((2, 3, 5)), 'kernel': jnp.zeros((3, 5)), **arguments})


def test_costs_counted_by_hand():
    short = cost.long_conv(b=2, t=4, d=3, w=3, implementation='xla')
    assert short.model.forward.flops == 2 * 2 * 3 * (1 + 2 + 3 + 3)
    assert short.executed.forward.flops == 2 * 2 * 3 * 4 * 4
    # Transforms of 8 rows and of the kernel, and 8 back, over 2 * 1024 steps; a product of 1025 complex numbers a row.
    long = cost.long_conv(b=2, t=1024, d=4, w=1024, implementation='xla')
    assert long.model.forward.flops == (8 + 4 + 8) * 5 * 2048 * 11 // 2 + 8 * 3 * 2048
    assert long.executed.backward.flops == 3 * long.model.forward.flops
    # A product and a sum for every token and tap, in place of transforms.
    taps = cost.long_conv(b=2, t=65536, d=4, w=4, packed=True, implementation='xla')
    assert taps.executed.forward.flops == 2 * 2 * 65536 * 4 * 4
    assert taps.executed.backward.flops == 2 * taps.executed.forward.flops
    assert cost.long_conv(b=2, t=1024, d=4, w=1024).executed.forward.flops == 2 * 2 * 4 * 1024 * 1025 // 2


def test_the_kernel_for_tpus_costs_its_products():
    # A product takes 16 blocks of 8 rows. Of 300 tokens it is one for all 3 blocks, at 4 lags; of 2,100 it is one for
    # each 9 of 18 blocks, of which the first meets none that are 9 blocks or more before it.
    one, two = 4 * 3 * 8, 10 * 18 * 8 + 8 * 9 * 8
    for t, lines in ((300, one), (2100, two)):
        sizes = {'b': 9, 't': t, 'd': 5, 'w': t}
        call = cost.long_conv(**sizes, itemsize=4, implementation='mosaic_tpu').executed
        assert call.forward.flops == 2 * 5 * lines * 2 * 128 * 128
        assert call.backward.flops == 2 * call.forward.flops
        # Taps are two numbers of bfloat16, but not those that are summed.
        half = cost.long_conv(**sizes, itemsize=2, in_parts=True, implementation='mosaic_tpu').executed
        assert half.forward.flops == 2 * call.forward.flops
        assert half.backward.flops == 3 * call.forward.flops
    packed = cost.long_conv(b=8, t=300, d=5, w=300, packed=True, itemsize=4, implementation='mosaic_tpu').executed
    assert packed.forward.flops == 5 * (one + 8 * 3 * 8) * 2 * 128 * 128


def test_the_kernels_for_hopper_cost_their_products():
    # 9 rows of 5 blocks are one program, whose last lines meet blocks 4 before; 3 of 43, with taps of 19 lags, are two.
    for b, t, w, tiles, lags, summed in ((9, 300, 300, 2, 4, 4 * 2), (3, 2700, 1100, 4, 18 + 18, 18 * 4)):
        call = cost.long_conv(b=b, t=t, d=5, w=w, implementation='mosaic_gpu').executed
        product = 5 * 2 * 64**3
        convolved = tiles + 2 * lags
        assert call.forward.flops == 2 * convolved * product
        found = call.backward.flops - call.forward.flops
        assert found == (tiles + summed) * product
        packed = cost.long_conv(b=b, t=t, d=5, w=w, packed=True, implementation='mosaic_gpu').executed
        assert packed.forward.flops - call.forward.flops == 2 * 6 * tiles * product


def test_float16_costs_the_products_of_float32_on_a_tpu():
    """It is widened, and its taps are no two numbers."""
    done = {}
    for dtype in (jnp.float16, jnp.float32, jnp.bfloat16):
        with target.compiling_for(target.TPU_V5E), dispatch.ledger() as entries:
            jax.eval_shape(long_conv, *shapes(8, 300, 2, 300, dtype))
        assert entries[0].implementation == 'mosaic_tpu'
        done[dtype] = entries[0].cost.executed.forward.flops
    assert done[jnp.float16] == done[jnp.float32] == done[jnp.bfloat16] // 2


def test_the_portable_form_serves_where_transforms_take_less():
    call = cases.real()['t=8192']
    with target.compiling_for(target.H100), dispatch.ledger() as entries:
        assert jax.eval_shape(long_conv, **call.arrays).dtype == jnp.bfloat16
    assert entries[0].implementation == 'xla'
