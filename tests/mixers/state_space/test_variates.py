"""A state along time and one along variates, against the recurrence node by node in float64 with numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.state_space.variates import CoupledScans, VariateTimeSSM
from attnlab.testing.contract import cast_parameters
from attnlab.testing.noise import perturbed

VARIATES, TIMES, INNER, HEADS, STATE = 3, 5, 4, 2, 3


def scans():
    made = CoupledScans(INNER, heads=HEADS, state=STATE, dt_rank=2, implementation=None, rngs=nnx.Rngs(0))
    return perturbed(made, 0.5)


def inputs():
    return np.random.default_rng(1).standard_normal((2, VARIATES, TIMES, INNER))


def run(module, x):
    """Outputs in float64."""
    with jax.enable_x64(True):
        return np.asarray(cast_parameters(module, jnp.float64)(jnp.asarray(x)))


def softplus(x):
    return np.log1p(np.exp(x))


def by_node(module, x):
    """The recurrence of the paper, as the docstring has it, for one window."""
    array = lambda parameter: np.asarray(parameter[...], np.float64)  # noqa: E731
    selected = x @ array(module.select.weight)
    low, B, C = np.split(selected, [4, 4 + 2 * HEADS * STATE], axis=-1)
    biases = [np.concatenate([array(size.bias) for size in sizes]) for sizes in module.step_sizes]
    p, q = (
        softplus(part @ array(linear.weight) + bias)
        for part, linear, bias in zip(np.split(low, 2, axis=-1), module.steps, biases, strict=True)
    )
    B1, B2, C1, C2 = (
        np.repeat(each.reshape(*x.shape[:2], HEADS, STATE), INNER // HEADS, axis=2)
        for part in (B, C)
        for each in np.split(part, 2, axis=-1)
    )
    r1, r2, r3, r4 = (np.exp(array(each)) for each in module.rates)
    c1, c2 = (np.exp(array(each)) for each in module.couplings)
    h, g = np.zeros((2, VARIATES + 1, TIMES + 1, INNER, STATE))
    y = np.zeros_like(x)
    for v in range(VARIATES):
        for t in range(TIMES):
            pt, qt = p[v, t][:, None], q[v, t][:, None]
            # Rows and columns of zeros stand before the first.
            V, T = v + 1, t + 1
            g[V, T] = np.exp(-qt * (r4 + c2)) * g[v, T] + (1 - np.exp(-qt * c2)) * np.exp(-qt * r3) * h[v, T]
            g[V, T] += qt * x[v, t][:, None] * B2[v, t]
            h[V, T] = np.exp(-pt * (r1 + c1)) * h[V, t] + (1 - np.exp(-pt * c1)) * np.exp(-pt * r2) * g[V, t]
            h[V, T] += pt * x[v, t][:, None] * B1[v, t]
            y[v, t] = np.sum(h[V, T] * C1[v, t] + g[V, T] * C2[v, t], axis=-1) + array(module.D) * x[v, t]
    return y


def test_a_sweep_is_the_recurrence_node_by_node():
    module, x = scans(), inputs()
    np.testing.assert_allclose(run(module, x), [by_node(module, each) for each in x], rtol=1e-9, atol=1e-9)


def test_uncoupled_states_are_two_recurrences_apart():
    """Along time every variate is by itself; along variates every time is."""
    module, x = scans(), inputs()
    for each in module.couplings:
        each[...] = jnp.full_like(each[...], -50.0)
    moved = x.copy()
    moved[:, 0, 1] += 1.0
    changed = np.abs(run(module, moved) - run(module, x)).max(axis=(0, 3)) > 1e-12
    reached = np.zeros((VARIATES, TIMES), bool)
    reached[0, 1:] = reached[:, 1] = True
    np.testing.assert_array_equal(changed, reached)


def test_no_path_grows():
    """A long row and many variates of ones, whose states hardly fade and drive one another strongly.

    Where a state lost nothing to its coupling, they would reach 1e15.
    """
    module = scans()
    for each in module.rates:
        each[...] = each[...] - 4.0
    for each in module.couplings:
        each[...] = each[...] + 2.0
    x = np.ones((1, 20, 300, INNER))
    # Factors that did not lose what couplings take would make 10^15 of it.
    assert np.isfinite(run(module, x)).all() and np.abs(run(module, x)).max() < 100


def test_all_variates_are_read_and_nothing_later():
    mixer = perturbed(VariateTimeSSM(8, state=STATE, rngs=nnx.Rngs(0)), 0.5)
    ctx = dataclasses.replace(Context.full(1, VARIATES * TIMES), grid=(VARIATES, TIMES))
    x = jnp.asarray(np.random.default_rng(2).standard_normal((1, VARIATES * TIMES, 8)), jnp.float32)
    seen = jax.jacobian(lambda x: mixer(x[None], ctx)[0][0].sum(axis=-1))(x[0])
    seen = np.abs(np.asarray(seen)).sum(axis=-1).reshape(VARIATES, TIMES, VARIATES, TIMES) > 0
    earlier = np.tril(np.ones((TIMES, TIMES), bool))
    np.testing.assert_array_equal(seen, np.broadcast_to(earlier[None, :, None], seen.shape))
    with pytest.raises(UserError, match='heads is 3; it must divide the inner width, 2 times 8'):
        VariateTimeSSM(8, heads=3, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r'VariateTimeSSM mixes tokens on a grid, and ctx\.grid is None'):
        mixer(x, dataclasses.replace(ctx, grid=None))
