"""Nonlinearities: values by hand, derivatives in float64 against differences, and what happens far from zero."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import ndtr

from attnlab.errors import UserError
from attnlab.nn.activations import ACTIVATIONS, LEARNED, activation, learned
from attnlab.nn.mlps import MLP, GatedMLP
from attnlab.testing.noise import noise
from attnlab.testing.tolerances import STEP, difference_tolerance

EVERY = sorted({*ACTIVATIONS, *LEARNED})
POINTS = np.array([-3.0, -1.3, -0.4, 0.2, 0.9, 2.5])
FAR = np.array([-1e4, -100.0, 0.0, 100.0, 1e4])


@functools.lru_cache(maxsize=1)
def evaluated():
    """Every function at points moved by three steps, and far away, by one program: name, values and derivatives."""
    made = {name: ACTIVATIONS.get(name) or learned(name, rngs=nnx.Rngs(0)) for name in EVERY}

    def everything(x):
        return {name: jax.vjp(f, x) for name, f in made.items()}

    def run(x):
        return {name: (y, pull(jnp.ones_like(y))[0]) for name, (y, pull) in everything(x).items()}

    with jax.enable_x64(True):
        found = jax.jit(run)(jnp.asarray(np.stack([POINTS - STEP, POINTS, POINTS + STEP])))
        far = jax.jit(run)(jnp.asarray(np.stack([FAR])))
        return jax.tree.map(np.asarray, (found, far))


GOLDEN = {
    'celu': (np.exp(-0.4) - 1, 2.5),
    'elliott': (0.5 * -0.4 / 1.4 + 0.5, 0.5 * 2.5 / 3.5 + 0.5),
    'elu': (np.exp(-0.4) - 1, 2.5),
    'gelu_exact': (-0.4 * 0.344578258, 2.5 * 0.993790335),
    'leaky_relu': (-0.004, 2.5),
    'lisht': (0.4 * np.tanh(0.4), 2.5 * np.tanh(2.5)),
    'mish': (-0.4 * np.tanh(np.log1p(np.exp(-0.4))), 2.5 * np.tanh(np.log1p(np.exp(2.5)))),
    'relu_squared': (0.0, 6.25),
    'selu': (1.0507009873554805 * 1.6732632423543772 * (np.exp(-0.4) - 1), 1.0507009873554805 * 2.5),
    'softplus': (np.log1p(np.exp(-0.4)), np.log1p(np.exp(2.5))),
    'crrelu': (-0.01 * 0.4 * np.exp(-0.08), 2.5 + 0.01 * 2.5 * np.exp(-3.125)),
    'pdelu': (0.96**10 - 1, 2.5),
    'prelu': (-0.1, 2.5),
    'srs': (-0.4 / (-0.08 + np.exp(0.4 / 3)), 2.5 / (0.5 + np.exp(-2.5 / 3))),
    'swish': (-0.4 / (1 + np.exp(0.4)), 2.5 / (1 + np.exp(-2.5))),
}
"""Values at -0.4 and 2.5."""


@pytest.mark.parametrize('name', GOLDEN)
def test_values_by_hand(name):
    np.testing.assert_allclose(evaluated()[0][name][0][1, [2, 5]], GOLDEN[name], rtol=1e-6)


def test_others_by_hand():
    np.testing.assert_allclose(activation('abrelu')(jnp.array([1.0, 2.0, 6.0])), [0.0, 0.0, 3.0])
    # Its start is for a ReLU: from a leaky one, of slope 0.01 below 0, it is off by 0.037.
    points = np.linspace(-3, 3, 601, dtype=np.float32)
    np.testing.assert_allclose(learned('pau', rngs=nnx.Rngs(0))(jnp.asarray(points)), np.maximum(points, 0), atol=0.03)


@pytest.mark.parametrize('name', [name for name in EVERY if name != 'abrelu'])
def test_derivatives_are_differences(name):
    values, derivatives = evaluated()[0][name]
    differences = (values[2] - values[0]) / (2 * STEP)
    np.testing.assert_allclose(derivatives[1], differences, rtol=1e-6, atol=10 * difference_tolerance())


def test_the_derivative_of_abrelu_is_the_difference_along_any_direction():
    """It is not elementwise: a channel moves the mean of all."""
    rng = np.random.default_rng(0)
    direction, weights = rng.standard_normal((2, len(POINTS)))

    def weighted(x):
        return jnp.vdot(jnp.asarray(weights), activation('abrelu')(x))

    with jax.enable_x64(True):
        found = jax.jvp(weighted, (jnp.asarray(POINTS),), (jnp.asarray(direction),))[1]
        ends = [weighted(jnp.asarray(POINTS + sign * STEP * direction)) for sign in (1, -1)]
        np.testing.assert_allclose(found, (ends[0] - ends[1]) / (2 * STEP), atol=10 * difference_tolerance())


@pytest.mark.parametrize('name', EVERY)
def test_far_from_zero_nothing_overflows(name):
    for found in evaluated()[1][name]:
        assert np.isfinite(found).all()


def test_the_derivative_of_gelu_does_not_hang_on_single_bits():
    """JAX's own cuts its argument, which XLA may compute twice: where the two differ it is wrong by a thousandth."""
    program = jax.make_jaxpr(jax.grad(lambda x: jax.grad(activation('gelu_exact'))(x)))(1.0)
    assert 'bitcast_convert_type' not in str(program)
    points = np.linspace(-9, 9, 1001).astype(np.float32)
    wide = points.astype(np.float64)
    found = jax.vmap(jax.grad(activation('gelu_exact')))(jnp.asarray(points))
    expected = ndtr(wide) + wide * np.exp(-(wide**2) / 2) / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_a_pole_has_no_place():
    srs = learned('srs', rngs=nnx.Rngs(0))
    for width, rest in ((5.0, -8.0), (-3.0, -9.0), (2.0, 4.0)):
        srs.log_width[...], srs.log_rest[...] = jnp.asarray(width), jnp.asarray(rest)
        points = np.linspace(-500, 500, 4001, dtype=np.float32)
        values = np.asarray(srs(jnp.asarray(points)))
        assert np.isfinite(values).all() and (values * points >= 0).all()


