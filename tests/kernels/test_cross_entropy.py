import functools
import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.testing.noise import noise
from attnlab.testing.tolerances import assert_close
from pallas_kernels import cross_entropy, cross_entropy_part, dispatch, target, tiling
from pallas_kernels.cases import cross_entropy as cases
from pallas_kernels.cases.drawing import Call

NARROW = ('both',)
FORMS = [('xla', jnp.float32), ('mosaic_tpu', jnp.float32), ('mosaic_tpu', jnp.bfloat16), ('mosaic_gpu', jnp.bfloat16)]
"""Matrix units of GPUs take 16-bit numbers alone."""


@pytest.fixture
def small_tiles(monkeypatch):
    """Several parts, or tiles both ways, of any call with more than 128 tokens and 256 classes."""
    monkeypatch.setattr(tiling, 'cross_entropy', lambda n, o: min(n, 32))
    monkeypatch.setattr(tiling, 'cross_entropy_tpu', lambda n, d, o, itemsize: tiling.HeadTile(128, 128))
    monkeypatch.setattr(tiling, 'cross_entropy_hopper', lambda n, o: 256)


def by_hand(hidden, embedding, labels, *, z_loss, soft_cap):
    losses = np.zeros(len(labels))
    for token, label in enumerate(labels):
        logits = embedding @ hidden[token]
        if soft_cap is not None:
            logits = soft_cap * np.tanh(logits / soft_cap)
        log_normalizer = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
        losses[token] = log_normalizer - logits[label] + z_loss * log_normalizer**2
    return losses


@pytest.mark.parametrize('name', cases.CASES)
def test_reference_is_the_definition(name, in_double):
    with jax.enable_x64(True):
        call = in_double(cases.call(name))
        actual = cross_entropy(**call.arrays, **call.options, implementation='reference')
        numbers = {name: np.asarray(array) for name, array in call.arrays.items()}
        expected = by_hand(**numbers, **{**call.options, 'labels': np.asarray(call.options['labels'])})
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_numbers_worked_out_by_hand(implementation):
    hidden, embedding = jnp.ones((2, 1)), jnp.log(jnp.array([[1.0], [3.0]]))
    labels = jnp.array([0, 1])
    # Probabilities 1/4 and 3/4; log Z is log 4.
    expected = np.log([4, 4 / 3])
    np.testing.assert_allclose(
        cross_entropy(hidden, embedding, labels, implementation=implementation), expected, rtol=1e-6
    )
    np.testing.assert_allclose(
        cross_entropy(hidden, embedding, labels, z_loss=0.5, implementation=implementation),
        expected + 0.5 * np.log(4) ** 2,
        rtol=1e-6,
    )
    # A tight cap leaves next to no difference between the classes.
    np.testing.assert_allclose(
        cross_entropy(hidden, embedding, labels, soft_cap=1e-4, implementation=implementation), np.log(2), rtol=1e-3
    )


@pytest.mark.parametrize('name', ['one', 'both'])
def test_gradients_of_the_reference_are_differences(name, differences):
    differences(cross_entropy, cases.call(name))


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [(name, jnp.float32) for name in cases.CASES] + [(name, jnp.bfloat16) for name in NARROW],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_xla_is_the_reference(name, dtype, comparison):
    case = cases.CASES[name]
    call = cases.call(name, dtype)
    comparison.check(
        cross_entropy, name, call, max(case.o, case.d), implementation='xla', embedding=max(case.n, case.o)
    )


