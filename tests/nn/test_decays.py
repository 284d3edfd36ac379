import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.linear.attention import LinearAttention
from attnlab.nn.decays import (
    ForgetGate,
    LowRankDecay,
    RetentionDecay,
    ScaledForgetGate,
    SlopeDecay,
    StepDecay,
    StepSize,
)
from attnlab.nn.parameter import inverse_softplus
from attnlab.testing.noise import noise


def test_retention_decays():
    decay = RetentionDecay(8, heads=3, key_dim=2, rngs=nnx.Rngs(0))(jnp.zeros((1, 1, 8)))
    np.testing.assert_allclose(jnp.exp(decay), [1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128], rtol=1e-6)


def test_low_rank_decay():
    decay = LowRankDecay(2, heads=1, key_dim=2, rank=1, temperature=4.0, rngs=nnx.Rngs(0))
    decay.down.weight[...] = jnp.asarray([[1.0], [1.0]])
    decay.up.weight[...] = jnp.asarray([[1.0, 0.0]])
    decay.up.bias[...] = jnp.asarray([0.0, np.log(3.0)])
    # Gates sigmoid(0) = 1/2 and sigmoid(log 3) = 3/4, to the power of a quarter.
    np.testing.assert_allclose(
        jnp.exp(decay(jnp.asarray([[[2.0, -2.0]]])))[0, 0, 0], [0.5**0.25, 0.75**0.25], rtol=1e-6
    )
    assert decay(jnp.ones((1, 1, 2), jnp.bfloat16)).dtype == jnp.float32


def test_low_rank_decay_stays_finite_and_close_to_one():
    decay = LowRankDecay(16, heads=2, key_dim=4, rngs=nnx.Rngs(0))
    log_decay = decay(1e4 * noise(1, 50, 16))
    assert jnp.isfinite(log_decay).all() and (log_decay <= 0).all()
    assert (decay(noise(1, 50, 16)) > -1.0).all()


def test_step_sizes_start_log_uniform():
    step = StepSize(20_000, rngs=nnx.Rngs(0))
    dt = step(jnp.zeros((1, 1, 20_000)))
    assert dt.min() >= 0.999e-3 and dt.max() <= 1.001e-1
    np.testing.assert_allclose(jnp.log(dt).mean(), np.log(1e-2), rtol=0.01)
    np.testing.assert_allclose(jnp.log(dt).var(), np.log(100) ** 2 / 12, rtol=0.03)


def test_inverse_softplus():
    y = jnp.asarray([1e-3, 0.1, 1.0, 200.0])
    np.testing.assert_allclose(jax.nn.softplus(inverse_softplus(y)), y, rtol=1e-4)


def test_step_decays_start_between_their_bounds():
    decay = StepDecay(4, heads=5_000, key_dim=2, rngs=nnx.Rngs(0))
    rate = jnp.exp(decay.A_log[...])
    assert rate.min() > 0 and rate.max() <= 16 and abs(float(rate.mean()) - 8) < 0.3
    log_decay = decay(jnp.zeros((1, 1, 4)))[0, 0]
    np.testing.assert_allclose(log_decay / -rate, jax.nn.softplus(decay.step_size.bias[...]), rtol=1e-5)
    assert decay(1e4 * noise(1, 3, 4, dtype=jnp.bfloat16)).dtype == jnp.float32


def test_steps_that_have_no_logarithm_are_named():
    for low, high in ((0.0, 0.1), (-1.0, 0.1), (0.2, 0.1)):
        with pytest.raises(UserError, match=f'steps from {low} to {high}; they must be above 0, and in order'):
            StepSize(4, low=low, high=high, rngs=nnx.Rngs(0))


def test_slope_decays_are_those_of_alibi_and_vanish_with_depth():
    decay = SlopeDecay(8, heads=2, key_dim=4, rngs=nnx.Rngs(0))(jnp.zeros((1, 1, 8)))
    np.testing.assert_allclose(decay, [-(2.0**-4) * 1.00001, -(2.0**-8) * 1.00001], rtol=1e-6)
    last = SlopeDecay(8, heads=2, key_dim=4, depth=1.0, rngs=nnx.Rngs(0))(jnp.zeros((1, 1, 8)))
    np.testing.assert_allclose(last, [-(2.0**-4) * 1e-5, -(2.0**-8) * 1e-5], rtol=1e-6)
    with pytest.raises(UserError, match=r'depth of SlopeDecay is 2.0; it must be from 0'):
        SlopeDecay(8, heads=2, key_dim=4, depth=2.0, rngs=nnx.Rngs(0))


@pytest.mark.parametrize('gate', [ForgetGate, ScaledForgetGate])
def test_forget_gates_are_decays_of_memories(gate):
    mixer = LinearAttention(16, heads=2, decay=functools.partial(gate), rngs=nnx.Rngs(0))
    x = noise(1, 5, 16)
    y, _ = mixer(x, Context(jnp.arange(5)[None]))
    assert mixer.decay(x).shape == (1, 5, 2) and (mixer.decay(x) < 0).all()
    assert jnp.isfinite(y).all()