@pytest.mark.parametrize('make', [MLP, GatedMLP])
def test_mlps_hold_parameters_of_their_nonlinearity(make):
    x = noise(1, 3, 8)
    plain, own = (make(8, hidden=8, activation=name, rngs=nnx.Rngs(0)) for name in ('leaky_relu', 'prelu'))
    own.learned.slope[...] = jnp.asarray(0.01)
    assert len(jax.tree.leaves(nnx.state(own))) == len(jax.tree.leaves(nnx.state(plain))) + 1
    nnx.update(plain, nnx.State({name: leaf for name, leaf in nnx.state(own).items() if name != 'learned'}))
    np.testing.assert_allclose(own(x), plain(x), rtol=1e-5)
    gradient = nnx.grad(lambda mlp: jnp.sum(mlp(x) ** 2))(own)
    assert gradient['learned']['slope'][...] != 0


@pytest.mark.parametrize('name', LEARNED)
def test_in_16_bits_nothing_is_lost_but_by_rounding(name):
    """Sums of gradients stand still in 16 bits, small inputs are lost beside one, fifth powers beyond float16."""
    points = np.concatenate([-np.geomspace(1e-3, 8, 4000), np.geomspace(1e-3, 8, 4000), [40, -40]])

    @nnx.jit
    def found(own, x):
        def total(own):
            y = own(x)
            return jnp.sum(jnp.abs(y).astype(jnp.float32)), y

        return nnx.grad(total, has_aux=True)(own)

    own = learned(name, rngs=nnx.Rngs(0))
    for dtype in (jnp.bfloat16, jnp.float16):
        x, near = jnp.asarray(points, dtype), float(jnp.finfo(dtype).eps)
        (gradients, y), (expected, wide) = found(own, x), found(own, x.astype(jnp.float32))
        np.testing.assert_allclose(y.astype(jnp.float32), wide, rtol=near, atol=1e-7)
        for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0.01)


def test_mistakes_are_named():
    with pytest.raises(UserError, match="there is no activation 'prel'; did you mean 'prelu'"):
        MLP(8, activation='prel', rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="activation 'prelu' has parameters, and this part cannot hold any"):
        activation('prelu')


def test_the_activation_of_a_gated_network_stands_behind_a_barrier():
    mlp = GatedMLP(8, rngs=nnx.Rngs(0))
    assert str(jax.make_jaxpr(mlp)(jnp.zeros((1, 2, 8)))).count('optimization_barrier') == 1