@pytest.mark.parametrize(
    ('implementation', 'dtype', 'name'),
    [(*form, name) for form in FORMS for name in cases.KERNEL if form[0] != 'xla' or name == 'tiles']
    + [('mosaic_gpu', jnp.float16, 'both')],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_forms_that_hold_parts_are_the_reference(implementation, dtype, name, comparison, small_tiles):
    case = cases.CASES[name]
    comparison.check(
        cross_entropy,
        name,
        cases.call(name, dtype),
        max(case.o, case.d),
        implementation=implementation,
        embedding=max(case.n, case.o),
    )


@pytest.mark.parametrize('implementation', ['xla', 'mosaic_gpu'])
def test_probabilities_of_a_mean_over_many_tokens_do_not_vanish_in_float16(implementation, small_tiles):
    """Their weights, 2^-23, are two of the smallest numbers of float16; their sums, times a large activation, none."""
    n, o, d = 130, 512, 16
    hidden = noise(n, d, seed=0).at[:, 0].set(64)
    embedding = noise(o, d, seed=1).at[:, 0].set(0) / 4

    def gradients(implementation, dtype):
        def loss(hidden, embedding):
            return 2**-14 * cross_entropy(hidden, embedding, labels, implementation=implementation).sum()

        labels = jnp.arange(n, dtype=jnp.int32)
        return jax.jit(jax.grad(loss, (0, 1)))(hidden.astype(dtype), embedding.astype(dtype))

    with target.compiling_for(target.interpreted(implementation)) if implementation != 'xla' else nullcontext():
        found = gradients(implementation, jnp.float16)
    expected = gradients('reference', jnp.float32)
    for one, other, what in zip(found, expected, ('hidden', 'embedding'), strict=True):
        assert_close(one, other, dtype=jnp.float16, reduction=o, what=what)
    assert_close(found[1][n:], expected[1][n:], dtype=jnp.float16, reduction=n, what='classes that are no label')


@pytest.mark.slow
@pytest.mark.parametrize('implementation', dispatch.PLATFORM)
@pytest.mark.parametrize('name', ['many classes', 'many tokens'])
def test_kernels_are_the_reference_with_the_tiles_of_models(name, implementation, comparison):
    case, call = cases.CASES[name], cases.call(name, jnp.bfloat16)
    sums = {'embedding': max(case.n, case.o)}
    comparison.check(cross_entropy, name, call, max(case.o, case.d), implementation=implementation, **sums)


@pytest.mark.parametrize('dtype', ['int8', 'uint8', 'int16', 'uint16', 'uint32', 'int64', 'uint64'])
@pytest.mark.parametrize('of', [np.asarray, jnp.asarray, jax.jit(lambda labels: labels)], ids=['numpy', 'jax', 'jit'])
def test_labels_of_any_integer_type(dtype, of):
    with jax.enable_x64(dtype.endswith('64')):
        hidden, embedding = jnp.ones((4, 8), jnp.float32), jnp.ones((1000, 8), jnp.float32)
        labels = of(np.array([0, 1, 2, 100], dtype))
        np.testing.assert_allclose(cross_entropy(hidden, embedding, labels), np.log(1000), rtol=1e-6)


@pytest.mark.parametrize('label', [-(2**32) + 1, 2**32 + 1, 2**32 - 1, 2**31])
@pytest.mark.parametrize('x64', [False, True])
def test_labels_beyond_32_bits_are_no_class(label, x64):
    with jax.enable_x64(x64):
        call = jnp.ones((2, 8), jnp.float32), jnp.ones((5, 8), jnp.float32)
        with pytest.raises(ValueError, match=r'labels has entries from .*; expected 0 to 4'):
            cross_entropy(*call, np.array([1, label]))
        if x64 or 0 < label < 2**32:
            labels = jnp.array([1, label], jnp.int64 if x64 else jnp.uint32)
            losses = jax.jit(cross_entropy)(*call, labels)
            np.testing.assert_array_equal(np.isnan(losses), [False, True])


@pytest.mark.parametrize(('implementation', 'dtype'), [('reference', jnp.float32), *FORMS[:2], FORMS[3]])
def test_negative_labels_count_from_the_end_and_there_are_no_others(implementation, dtype, comparison, small_tiles):
    call = cases.call('prime', dtype)
    o = call.arrays['embedding'].shape[0]
    labels = call.options['labels']
    odd = Call(call.arrays, call.options | {'labels': (labels - o).at[3].set(o).at[5].set(-o - 1)})
    expected, odd = (comparison.evaluate(cross_entropy, each, implementation) for each in (call, odd))
    assert np.isnan(odd['output 0'])[[3, 5]].all()
    kept = np.delete(np.arange(len(labels)), [3, 5])
    np.testing.assert_array_equal(np.delete(odd['output 0'], [3, 5]), expected['output 0'][kept])
    # No class is theirs, so that all are pushed away.
    weights = jax.nn.softmax(np.asarray(call.arrays['hidden'] @ call.arrays['embedding'].T, np.float32))[3]
    pushed = odd['gradient of hidden'][3].astype(np.float32)
    toward = np.asarray(weights @ np.asarray(call.arrays['embedding'], np.float32))
    assert abs(np.corrcoef(pushed, toward)[0, 1]) > 0.99


@pytest.mark.parametrize(('implementation', 'dtype'), FORMS)
def test_parts_of_the_classes_make_the_loss(implementation, dtype, comparison, small_tiles):
    case, call = cases.CASES['both'], cases.call('both', dtype)

    def in_parts(hidden, embedding, *, labels, z_loss, soft_cap, implementation):
        if implementation == 'reference':
            return cross_entropy(
                hidden, embedding, labels, z_loss=z_loss, soft_cap=soft_cap, implementation='reference'
            )
        part = functools.partial(cross_entropy_part, hidden, soft_cap=soft_cap, implementation=implementation)
        at = case.o // 3
        normalizers, chosen = zip(part(embedding[:at], labels), part(embedding[at:], labels - at), strict=True)
        whole = jax.nn.logsumexp(jnp.stack(normalizers), axis=0)
        return whole - sum(chosen) + z_loss * whole**2

    comparison.check(
        in_parts, 'parts', call, max(case.o, case.d), implementation=implementation, embedding=max(case.n, case.o)
    )


@pytest.mark.parametrize('soft_cap', [None, 30.0])
def test_forward_and_backward_are_lowered_for_a_gpu(soft_cap, lowered_for_gpu):
    (call,) = cases.real().values()
    lowered = lowered_for_gpu(cross_entropy, call, z_loss=1e-4, soft_cap=soft_cap, implementation='mosaic_gpu')
    assert lowered.kernels() == 2
    # Of the logits no more than 2^27 are there at a time.
    n, o = len(call.arrays['hidden']), len(call.arrays['embedding'])
    sizes = [
        np.prod([int(size) for size in shape.split('x')])
        for shape in re.findall(r'tensor<((?:\d+x)*\d+)x', lowered.module)
    ]
    assert 2**26 < max(sizes) <= 2**27 < n * o / 10


@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_the_loss_is_wide(implementation):
    call = cases.call('prime', jnp.bfloat16)
    loss = cross_entropy(**call.arrays, **call.options, implementation=implementation)
    assert loss.dtype == jnp.float32


def test_large_logits_stay_finite(comparison):
    # Whole numbers, so that logits of 1e4 have no rounding that would excuse an error.
    hidden = jnp.array([[100.0, 1.0], [-100.0, 2.0], [100.0, -3.0]])
    embedding = jnp.stack([jnp.full(11, 100.0), jnp.arange(11.0) / 4], axis=1)
    call = Call(
        {'hidden': hidden, 'embedding': embedding}, {'labels': jnp.array([0, 5, 10]), 'z_loss': 0.0, 'soft_cap': None}
    )
    losses = comparison.evaluate(cross_entropy, call, 'xla')
    assert all(np.isfinite(array).all() for array in losses.values())
    expected = comparison.reference(cross_entropy, 'large logits', call)
    np.testing.assert_allclose(losses['output 0'], expected['output 0'], rtol=1e-6, atol=2e-3)


def test_gradients_of_probabilities_less_labels():
    """The gradient of the logits is `p - onehot`: read through an identity for an embedding."""
    call = cases.call('one')
    hidden, labels = jnp.array([[0.0, jnp.log(3.0)]]), jnp.array([1])
    gradient = jax.grad(lambda hidden: cross_entropy(hidden, jnp.eye(2), labels, implementation='xla').sum())(hidden)
    np.testing.assert_allclose(gradient, [[0.25, -0.25]], rtol=1e-6)
    assert call.options['labels'].shape == (1,)


def test_under_vmap_and_remat(comparison):
    call = cases.call('both')

    def mapped(hidden, embedding, *, labels, implementation, **options):
        if implementation == 'reference':
            return cross_entropy(hidden, embedding, labels, implementation=implementation, **options)

        @jax.checkpoint
        def token(hidden, label):
            return cross_entropy(hidden[None], embedding, label[None], implementation=implementation, **options)[0]

        return jax.vmap(token)(hidden, labels)

    comparison.check(mapped, 'mapped', call, 101, implementation='xla')


def test_twice_the_same_bits(comparison):
    call = cases.call('many tokens')
    comparison.check_same_bits(cross_entropy, call, 'xla')


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ({'hidden': jnp.zeros((1, 2, 3))}, ValueError, r'cross_entropy: hidden has shape \(1, 2, 3\); expected n d'),
        ({'embedding': jnp.zeros((5, 2))}, ValueError, r'embedding has shape \(5, 2\); expected o d with d=3'),
        ({'labels': jnp.zeros(3, jnp.int32)}, ValueError, r'labels has shape \(3,\); expected n with n=4'),
        ({'labels': jnp.zeros(4)}, TypeError, 'labels has type float32 .*; expected an integer type'),
        (
            {'hidden': jnp.zeros((4, 3), jnp.int32)},
            TypeError,
            'hidden has type int32 .*; expected a floating-point type',
        ),
        ({'soft_cap': 0.0}, ValueError, 'soft_cap is 0.0; expected a positive, finite number, or None'),
        ({'implementation': 'liger'}, ValueError, "implementation is 'liger'; expected None or one of"),
        ({'implementation': 'mosaic_gpu'}, NotImplementedError, "'mosaic_gpu' cannot serve: the platform is cpu"),
    ],
)
def test_errors(arguments, error, message):
    defaults = {'hidden': jnp.zeros((4, 3)), 'embedding': jnp.zeros((5, 3)), 'labels': jnp.zeros(4, jnp.int32)}
    with pytest.raises(error, match=message):
        cross_entropy(**{**defaults, **arguments})


