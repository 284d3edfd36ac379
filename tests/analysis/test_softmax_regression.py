import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.analysis.softmax_regression import SoftmaxRegression
from attnlab.errors import UserError

RNG = np.random.default_rng(0)
PROBLEM = SoftmaxRegression(RNG.standard_normal((32, 8)), RNG.dirichlet(np.ones(32)))
X, V = RNG.standard_normal(8), RNG.standard_normal(8)


def test_derivatives_are_those_of_the_loss():
    with jax.enable_x64(True):

        def loss(x):
            return jnp.sum(jnp.square(jax.nn.softmax(PROBLEM.rows @ x) - PROBLEM.target)) / 2

        gradient, along = jax.jvp(jax.grad(loss), (jnp.asarray(X),), (jnp.asarray(V),))
        assert PROBLEM.loss(X) == pytest.approx(float(loss(X)), rel=1e-12)
    np.testing.assert_allclose(PROBLEM.gradient(X), gradient, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(PROBLEM.hessian_times(X, V), along, rtol=1e-10, atol=1e-14)


def test_data_do_what_a_step_of_the_weights_does():
    moved = PROBLEM.stepped(X, 1.0)
    rows = PROBLEM.rows_like(X, moved)
    assert PROBLEM.loss(moved) < PROBLEM.loss(X)
    np.testing.assert_allclose(SoftmaxRegression(rows, PROBLEM.target).predicted(X), PROBLEM.predicted(moved))
    shift = PROBLEM.shift_of_weights(X, moved)
    np.testing.assert_allclose(PROBLEM.shift_of_data(X, rows), shift, atol=1e-14)
    np.testing.assert_allclose(
        PROBLEM.predicted(X) - (PROBLEM.target + shift), PROBLEM.predicted(moved) - PROBLEM.target
    )
    # No other change of the rows that gives the same scores is smaller.
    other = rows + np.outer(RNG.standard_normal(32), np.cross(X[:3], V[:3]) @ np.eye(3, 8))
    np.testing.assert_allclose(other @ X, rows @ X, atol=1e-9)
    assert np.linalg.norm(other - PROBLEM.rows) > np.linalg.norm(rows - PROBLEM.rows)


def test_shifts_grow_as_the_moves_do():
    """With slope 1, over three decades of the rate; and by at most the length of the rows for a unit of the weights."""
    rates = np.logspace(-4, -1, 7)
    moves = [PROBLEM.stepped(X, rate) for rate in rates]
    of_weights = [np.linalg.norm(moved - X) for moved in moves]
    of_data = [np.linalg.norm(PROBLEM.rows_like(X, moved) - PROBLEM.rows) for moved in moves]
    shifts = [np.linalg.norm(PROBLEM.shift_of_weights(X, moved)) for moved in moves]
    for moved in (of_weights, of_data):
        assert np.polyfit(np.log(moved), np.log(shifts), 1)[0] == pytest.approx(1, abs=0.01)
    assert all(
        shift <= np.linalg.norm(PROBLEM.rows, 2) * moved for shift, moved in zip(shifts, of_weights, strict=True)
    )


def test_mistakes_are_named():
    with pytest.raises(UserError, match='target has 2 numbers; it must have one for each of 3 rows'):
        SoftmaxRegression(np.ones((3, 2)), np.ones(2) / 2)
    with pytest.raises(UserError, match='weights that are zero'):
        PROBLEM.rows_like(np.zeros(8), X)
