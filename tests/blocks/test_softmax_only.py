"""The softmax-only block against its equations, and the gradient of its penalty against differences."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.softmax_only import EntropyMargin, EntropyMarginPerQuery, SoftmaxOnlyBlock
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import entropy
from attnlab.functional.entropy import row_entropy, row_sums_and_entropy
from attnlab.functional.reach import Reach
from attnlab.testing.contract import cast_parameters, compare_with_differences, context
from attnlab.testing.noise import noise as float32_noise
from attnlab.testing.tolerances import assert_close

SEGMENTS = np.array([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 2, 2, 2, 2]], np.int32)


noise = functools.partial(float32_noise, dtype=jnp.float64)


def seen_by_definition(*, causal: bool = True, window: int | None = None, sinks: int = 0) -> np.ndarray:
    distance = np.arange(7)[:, None] - np.arange(7)
    seen = (distance >= 0) | (not causal)
    if window is not None:
        seen &= (np.abs(distance) < window) | (np.arange(7) < sinks)
    return seen[None] & (SEGMENTS[:, :, None] == SEGMENTS[:, None])


def scores_by_definition(q: jax.Array, k: jax.Array) -> np.ndarray:
    """`b h t s`, query head `h` reading group `h // 2`."""
    return np.einsum('bthk,bshk->bhts', q, np.repeat(k, 2, axis=2)) / math.sqrt(q.shape[-1])


def entropy_by_definition(weights: np.ndarray) -> np.ndarray:
    """Of weights `b h t s`, as `b t h`."""
    shares = weights / weights.sum(axis=-1, keepdims=True)
    return np.moveaxis(-np.sum(shares * np.log(np.where(shares > 0, shares, 1)), axis=-1), 1, 2)


@pytest.mark.parametrize('kwargs', [{}, {'causal': False}, {'window': 3}, {'window': 2, 'sinks': 1}], ids=str)
def test_entropies_of_softmax_rows(kwargs: dict, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(entropy, 'CHUNK', 3)
    with jax.enable_x64(True):
        q, k = noise(2, 7, 4, 3), noise(2, 7, 2, 3, seed=1)
        actual = jax.jit(functools.partial(row_entropy, reach=Reach(**kwargs)))(q, k, segments=jnp.asarray(SEGMENTS))
        weights = np.exp(scores_by_definition(q, k)) * seen_by_definition(**kwargs)[:, None]
        assert_close(actual, entropy_by_definition(weights), dtype=jnp.float64, reduction=7, what='entropy')


def test_sums_and_entropies_of_nonnegative_rows_and_their_gradients(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(entropy, 'CHUNK', 3)
    with jax.enable_x64(True):
        q, k = noise(2, 7, 4, 3), noise(2, 7, 2, 3, seed=1)
        measure = functools.partial(row_sums_and_entropy, numerator=jax.nn.relu, segments=jnp.asarray(SEGMENTS))
        sums, entropies = jax.jit(measure)(q, k)
        weights = np.maximum(scores_by_definition(q, k), 0) * seen_by_definition()[:, None]
        np.testing.assert_allclose(sums, np.moveaxis(weights.sum(-1), 1, 2), rtol=1e-12)
        some = np.asarray(sums) > 0
        assert not some.all(), 'the case has rows without a positive score'
        assert np.all(np.asarray(entropies)[~some] == 0)
        with np.errstate(invalid='ignore'):
            expected = entropy_by_definition(weights)
        np.testing.assert_allclose(np.asarray(entropies)[some], expected[some], rtol=1e-9, atol=1e-12)

        def loss(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
            sums, entropies = measure(*inputs)
            return jnp.sum(jnp.sin(sums) + jnp.square(entropies))

        compare_with_differences('sums and entropies', loss, (q, k))


def test_the_entropy_of_equal_scores_is_the_logarithm_of_their_number():
    actual = row_entropy(jnp.zeros((1, 5, 1, 2)), jnp.ones((1, 5, 1, 2)))
    np.testing.assert_allclose(actual[0, :, 0], np.log(np.arange(1, 6)), rtol=1e-6)
    sharp = row_entropy(jnp.full((1, 5, 1, 2), 1e4), jnp.arange(10.0).reshape(1, 5, 1, 2))
    np.testing.assert_allclose(sharp, 0, atol=1e-6)


def block(dim: int = 8, **kwargs) -> SoftmaxOnlyBlock:
    """A float64 block whose numbers are all different."""
    made = SoftmaxOnlyBlock(dim, heads=2, length=9, rngs=nnx.Rngs(0), **kwargs)
    made.temperature[...] = 1 + 0.3 * jnp.abs(noise(2, 9, dtype=jnp.float32))
    made.alpha[...], made.beta[...] = jnp.float32(2.0), jnp.float32(0.5)
    return cast_parameters(made, jnp.float64)


def test_a_block_is_its_equations():
    with jax.enable_x64(True):
        made, x = block(), noise(2, 7, 8)
        y, _ = jax.jit(made)(x, Context.full(2, 7))
        q, k, v = (
            np.asarray(x @ linear.weight[...]).reshape(2, 7, 2, 4) for linear in (made.query, made.key, made.value)
        )
        scores = np.einsum('bthk,bshk->bhts', q, k) / 2 / np.asarray(made.temperature[...])[None, :, :7, None]
        weights = np.exp(scores) * np.tril(np.ones((7, 7)))
        read = np.einsum('bhts,bshv->bthv', weights / weights.sum(-1, keepdims=True), v).reshape(2, 7, 8)
        z = x + read @ made.output.weight[...]
        assert_close(y, 0.5 * z + z @ made.feed_forward.weight[...] / 2, dtype=y.dtype, reduction=56, what='y')


def penalty_by_definition(made: SoftmaxOnlyBlock, x: jax.Array, *, per_query: bool) -> float:
    """Algorithm 1, or what the released code does, over a batch of full rows, times the number of tokens."""
    batch, length, _ = x.shape
    q, k = (np.asarray(x @ linear.weight[...]).reshape(batch, length, 2, 4) for linear in (made.query, made.key))
    scores = np.einsum('bthk,bshk->bhts', q, k) / 2 / np.asarray(made.temperature[...])[None, :, :length, None]
    rows = entropy_by_definition(np.exp(scores) * np.tril(np.ones((length, length))))
    highest = math.log(length)
    deviation = (rows if per_query else rows.mean(axis=1)) - np.asarray(made.theta[...]) * highest
    penalties = np.where(np.abs(deviation) > made.penalty.margin * highest, deviation**2, 0).mean(axis=-1)
    return made.penalty.weight * batch * length * (penalties.sum() if per_query else penalties.mean())


@pytest.mark.parametrize('per_query', [False, True], ids=['paper', 'code'])
def test_the_penalty_and_its_gradient_are_those_of_the_algorithm(per_query: bool):
    penalty = (EntropyMarginPerQuery if per_query else EntropyMargin)(weight=0.3, margin=0.1)
    with jax.enable_x64(True):
        made, x = block(penalty=penalty), noise(2, 7, 8)
        made.theta[...] = jnp.array([0.9, 0.15])
        train = dataclasses.replace(Context.full(2, 7), deterministic=False)
        graphdef, params = nnx.split(made)

        def added(params) -> jax.Array:
            """The gradient of the penalty alone is what it adds to that of a loss of zero."""
            return jnp.sum(0.0 * nnx.merge(graphdef, params)(x, train)[0])

        found = jax.jit(jax.grad(added))(params)
        assert penalty_by_definition(made, x, per_query=per_query) > 0

        for name in ('query', 'key', 'theta', 'temperature'):
            gradient = found[name]['weight'][...] if name in ('query', 'key') else found[name][...]
            direction = noise(*gradient.shape, seed=3)
            moved = []
            for step in (1e-6, -1e-6):
                other = nnx.clone(made)
                place = getattr(other, name).weight if name in ('query', 'key') else getattr(other, name)
                place[...] = place[...] + step * direction
                moved.append(penalty_by_definition(other, x, per_query=per_query))
            expected = (moved[0] - moved[1]) / 2e-6
            assert abs(expected) > 1e-3
            np.testing.assert_allclose(jnp.vdot(gradient, direction), expected, rtol=1e-6)
        assert not np.any(found['value']['weight'][...])


def test_the_penalty_is_there_in_training_alone_and_leaves_the_output():
    penalty = EntropyMargin(margin=0.0)
    made = SoftmaxOnlyBlock(8, heads=2, length=9, penalty=penalty, rngs=nnx.Rngs(0))
    x = noise(2, 7, 8, dtype=jnp.float32)
    train = dataclasses.replace(Context.full(2, 7), deterministic=False)
    graphdef, params = nnx.split(made)

    def total(params, ctx: Context) -> tuple[jax.Array, jax.Array]:
        y, _ = nnx.merge(graphdef, params)(x, ctx)
        return jnp.sum(y), y

    run = jax.jit(jax.grad(total, has_aux=True))
    (evaluated, expected), (trained, y) = run(params, Context.full(2, 7)), run(params, train)
    np.testing.assert_array_equal(y, expected)
    assert not evaluated['theta'][...].any() and trained['theta'][...].any()


def test_padding_has_no_part_in_the_penalty():
    penalty = EntropyMargin(weight=1.0, margin=0.0)
    ctx = context(((1, 3), (0, 2)))
    rows, theta = jnp.asarray([[[0.1], [0.2], [0.6], [9.0], [9.0]]]), jnp.asarray([0.5])
    expected = 3 * (0.3 - 0.5 * math.log(5)) ** 2
    np.testing.assert_allclose(penalty(rows, theta, ctx.segments != 0), expected, rtol=1e-6)


def test_what_has_no_temperature_is_refused_or_not_a_number():
    made = SoftmaxOnlyBlock(8, heads=2, length=4, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='a row has 5 tokens; length, which counts temperatures, is 4'):
        made(noise(1, 5, 8, dtype=jnp.float32), Context.full(1, 5))
    y, _ = jax.jit(made)(noise(1, 3, 8, dtype=jnp.float32), Context.full(1, 3, start=2))
    assert np.isfinite(y[:, :2]).all() and np.isnan(y[:, 2]).all()
    with pytest.raises(UserError, match='heads is 3; it must divide dim, which is 8'):
        SoftmaxOnlyBlock(8, heads=3, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r'temperature of SoftmaxOnlyBlock is 0\.0; it must be positive'):
        SoftmaxOnlyBlock(8, heads=2, temperature=0.0, rngs=nnx.Rngs(0))