def test_kernels_refuse_what_they_cannot_serve():
    def served(implementation, **arrays):
        with target.compiling_for(target.interpreted(implementation)):
            return cross_entropy(labels=jnp.zeros(4, jnp.int32), implementation=implementation, **arrays)

    hidden, embedding = jnp.zeros((4, 3)), jnp.zeros((5, 3))
    with pytest.raises(NotImplementedError, match='products are in float32, of which matrix units keep 10 bits'):
        served('mosaic_gpu', hidden=hidden.astype(jnp.bfloat16), embedding=embedding)
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match='logits are computed in float64'):
        served('mosaic_tpu', hidden=hidden, embedding=embedding.astype(jnp.float64))
    with pytest.raises(NotImplementedError, match='d is 65536, and VMEM cannot hold two tiles'):
        served('mosaic_tpu', hidden=jnp.zeros((4, 65536)), embedding=jnp.zeros((5, 65536)))
    for implementation in dispatch.PLATFORM:
        with pytest.raises(NotImplementedError, match=r'embedding \(5, 0\); expected arrays with entries'):
            served(implementation, hidden=jnp.zeros((4, 0), jnp.bfloat16), embedding=jnp.zeros((5, 0), jnp.bfloat16))


def products(jaxpr):
    """The products of matrices of a program, those within its kernels too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'dot_general':
            yield equation
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, 'jaxpr')):
            # Closed programs hold another, and kernels are open ones.
            inner = getattr(inner, 'jaxpr', inner)
            if hasattr(inner, 'eqns'):
                yield from products(inner)


@pytest.mark.parametrize(
    ('dtype', 'factors', 'precision'),
    [
        ('float32', 'float32', jax.lax.Precision.HIGHEST),
        ('float16', 'float32', jax.lax.Precision.HIGHEST),
        ('bfloat16', 'bfloat16', jax.lax.Precision.DEFAULT),
    ],
)
def test_products_on_a_tpu_keep_the_digits_of_their_factors(dtype, factors, precision):
    """The matrix units take bfloat16 alone: at default precision they round float32 to it."""
    call = cases.call('both', dtype)
    with target.compiling_for(target.TPU_V5E), jax.default_matmul_precision(None):
        gradients = jax.grad(lambda arrays: cross_entropy(**arrays, **call.options, implementation='mosaic_tpu').sum())
        found = list(products(jax.make_jaxpr(gradients)(call.arrays).jaxpr))
    # The logits in three kernels, and the gradients of both matrices.
    assert len(found) == 5
    for product in found:
        assert {str(factor.aval.dtype) for factor in product.invars} == {factors}
        assert product.params['precision'] == (precision, precision)


def test_types_may_differ(comparison):
    call = cases.call('both')
    call = Call(call.arrays | {'hidden': call.arrays['hidden'].astype(jnp.bfloat16)}, call.options)
    for implementation in ('xla', 'mosaic_tpu'):
        comparison.check(cross_entropy, 'types', call, 101, implementation=implementation)
