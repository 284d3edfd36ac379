"""Clouds of points made so that the answer is known."""

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.analysis import geometry
from attnlab.analysis.inside import _geometry, _largest_share, _read, induction, repeated_tokens, retrieval
from attnlab.context import Context


def test_a_linear_map_is_linear_and_a_drawn_change_is_as_linear_as_dimensions_allow():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, 64))
    np.testing.assert_allclose(geometry.linearity(x, 3 * x @ rng.standard_normal((64, 5)) + 7), 1, atol=1e-12)
    change = rng.standard_normal((2000, 64))
    # Of a state and an unrelated addition of relative size a, (1 + a^2 d / n) / (1 + a^2) is linear.
    for size in (0.05, 0.2, 1.0):
        expected = (1 + size**2 * 64 / 2000) / (1 + size**2)
        np.testing.assert_allclose(geometry.linearity(x, x + size * change), expected, atol=0.01)
        np.testing.assert_allclose(geometry.linearity(x, size * change), 64 / 2000, atol=0.005)
    np.testing.assert_allclose(geometry.linearity(x, np.zeros((2000, 3))), 1)


def test_cosines():
    x = np.array([[1.0, 0], [0, 2], [3, 3]])
    np.testing.assert_allclose(geometry.mean_cosine(x, x @ np.array([[0, 1.0], [-1, 0]])), 0, atol=1e-15)
    np.testing.assert_allclose(geometry.mean_cosine(x, -2 * x), -1)
    np.testing.assert_allclose(geometry.mean_cosine(x, np.array([[1.0, 0], [2, 0], [0, 0]])), 1 / 3)


@pytest.mark.parametrize(('dimensions', 'low', 'high'), [(1, 0.9, 1.1), (5, 4.2, 5.2)])
def test_the_dimension_of_a_gaussian_in_a_subspace(dimensions, low, high):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1000, dimensions)) @ rng.standard_normal((dimensions, 32)) + 100
    assert low < geometry.intrinsic_dimension(x) < high
    np.testing.assert_allclose(geometry.intrinsic_dimension(np.concatenate([x, x])), geometry.intrinsic_dimension(x))
    assert np.isnan(geometry.intrinsic_dimension(x[:9]))


def test_a_head_that_copies_what_came_next_is_found():
    tokens = np.asarray(repeated_tokens(5, 9))
    assert tokens.shape == (4, 10) and all(len(set(row[:5])) == 5 for row in tokens)
    np.testing.assert_array_equal(tokens[:, :5], tokens[:, 5:])
    following = np.stack([np.roll(row[:, None] == row[None], 1, axis=1) & np.tri(10, dtype=bool) for row in tokens])
    following = following * (np.arange(10) != 0)
    uniform = np.tri(10) / np.arange(1, 11)[:, None]
    weights = np.stack([np.stack([row, uniform]) for row in following.astype(float)])
    np.testing.assert_allclose(induction(weights), [1, np.mean(1 / np.arange(6, 11))])
    # Of tied weights the first counts, which is the right one for no token but the first of the second half.
    np.testing.assert_allclose(retrieval(weights), [1, 0])


def test_one_token_that_no_line_meets_has_all_that_is_not_linear():
    x = np.random.default_rng(5).standard_normal((200, 3))
    y = x @ np.array([[1.0, 2.0], [0.0, 1.0], [3.0, 0.0]])
    np.testing.assert_allclose(geometry.token_nonlinearity(x, y), 0, atol=1e-12)
    y[17] += 5.0
    errors = geometry.token_nonlinearity(x, y)
    assert errors.argmax() == 17 and errors[17] > 10 * np.sort(errors)[-2]
    np.testing.assert_allclose(1 - np.sum(errors**2), geometry.linearity(x, y))


def test_numbers_of_a_stream_by_hand():
    rng = np.random.default_rng(6)
    before = rng.standard_normal((40, 3))
    # Twice the stream: a change as large as it, in its direction, and linear.
    after = 2 * before
    after[7, 1] = -1000 * np.median(np.abs(after))
    found = _geometry(before, after)
    assert found['max_abs'] == -after[7, 1]
    np.testing.assert_allclose(found['max_over_median'], 1000, rtol=0.1)
    np.testing.assert_allclose(found['max_over_median'], -after[7, 1] / np.median(np.abs(after)), rtol=1e-12)
    np.testing.assert_allclose(_geometry(before, 2 * before)['change'], 1, rtol=1e-12)
    np.testing.assert_allclose(_geometry(before, -before)['change'], 2, rtol=1e-12)
    # Where most of a stream is zero nothing is so many times its median.
    after[:, 1:] = 0
    assert _geometry(before, after)['max_over_median'] is None


def test_the_share_of_the_least_linear_tenth_by_hand():
    # Of twenty tokens the two largest: 9 + 16 of 9 + 16 + 18.
    errors = np.random.default_rng(7).permutation([3.0, -4.0, *[1.0] * 9, *[-1.0] * 9])
    assert _largest_share(errors) == pytest.approx(25 / 43)
    assert _largest_share(np.full(30, 0.5)) == pytest.approx(0.1)
    # Of fewer than ten it is one; of what is all linear no share is asked.
    assert _largest_share(np.array([1.0, 2.0])) == pytest.approx(0.8)
    assert _largest_share(np.zeros(10)) is None
    x = np.random.default_rng(8).standard_normal((200, 3))
    change = x @ np.ones((3, 3))
    change[17] += 50.0
    assert _geometry(x, x + change)['nonlinear_share'] > 0.98


class Weighing:
    """A mixer whose weights of heads are given."""

    def __init__(self, weights, visible):
        self.weights, self.visible = weights, visible

    def read_weights(self, x, ctx):
        return self.weights, self.visible


def test_how_far_heads_read_and_whether_from_the_token_before():
    # Documents of three tokens and two, and padding.
    segments = np.array([[1, 1, 1, 2, 2, 0]])
    ctx = Context(positions=jnp.asarray([[0, 1, 2, 0, 1, 0]]), segments=jnp.asarray(segments))
    visible = (segments[:, :, None] == segments[:, None]) & np.tri(6, dtype=bool)
    before, first = np.eye(6), np.zeros((6, 6))
    before[[1, 2, 4]] = np.eye(6)[[0, 1, 3]]
    first[np.arange(6), [0, 0, 0, 3, 3, 5]] = 1
    signed = np.eye(6)
    # A fourth of it on the token before, with a minus, and three on the token itself.
    signed[1, :2], signed[2, 1:3], signed[4, 3:5] = [-1, 3], [-1, 3], [-1, 3]
    weights = np.stack([np.eye(6), before, first, signed])
    # What padding reads counts nowhere.
    weights[:, 5] = [9, 0, 0, 0, 0, 0]
    found = _read(Weighing(jnp.asarray(weights[None], jnp.float32), jnp.asarray(visible)), jnp.zeros((1, 6, 2)), ctx)
    # Three tokens of five go on; from the first, they read at distances 1, 2 and 1.
    np.testing.assert_allclose(found['previous'], [0, 1, 2 / 3, 1 / 4], rtol=1e-6)
    np.testing.assert_allclose(found['distance'], [0, 3 / 5, 4 / 5, 3 / 20], rtol=1e-6)
