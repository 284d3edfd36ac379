import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cost, dispatch, short_conv, target
from pallas_kernels.cases import short_conv as cases
from pallas_kernels.short_conv import vjp


def by_hand(x, taps, bias=None, segments=None, *, activation):
    y = np.zeros(x.shape)
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            y[row, i] = 0 if bias is None else bias
            for j in range(min(i + 1, len(taps))):
                if segments is not None and len(set(segments[row, i - j : i + 1])) > 1:
                    break
                y[row, i] += taps[-1 - j] * x[row, i - j]
    return y / (1 + np.exp(-y)) if activation == 'silu' else y


@pytest.mark.parametrize('name', cases.CASES)
def test_reference_is_the_definition(name, in_double):
    with jax.enable_x64(True):
        call = in_double(cases.call(name))
        actual = short_conv(**call.arrays, **call.options, implementation='reference')
        activation = call.options['activation']
        arrays = {**call.arrays, **call.options}
        numbers = {name: np.asarray(array) for name, array in arrays.items() if name != 'activation'}
        assert actual.dtype == jnp.float64
        np.testing.assert_allclose(actual, by_hand(**numbers, activation=activation), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('name', ['odd channels', 'documents shorter than the taps'])
def test_gradients_of_the_reference_are_differences(name, differences):
    differences(short_conv, cases.call(name))


def check(comparison, name, dtype, implementation):
    case = cases.CASES[name]
    sums = {'taps': case.b * case.t, 'bias': case.b * case.t}
    comparison.check(short_conv, name, cases.call(name, dtype), case.w, implementation=implementation, **sums)


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [(name, jnp.float32) for name in cases.CASES] + [('packed', jnp.bfloat16), ('packed', jnp.float16)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_xla_is_the_reference(name, dtype, comparison):
    check(comparison, name, dtype, 'xla')


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [
        ('packed', jnp.bfloat16),
        ('documents shorter than the taps', jnp.float32),
        *(
            pytest.param(name, dtype, marks=pytest.mark.slow)
            for name in cases.KERNEL
            for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
            if (name, dtype) not in {('packed', jnp.bfloat16), ('documents shorter than the taps', jnp.float32)}
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_kernels_are_the_reference(name, dtype, comparison):
    check(comparison, name, dtype, 'mosaic_gpu')


@pytest.mark.parametrize('name', cases.real())
def test_kernels_lower_for_a_gpu_that_is_not_there(name, lowered_for_gpu):
    lowered = lowered_for_gpu(short_conv, cases.real()[name])
    assert [entry[:3] for entry in lowered.entries] == [('short_conv', 'mosaic_gpu', ())]
    assert lowered.kernels() == 2


@pytest.mark.parametrize('name', ['odd channels', 'many taps'])
def test_the_portable_form_serves_what_the_kernel_does_not(name):
    call = cases.call(name)
    with target.compiling_for(target.H100), dispatch.ledger() as entries:
        jax.eval_shape(lambda arrays: short_conv(**arrays, **call.options), call.arrays)
        with pytest.raises(NotImplementedError, match=r'expected .*128 channels|there are 9 taps; expected at most 8'):
            short_conv(**call.arrays, **call.options, implementation='mosaic_gpu')
    assert entries[0].implementation == 'xla' and 'mosaic_gpu' in dict(entries[0].refused)


@pytest.mark.parametrize(
    ('x', 'taps', 'message'),
    [
        (np.zeros((2, 0, 128), np.float32), np.zeros((4, 128), np.float32), 'expected no dimension of size zero'),
        (np.zeros((2, 3, 128)), np.zeros((4, 128), np.float32), 'computed in float64; expected operands of at most'),
        (np.zeros((2, 3, 128), np.float32), np.zeros((4, 128)), 'computed in float64; expected operands of at most'),
        (np.zeros((2, 3, 100), np.float32), np.zeros((4, 100), np.float32), 'at least 128 channels'),
        (np.zeros((2, 3, 130), np.float32), np.zeros((4, 130), np.float32), 'a multiple of 4'),
        (np.zeros((2, 3, 128), np.float32), np.zeros((9, 128), np.float32), 'there are 9 taps; expected at most 8'),
    ],
)
def test_kernels_refuse(x, taps, message):
    with (
        jax.enable_x64(True),
        target.compiling_for(target.interpreted('mosaic_gpu')),
        pytest.raises(NotImplementedError, match=message),
    ):
        short_conv(jnp.asarray(x), jnp.asarray(taps), implementation='mosaic_gpu')


def test_taps_in_float32_of_inputs_in_16_bits(comparison):
    """As models have them: gradients of taps and bias are of their own type."""
    call = cases.call('packed', jnp.bfloat16)
    wide = {name: call.arrays[name].astype(jnp.float32) for name in ('taps', 'bias')}
    call = call._replace(arrays=call.arrays | wide)
    found = comparison.evaluate(short_conv, call, 'xla')
    comparison.check(short_conv, 'wide taps', call, 4, implementation='xla', taps=74, bias=74)
    assert found['gradient of taps'].dtype == found['gradient of bias'].dtype == np.float32


def test_numbers_worked_out_by_hand():
    x, taps = jnp.arange(1.0, 5).reshape(1, 4, 1), jnp.array([[1.0], [10.0], [100.0]])
    for implementation in ('reference', 'xla'):
        y = short_conv(x, taps, jnp.array([0.5]), implementation=implementation)
        np.testing.assert_array_equal(y[0, :, 0], [100.5, 210.5, 321.5, 432.5])
        y = short_conv(x, taps, segments=jnp.array([[1, 1, 1, 2]]), implementation=implementation)
        np.testing.assert_array_equal(y[0, :, 0], [100, 210, 321, 400])


def test_how_far_tokens_reach():
    np.testing.assert_array_equal(vjp.reach_of(None, 5, 4), [[0, 1, 2, 3, 3]])
    runs = jnp.array([[0, 0, 1, 2, 2], [0, 0, 0, 0, 1]])
    np.testing.assert_array_equal(vjp.reach_of(runs, 5, 3), [[0, 1, 0, 0, 1], [0, 1, 2, 2, 0]])
    np.testing.assert_array_equal(vjp.reach_of(runs, 5, 1), np.zeros((2, 5)))
    np.testing.assert_array_equal(vjp.reach_of(runs, 5, 9), [[0, 1, 0, 0, 1], [0, 1, 2, 3, 0]])


def test_a_number_that_comes_again_is_another_document():
    x, taps = jnp.arange(1.0, 4).reshape(1, 3, 1), jnp.ones((3, 1))
    y = short_conv(x, taps, segments=jnp.array([[1, 2, 1]]), implementation='xla')
    np.testing.assert_array_equal(y, x)


def test_documents_and_later_tokens_are_not_seen_to_the_last_bit():
    call = cases.call('packed')
    x = call.arrays['x']
    changed = x.at[0, 15].set(jnp.inf).at[1, 7].set(1e6)

    @jax.jit
    def run(x):
        y, pull = jax.vjp(lambda x: short_conv(**call.arrays | {'x': x}, **call.options, implementation='xla'), x)
        return y, pull(y.at[0, 15].set(1.0))[0]

    (before, gradient), (after, changed_gradient) = ([np.asarray(array) for array in run(x)] for x in (x, changed))
    for one, other in ((before, after), (gradient, changed_gradient)):
        np.testing.assert_array_equal(one[0, 16:], other[0, 16:])
        np.testing.assert_array_equal(one[1, 8:], other[1, 8:])
        np.testing.assert_array_equal(one[1, :3], other[1, :3])
    np.testing.assert_array_equal(before[0, :15], after[0, :15])
    assert (before[1, 7] != after[1, 7]).any() and (gradient[1, 6] != changed_gradient[1, 6]).any()


def test_only_arguments_are_kept():
    call = cases.call('packed', jnp.bfloat16)

    def pull(arrays):
        return jax.vjp(lambda arrays: short_conv(**arrays, **call.options, implementation='xla'), arrays)[1]

    kept = [leaf for leaf in jax.tree.leaves(jax.eval_shape(pull, call.arrays)) if leaf.ndim == 3]
    assert [(leaf.shape, leaf.dtype) for leaf in kept] == [((2, 37, 128), jnp.bfloat16)]


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16, jnp.float32])
def test_outputs_have_the_type_of_x_and_are_rounded_once(implementation, dtype):
    call = cases.call('packed', dtype)
    wide = {name: array.astype(jnp.float32) for name, array in call.arrays.items()}
    y = short_conv(**call.arrays, **call.options, implementation=implementation)
    assert y.dtype == dtype
    exact = short_conv(**wide, **call.options, implementation=implementation)
    np.testing.assert_array_equal(y, exact.astype(dtype))


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_no_tokens(implementation):
    y = short_conv(jnp.zeros((2, 0, 2)), jnp.ones((3, 2)), implementation=implementation)
    assert y.shape == (2, 0, 2)


def test_under_vmap_and_remat(comparison):
    call = cases.call('packed')

    def mapped(x, taps, bias, *, segments, activation, implementation):
        if implementation == 'reference':
            return short_conv(x, taps, bias, segments=segments, activation=activation, implementation=implementation)
        row = jax.checkpoint(
            lambda x, segments: short_conv(
                x[None], taps, bias, segments=segments[None], activation=activation, implementation=implementation
            )
        )
        return jax.vmap(row)(x, segments)[:, 0]

    comparison.check(mapped, 'mapped', call, 4, implementation='xla', taps=74, bias=74)


@pytest.mark.parametrize('implementation', ['xla', pytest.param('mosaic_gpu', marks=pytest.mark.slow)])
def test_twice_the_same_bits(implementation, comparison):
    call = cases.call('packed')
    comparison.check_same_bits(short_conv, call, implementation)


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ({'x': jnp.zeros((2, 3))}, ValueError, r'short_conv: x has shape \(2, 3\); expected b t d'),
        ({'taps': jnp.zeros((2, 4))}, ValueError, r'taps has shape \(2, 4\); expected w d with d=5'),
        ({'taps': jnp.zeros((0, 5))}, ValueError, 'taps has no taps; expected at least 1'),
        ({'bias': jnp.zeros((1, 5))}, ValueError, r'bias has shape \(1, 5\); expected d with d=5'),
        ({'taps': jnp.zeros((3, 5), jnp.complex64)}, TypeError, 'taps has type complex64'),
        ({'x': jnp.zeros((2, 3, 5), jnp.int32)}, TypeError, 'x has type int32'),
        ({'segments': jnp.zeros((2, 3))}, TypeError, 'segments has type float32'),
        ({'segments': jnp.zeros((2, 4), jnp.int32)}, ValueError, r'segments has shape \(2, 4\); expected b t with'),
        ({'activation': 'gelu'}, ValueError, r"activation is 'gelu'; expected one of \('identity', 'silu'\)"),
        ({'activation': None}, TypeError, 'short_conv: activation is None, of type NoneType; expected str'),
        ({'implementation': 'mosaic_tpu'}, NotImplementedError, 'this version has no mosaic_tpu form of short_conv'),
        ({'implementation': 'mosaic_gpu'}, NotImplementedError, "'mosaic_gpu' cannot serve: the platform is cpu"),
        ({'implementation': 'triton'}, ValueError, "implementation is 'triton'; expected None or one of"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        short_conv(**{'x': jnp.zeros((2, 3, 5)), 'taps': jnp.zeros((3, 5)), **arguments})


def test_costs_counted_by_hand():
    sums = cost.short_conv(b=2, t=5, d=3, w=4)
    assert sums.model.forward == cost.Cost(30 * 2 * 4, 2 * (30 + 12 + 30))
    # Of inputs and of taps a product and a sum for every tap each.
    assert sums.model.backward == cost.Cost(30 * 4 * 4, 2 * (30 + 12 + 30 + 30 + 12))
    # A bias, and a sigmoid of one exponential, a sum and a division.
    both = cost.short_conv(b=2, t=5, d=3, w=4, bias=True, activation='silu')
    assert both.model.forward == cost.Cost(30 * (2 * 4 + 1 + 2), 2 * (30 + 15 + 30), 30)
    # Again, for the slope: s (1 + c (1 - s)) dy.
    assert both.model.backward == cost.Cost(30 * (11 + 5 + 4 * 4 + 1), 2 * (30 + 15 + 30 + 30 + 15), 30)
    assert both.executed == both.model


def test_the_portable_form_serves_tpus():
    call = cases.real()['real']
    with target.compiling_for(target.TPU_V5E), dispatch.ledger() as entries:
        assert jax.eval_shape(lambda arrays: short_conv(**arrays, **call.options), call.arrays).dtype == jnp.bfloat16
    assert entries[0].implementation == 'xla'
