import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, softmax_topk, target
from pallas_kernels.cases import softmax_topk as cases
from pallas_kernels.cases.drawing import Call

FORMS = ('xla', *dispatch.PLATFORM)


def by_hand(x, k):
    """Row by row in Python's own numbers, by a sort that leaves equal ones in order."""
    rows = np.asarray(x, np.float64).reshape(-1, np.shape(x)[-1])
    values, indices = np.zeros((len(rows), k)), np.zeros((len(rows), k), int)
    for i, row in enumerate(rows):
        indices[i] = sorted(range(len(row)), key=lambda j: -row[j])[:k]
        highest = row.max()
        if highest > -math.inf:
            total = math.fsum(math.exp(score - highest) for score in row)
            values[i] = [math.exp(row[j] - highest) / total for j in indices[i]]
    shape = (*np.shape(x)[:-1], k)
    return values.reshape(shape), indices.reshape(shape)


@pytest.mark.parametrize('name', cases.KERNEL)
def test_reference_is_the_definition(name, in_double):
    with jax.enable_x64(True):
        call = in_double(cases.call(name))
        values, indices = softmax_topk(**call.arrays, **call.options, implementation='reference')
    expected = by_hand(**call.arrays, **call.options)
    np.testing.assert_allclose(values, expected[0], rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(indices, expected[1])


@pytest.mark.parametrize('implementation', ('reference', *FORMS))
def test_numbers_worked_out_by_hand(implementation, comparison):
    log = math.log
    x = jnp.array([[0.0, log(3.0), log(4.0), -math.inf], [1.0, 2.0, 2.0, 1.0], [-math.inf] * 4, [0.0, -0.0, 0.0, -0.0]])
    found = comparison.evaluate(softmax_topk, Call({'x': x}, {'k': 3}), implementation)
    low, high = (1 / (2 * (1 + math.exp(sign))) for sign in (1, -1))
    expected = [[1 / 2, 3 / 8, 1 / 8], [high, high, low], [0, 0, 0], [1 / 4] * 3]
    np.testing.assert_allclose(found['output 0'], expected, rtol=1e-6)
    np.testing.assert_array_equal(found['output 1'], [[2, 1, 0], [1, 2, 0], [0, 1, 2], [0, 1, 2]])
    assert found['output 1'].dtype == np.int32
    assert not found['gradient of x'][2].any()


@pytest.mark.parametrize(
    'dtype',
    [jnp.float32, jnp.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (jnp.float16, jnp.float64))],
)
def test_zeros_have_no_sign(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        # In the second row a -0 comes before the one that would be found; the third has none among the largest.
        x = jnp.array([[0.0, -0.0, 0.0, -1.0], [-1.0, -0.0, 0.0, 0.0], [-0.0, 2.0, 0.0, 1.0]], dtype)
        find = functools.partial(softmax_topk, k=2, implementation='xla')
        for found in (find(x), jax.vmap(find)(x), [jnp.stack(part) for part in zip(*map(find, x), strict=True)]):
            np.testing.assert_array_equal(found[1], [[0, 1], [1, 2], [1, 3]])
            assert found[0].dtype == dtype


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_on_a_cpu_no_row_is_sorted(dtype):
    program = jax.jit(functools.partial(softmax_topk, k=8, implementation='xla')).lower(jnp.zeros((4, 64), dtype))
    text = program.compile().as_text()
    assert 'TopK' in text
    assert ' sort(' not in text


@pytest.mark.parametrize('name', ['one', 'all'])
def test_gradients_of_the_reference_are_differences(name, differences):
    def values(**arguments):
        return softmax_topk(**arguments)[0]

    differences(values, cases.call(name))


@pytest.mark.parametrize(
    ('name', 'dtype', 'implementation'),
    [(name, jnp.float32, 'xla') for name in cases.CASES]
    + [(name, jnp.float32, form) for form in dispatch.PLATFORM for name in cases.KERNEL]
    + [('ties', dtype, form) for form in FORMS for dtype in (jnp.bfloat16, jnp.float16)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_forms_are_the_reference(name, dtype, implementation, comparison):
    call = cases.call(name, dtype)

    def numbers(x, k, implementation):
        values, indices = softmax_topk(x, k, implementation=implementation)
        # Wide, so that the tolerance is far below one.
        return values, indices.astype(jnp.float32)

    comparison.check(numbers, name, call, cases.CASES[name].shape[-1], implementation=implementation)


@pytest.mark.parametrize('name', cases.real())
def test_forward_and_backward_are_lowered_for_a_gpu(name, lowered_for_gpu):
    assert lowered_for_gpu(softmax_topk, cases.real()[name], implementation='mosaic_gpu').kernels() == 1


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ({'x': jnp.zeros(())}, ValueError, r'softmax_topk: x has shape \(\); expected \*b o'),
        ({'x': jnp.zeros(3, jnp.int32)}, TypeError, r'x has type int32 .*; expected a floating-point type'),
        ({'k': 0}, ValueError, 'k is 0; expected 1 to 3, the last axis of x'),
        ({'k': 4}, ValueError, 'k is 4; expected 1 to 3, the last axis of x'),
        ({'implementation': 'mosaic_tpu'}, NotImplementedError, "'mosaic_tpu' cannot serve: the platform is cpu"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        softmax_topk(**{'x': jnp.zeros((2, 3)), 'k': 2, **arguments})


def test_a_row_of_more_tiles_than_a_grid_has_blocks_is_refused():
    with target.compiling_for(target.H100), dispatch.ledger() as entries:
        for columns in (65535 * 1024, 65535 * 1024 + 1):
            jax.eval_shape(functools.partial(softmax_topk, k=4), jax.ShapeDtypeStruct((1, columns), jnp.float32))
    assert [entry.implementation for entry in entries] == ['mosaic_gpu', 'xla']
    assert 'the grid is tiles=65536, rows=1; expected at most 65535 for tiles' in dict(entries[1].refused).values()


@pytest.mark.parametrize('implementation', dispatch.PLATFORM)
def test_kernels_refuse_what_they_cannot_serve(implementation):
    with target.compiling_for(target.interpreted(implementation)):
        with pytest.raises(
            NotImplementedError, match='k is 65, and each takes a pass over the row; expected at most 64'
        ):
            softmax_topk(jnp.zeros((2, 70)), 65, implementation=implementation)
        with pytest.raises(NotImplementedError, match=r'x has shape \(0, 3\); expected an array with entries'):
            softmax_topk(jnp.zeros((0, 3)), 1, implementation=implementation)
        with jax.enable_x64(True), pytest.raises(NotImplementedError, match='x has type float64; expected float32'):
            softmax_topk(jnp.zeros((2, 3), jnp.float64), 1, implementation=implementation)
