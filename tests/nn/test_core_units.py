"""Trees of functions as nonlinearities: values, derivatives in float64, and the sweep over them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.config import build, from_plain, plain
from attnlab.errors import UserError
from attnlab.nn.core_units import BINARY, UNARY, CoreUnit
from attnlab.nn.mlps import MLP, GatedMLP
from attnlab.sweep.sweep import read
from attnlab.testing.noise import noise
from attnlab.testing.tolerances import STEP, difference_tolerance
from configs.sweeps import activations as sweeps_activations

POINTS = np.array([-3.0, -1.3, -0.4, 0.2, 0.9, 2.5])
UNITS = {
    **{name: CoreUnit('left', name) for name in UNARY},
    **{f'of {name}': CoreUnit(name, 'tanh', 'cosine') for name in BINARY},
    'deep': CoreUnit('sum', 'square', 'sine', inner=CoreUnit('product', 'identity', 'sigmoid')),
}


@functools.lru_cache(maxsize=1)
def evaluated():
    """Values and derivatives of every unit, at points moved by three steps and far away, by one program each."""

    def run(x):
        pulled = {name: jax.vjp(unit, x) for name, unit in UNITS.items()}
        return {name: (y, pull(jnp.ones_like(y))[0]) for name, (y, pull) in pulled.items()}

    with jax.enable_x64(True):
        near = jax.jit(run)(jnp.asarray(np.stack([POINTS - STEP, POINTS, POINTS + STEP])))
        return jax.tree.map(np.asarray, (near, run(jnp.asarray([-100.0, 0.0, 100.0]))))


@pytest.mark.parametrize('name', UNITS)
def test_derivatives_are_differences_and_nothing_overflows(name):
    values, derivatives = evaluated()[0][name]
    differences = (values[2] - values[0]) / (2 * STEP)
    np.testing.assert_allclose(derivatives[1], differences, rtol=1e-6, atol=10 * difference_tolerance())
    assert all(np.isfinite(found).all() for found in evaluated()[1][name])


def test_values_by_hand():
    swish = POINTS / (1 + np.exp(-POINTS))
    np.testing.assert_allclose(evaluated()[0]['deep'][0][1], swish**2 + np.sin(swish), rtol=1e-6)
    by_hand = {
        'signed_log': np.sign(POINTS) * np.log1p(np.abs(POINTS)),
        'bell': np.exp(-(POINTS**2)),
        'below': np.minimum(POINTS, 0),
        'of gated': np.cos(POINTS) / (1 + np.exp(-np.tanh(POINTS))),
        'of difference': np.tanh(POINTS) - np.cos(POINTS),
        'of least': np.minimum(np.tanh(POINTS), np.cos(POINTS)),
    }
    for name, expected in by_hand.items():
        np.testing.assert_allclose(evaluated()[0][name][0][1], expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize('make', [MLP, GatedMLP])
def test_the_swish_as_a_tree_is_silu_in_a_channel_mixer(make):
    x = noise(1, 3, 8)
    tree, name = (make(8, hidden=8, activation=f, rngs=nnx.Rngs(0)) for f in (CoreUnit(), 'silu'))
    np.testing.assert_allclose(tree(x), name(x), rtol=1e-4, atol=1e-6)
    assert len(jax.tree.leaves(nnx.state(tree))) == len(jax.tree.leaves(nnx.state(name)))


@pytest.mark.parametrize('units', [1, 2])
def test_a_trial_of_the_sweep_is_a_config_with_its_tree(units):
    made = sweeps_activations.get_config(f'units={units},trials=3')
    sweep = read(made)
    assert len(sweep.space) == 3 * units and sweep.trials == 3
    settings = sweep.settings(dict.fromkeys(sweep.space, 0) | {'first': 2})
    config = from_plain(plain(sweep.base))
    with config.unlocked():
        mlp = config.model.stack.blocks[0].mlp
        for key, value in settings.items():
            place = mlp
            *path, last = key.removeprefix('model.stack.blocks[0].mlp.').split('.')
            for step in path:
                place = place[step]
            place[last] = value
    inner = CoreUnit('sum', 'identity', 'identity') if units == 2 else None
    assert build(mlp.activation) == CoreUnit('sum', 'absolute', 'identity', inner=inner)
    assert build(mlp)(8, rngs=nnx.Rngs(0))(noise(1, 2, 8)).shape == (1, 2, 8)


def test_mistakes_are_named():
    with pytest.raises(UserError, match="there is no first=tan; did you mean 'tanh'"):
        CoreUnit(first='tan')
    for text in ('many', '²', '00'):
        with pytest.raises(UserError, match=f"trials is '{text}'; it must be a whole number from 1"):
            sweeps_activations.get_config(f'trials={text}')
