import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, softmax, target
from pallas_kernels.cases import softmax as cases
from pallas_kernels.cases.drawing import Call

PIVOTED = ('xla', *dispatch.PLATFORM)
"""Forms that subtract the largest score."""

FORMS = (*PIVOTED, *dispatch.ALTERNATIVES)
IMPLEMENTATIONS = ('reference', *FORMS)


def by_hand(x, where=None):
    """Row by row in Python's own numbers."""
    shape = np.shape(x)
    where = np.broadcast_to(True if where is None else np.asarray(where), shape).reshape(-1, shape[-1])
    weights = np.zeros(where.shape)
    for i, row in enumerate(np.asarray(x, np.float64).reshape(-1, shape[-1])):
        counted = [j for j in range(shape[-1]) if where[i, j] and row[j] > -math.inf]
        highest = max((row[j] for j in counted), default=0.0)
        total = math.fsum(math.exp(row[j] - highest) for j in counted)
        for j in counted:
            weights[i, j] = math.exp(row[j] - highest) / total
    return weights.reshape(shape)


@pytest.mark.parametrize('name', cases.KERNEL)
def test_reference_is_the_definition(name, in_double):
    with jax.enable_x64(True):
        call = in_double(cases.call(name))
        actual = softmax(**call.arrays, **call.options, implementation='reference')
    np.testing.assert_allclose(actual, by_hand(**call.arrays, **call.options), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
def test_numbers_worked_out_by_hand(implementation, comparison):
    x = jnp.array([[0.0, math.log(3.0), -math.inf], [5.0, 5.0, 5.0], [-math.inf] * 3])
    call = Call({'x': x}, {'where': jnp.array([[True] * 3, [True, False, True], [True] * 3])})
    found = comparison.evaluate(softmax, call, implementation)
    np.testing.assert_allclose(found['output 0'], [[0.25, 0.75, 0], [0.5, 0, 0.5], [0, 0, 0]], rtol=1e-6)
    assert found['gradient of x'][2].tolist() == [0, 0, 0]
    assert found['gradient of x'][1, 1] == 0


@pytest.mark.parametrize('name', ['two', 'all masked'])
def test_gradients_of_the_reference_are_differences(name, differences):
    differences(softmax, cases.call(name))


@pytest.mark.parametrize(
    ('name', 'dtype', 'implementation'),
    [(name, jnp.float32, form) for form in ('xla', 'two_pass') for name in cases.CASES]
    + [(name, jnp.float32, form) for form in dispatch.PLATFORM for name in cases.KERNEL]
    + [('masked', dtype, form) for form in FORMS for dtype in (jnp.bfloat16, jnp.float16)]
    + [('long', jnp.bfloat16, form) for form in dispatch.PLATFORM],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_forms_are_the_reference(name, dtype, implementation, comparison):
    comparison.check(softmax, name, cases.call(name, dtype), cases.CASES[name].shape[-1], implementation=implementation)


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
def test_rows_without_entries_are_zeros(implementation, comparison):
    for name in ('masked', 'minus infinity'):
        found = comparison.evaluate(softmax, cases.call(name), implementation)
        assert not found['output 0'][0].any()
        assert not found['gradient of x'][0].any()


@pytest.mark.parametrize('implementation', PIVOTED)
def test_a_constant_may_be_added_to_a_row(implementation, comparison):
    call = cases.call('prime')
    # Whole numbers, which float32 adds exactly.
    call = Call({'x': jnp.round(4 * call.arrays['x'])}, {})
    moved = Call({'x': call.arrays['x'] + 30000}, {})
    for what, array in comparison.evaluate(softmax, call, implementation).items():
        np.testing.assert_array_equal(array, comparison.evaluate(softmax, moved, implementation)[what])


@pytest.mark.parametrize('implementation', FORMS)
def test_scores_far_apart_leave_the_highest(implementation, comparison):
    x = 1e4 * cases.call('prime').arrays['x']
    found = comparison.evaluate(softmax, Call({'x': x}, {}), implementation)
    np.testing.assert_allclose(found['output 0'], x == x.max(axis=1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(found['gradient of x'], 0, atol=1e-5)


@pytest.mark.parametrize('implementation', FORMS)
def test_a_number_that_is_none_spoils_its_row_alone(implementation):
    x = cases.call('long').arrays['x'].at[1, 39999].set(math.nan)
    with target.compiling_for(
        target.interpreted(implementation) if implementation in dispatch.PLATFORM else target.current()
    ):
        found = np.asarray(softmax(x, implementation=implementation))
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2]]).all()


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
@pytest.mark.parametrize('shape', [(0, 3), (3, 0)])
def test_nothing_of_nothing(shape, implementation):
    assert softmax(jnp.zeros(shape), implementation=implementation).shape == shape


@pytest.mark.parametrize('name', cases.real())
def test_forward_and_backward_are_lowered_for_a_gpu(name, lowered_for_gpu):
    assert lowered_for_gpu(softmax, cases.real()[name], implementation='mosaic_gpu').kernels() == 2


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ({'x': jnp.zeros(())}, ValueError, r'softmax: x has shape \(\); expected \*b o'),
        ({'x': jnp.zeros(3, jnp.int32)}, TypeError, r'x has type int32 .*; expected a floating-point type'),
        (
            {'where': jnp.zeros(4, bool)},
            ValueError,
            r'where has shape \(4,\); expected one broadcastable to x, \(2, 3\)',
        ),
        ({'where': jnp.zeros((1, 2, 3), bool)}, ValueError, r'where has shape \(1, 2, 3\); expected one broadcastable'),
        ({'where': jnp.zeros(3)}, TypeError, r'where has type float32 and shape \(3,\); expected bool'),
        ({'implementation': 'mosaic_gpu'}, NotImplementedError, "'mosaic_gpu' cannot serve: the platform is cpu"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        softmax(**{'x': jnp.zeros((2, 3)), **arguments})


@pytest.mark.parametrize('implementation', dispatch.PLATFORM)
def test_kernels_refuse_what_they_cannot_serve(implementation):
    with target.compiling_for(target.interpreted(implementation)):
        with pytest.raises(NotImplementedError, match=r'x has shape \(0, 3\); expected an array with entries'):
            softmax(jnp.zeros((0, 3)), implementation=implementation)
        with jax.enable_x64(True), pytest.raises(NotImplementedError, match='x has type float64; expected float32'):
            softmax(jnp.zeros((2, 3), jnp.float64), implementation=implementation)


def test_two_passes_move_half_of_the_bytes_and_store_no_terms():
    """By the compiled programs: scores are read twice and weights written; the definition moves twice as much."""
    x = jnp.ones((64, 1024))
    run = jax.jit(lambda x, form: softmax(x, implementation=form), static_argnums=1)
    two, three = (run.lower(x, form).compile() for form in ('two_pass', 'xla'))
    assert two.cost_analysis()['bytes accessed'] < 3.1 * x.nbytes < three.cost_analysis()['bytes accessed']
    assert two.memory_analysis().temp_size_in_bytes < x.nbytes / 16


@pytest.mark.parametrize('pivot', [0, 1e4, -2e4])
def test_two_passes_of_scores_that_would_overflow(pivot):
    scores = np.asarray(jax.random.normal(jax.random.key(0), (4, 300)) * 30 + pivot, np.float64)
    expected = np.exp(scores - scores.max(axis=1, keepdims=True))
    expected /= expected.sum(axis=1, keepdims=True)
    with jax.enable_x64(True):
        found = softmax(jnp.asarray(scores), implementation='two_pass')
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-300)
    narrow = jnp.asarray(scores, jnp.float32)
    found = softmax(narrow, implementation='two_pass')
    np.testing.assert_allclose(found, softmax(narrow, implementation='reference'), rtol=2e-5, atol=1e-30)


def test_two_passes_run_only_where_they_are_named():
    with dispatch.ledger() as entries:
        softmax(jnp.ones((2, 3)))
        softmax(jnp.ones((2, 3)), implementation='two_pass')
    assert [entry.implementation for entry in entries] == ['xla', 'two_pass']
    assert entries[1].cost.executed.forward.bytes == 1.5 * entries[0].cost.executed.forward.bytes
