"""Third-order attention against its definition in loops, and its polynomial against it."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import third_order
from attnlab.functional.reach import Placed, Reach
from attnlab.functional.third_order import Operands, monomials, powers, third_order_attention
from attnlab.mixers.softmax.third_order import TaylorThirdOrderAttention, ThirdOrderAttention
from attnlab.testing.contract import compare_with_differences
from attnlab.testing.tolerances import assert_close

LENGTH, SEGMENTS = 7, np.array([[1, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 2]], np.int32)


def drawn(*, length: int = LENGTH, heads: int = 2, bound: float | None = None) -> Operands:
    """Float64 operands of 3 key and 2 value channels: normal, or uniform up to a bound."""
    rng = np.random.default_rng(0)
    draw = rng.standard_normal if bound is None else (lambda shape: rng.uniform(-bound, bound, shape))
    return Operands(*(jnp.asarray(draw((2, length, heads, size))) for size in (3, 3, 3, 2, 2)))


def placed(segments: np.ndarray) -> Placed:
    return Placed(jnp.arange(segments.shape[1], dtype=jnp.int32), jnp.asarray(segments))


def by_definition(operands: Operands, segments: np.ndarray, *, scale=1.0, causal=True, window=None, f=np.exp):
    """The sum over pairs, one pair at a time; `f` takes the place of the exponential."""
    q, k1, k2, v1, v2 = map(np.asarray, operands)
    output = np.zeros((*q.shape[:3], v1.shape[-1]))
    for row, i, head in np.ndindex(q.shape[:3]):

        def sees(j: int, row: int = row, i: int = i) -> bool:
            near = window is None or abs(i - j) < window
            return segments[row, i] == segments[row, j] and near and (j <= i or not causal)

        total = 0.0
        for j, k in itertools.product(filter(sees, range(q.shape[1])), repeat=2):
            weight = f(scale * np.sum(q[row, i, head] * k1[row, j, head] * k2[row, k, head]))
            total += weight
            output[row, i, head] += weight * v1[row, j, head] * v2[row, k, head]
        output[row, i, head] /= total
    return output


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch):
    """Tiles that do not divide the length, so that rows are put together from several."""
    monkeypatch.setattr(third_order, 'TILE', (3, 2, 4))


@pytest.mark.usefixtures('small_tiles')
@pytest.mark.parametrize('kwargs', [{}, {'causal': False}, {'window': 2}, {'causal': False, 'window': 2}], ids=str)
def test_tiles_give_the_softmax_over_pairs(kwargs: dict):
    with jax.enable_x64(True):
        operands, here = drawn(), placed(SEGMENTS)
        y = jax.jit(functools.partial(third_order_attention, scale=0.7, reach=Reach(**kwargs)))(operands, here, here)
        expected = by_definition(operands, SEGMENTS, scale=0.7, **kwargs)
        assert_close(y, expected, dtype=jnp.float64, reduction=LENGTH**2, what='y')


def test_memory_of_gradients_is_linear_in_the_length():
    def bytes_of(length: int) -> int:
        operands = Operands(*(jax.ShapeDtypeStruct((1, length, 1, 4), jnp.float32) for _ in range(5)))
        here = placed(np.ones((1, length), np.int32))
        loss = jax.grad(lambda operands: jnp.sum(third_order_attention(operands, here, here, scale=1.0)))
        return jax.jit(loss).lower(operands).compile().memory_analysis().temp_size_in_bytes

    short, middle, long = map(bytes_of, (512, 1024, 1536))
    assert 0 < long - middle < 1.1 * (middle - short)


@pytest.mark.usefixtures('small_tiles')
def test_gradients_by_tiles_are_those_of_differences():
    with jax.enable_x64(True):
        here = placed(SEGMENTS)
        weights = drawn(heads=1).v1

        def loss(operands: Operands) -> jax.Array:
            return jnp.vdot(weights, third_order_attention(operands, here, here, scale=0.7))

        compare_with_differences('third order', loss, drawn(heads=1))


def test_a_query_that_sees_nothing_reads_zero_and_has_no_gradient():
    operands = jax.tree.map(lambda x: x.astype(jnp.float32), drawn())
    here, elsewhere = placed(np.ones((2, LENGTH), np.int32)), placed(np.full((2, LENGTH), 2, np.int32))
    value, gradients = jax.jit(
        jax.value_and_grad(lambda o: jnp.sum(third_order_attention(o, here, elsewhere, scale=1.0)))
    )(operands)
    assert value == 0 and all(not np.any(g) for g in gradients)


def test_with_one_of_the_pair_constant_it_is_attention():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 9, 8)), jnp.float32)
    mixer = ThirdOrderAttention(8, heads=2, norm=None, rngs=nnx.Rngs(0))
    parts = mixer.operands
    q, k, _, v, _ = parts(x)
    ones = jnp.ones_like(k)
    here = placed(np.ones((2, 9), np.int32))
    y = third_order_attention(Operands(q, k, ones, v, ones), here, here, scale=0.5)
    scores = np.einsum('bthk,bshk->bhts', q, k) / math.sqrt(4)
    weights = np.exp(scores) * np.tril(np.ones((9, 9)))
    expected = np.einsum('bhts,bshv->bthv', weights / weights.sum(-1, keepdims=True), v)
    assert_close(y, expected, dtype=jnp.float32, reduction=9 * 9, what='y')


def test_scores_do_not_overflow():
    operands = jax.tree.map(lambda x: 40 * x.astype(jnp.float32), drawn())
    here = placed(SEGMENTS)
    y, gradients = jax.jit(jax.value_and_grad(lambda o: jnp.sum(third_order_attention(o, here, here, scale=1.0))))(
        operands
    )
    assert np.isfinite(y) and all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize('degree', [2, 4])
def test_monomials_make_the_taylor_polynomial(degree: int):
    factors, coefficients = monomials(3, degree)
    assert len(factors) == len(set(factors)) == math.comb(3 + degree, degree)
    x = np.random.default_rng(0).standard_normal((5, 3))
    with jax.enable_x64(True):
        actual = np.asarray(powers(jnp.asarray(x), degree)) @ coefficients
    expected = sum(x.sum(axis=-1) ** p / math.factorial(p) for p in range(degree + 1))
    np.testing.assert_allclose(actual, expected, rtol=1e-13)


def polynomial(mixer: TaylorThirdOrderAttention, s: float) -> float:
    return sum(s**p / math.factorial(p) for p in range(mixer.degree + 1))


def test_the_polynomial_form_is_the_sum_over_pairs_of_a_polynomial(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(third_order, 'CHUNK', 2)
    monkeypatch.setattr(third_order, 'CHUNKS', 2)
    with jax.enable_x64(True):
        mixer = TaylorThirdOrderAttention(6, heads=2, value_dim=2, rngs=nnx.Rngs(0))
        operands = drawn()
        sums = mixer.init_state(2, LENGTH, jnp.float64)
        forward = jax.jit(functools.partial(third_order.taylor_attention, scale=0.7, degree=2))
        y, _ = forward(operands, jnp.asarray(SEGMENTS), sums)
        expected = by_definition(operands, SEGMENTS, scale=0.7, f=functools.partial(polynomial, mixer))
        assert_close(y, expected, dtype=jnp.float64, reduction=LENGTH**2, what='y')


@pytest.mark.parametrize('degree', [2, 4])
def test_bounded_entries_bound_the_error(degree: int):
    bound, scale = 0.8, 1.0
    with jax.enable_x64(True):
        mixer = TaylorThirdOrderAttention(6, heads=2, degree=degree, value_dim=2, rngs=nnx.Rngs(0))
        operands = drawn(bound=bound)
        sums = mixer.init_state(2, LENGTH, jnp.float64)
        y, _ = third_order.taylor_attention(operands, jnp.asarray(SEGMENTS), sums, scale=scale, degree=degree)
        error = np.abs(y - by_definition(operands, SEGMENTS, scale=scale))
    highest = scale * 3 * bound**3
    relative = math.exp(highest) * highest ** (degree + 1) / math.factorial(degree + 1)
    # Weights of sum one, each off by at most that much of itself before it was divided by the sum, times the values.
    assert 0 < error.max() <= 2 * relative / max(1 - relative, 0.05) * bound**2
    assert error.max() < {2: 2e-2, 4: 2e-3}[degree]


def test_the_state_is_of_constant_size_for_the_polynomial_and_a_ring_with_a_window():
    def size(mixer, length: int) -> int:
        return sum(
            leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda: mixer.init_state(1, length, 'float32')))
        )

    exact = functools.partial(ThirdOrderAttention, 8, heads=2, rngs=nnx.Rngs(0))
    taylor = TaylorThirdOrderAttention(8, heads=2, rngs=nnx.Rngs(0))
    assert size(exact(), 80) > 9 * size(exact(), 8)
    assert size(exact(window=5), 80) == size(exact(window=5), 800)
    assert size(taylor, 8) == size(taylor, 800) == 1 + 2 * 2 * math.comb(4 + 2, 2) * (4 + 1)


def test_a_window_streams_from_its_ring():
    mixer = ThirdOrderAttention(8, heads=2, window=3, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 9, 8)), jnp.float32)
    ctx = Context.full(1, 9)
    graphdef, params = nnx.split(mixer)
    run = jax.jit(lambda params, *args: nnx.merge(graphdef, params)(*args))
    expected, _ = run(params, x, ctx)
    state, pieces = mixer.init_state(1, 9, x.dtype), []
    for part in (slice(0, 5), slice(5, 6), slice(6, 9)):
        y, state = run(params, x[:, part], dataclasses.replace(ctx, positions=ctx.positions[:, part]), state)
        pieces.append(y)
    assert_close(jnp.concatenate(pieces, 1), expected, dtype=x.dtype, reduction=8 * 9, what='y')


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: ThirdOrderAttention(8, heads=3, rngs=nnx.Rngs(0)), 'heads is 3; it must divide dim, which is 8'),
        (lambda: ThirdOrderAttention(8, heads=2, window=0, rngs=nnx.Rngs(0)), 'window of ThirdOrderAttention is 0'),
        (lambda: TaylorThirdOrderAttention(8, heads=2, degree=3, rngs=nnx.Rngs(0)), 'degree is 3; expected 2, 4'),
        (
            lambda: ThirdOrderAttention(8, heads=2, causal=False, rngs=nnx.Rngs(0)).init_state(1, 8, jnp.float32),
            'cannot be streamed',
        ),
    ],
)
def test_mistakes_are_named(make, message: str):
    with pytest.raises(UserError, match=message):
        make()
