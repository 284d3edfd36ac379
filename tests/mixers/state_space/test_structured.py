"""Structured state-space models around their systems, whose equations `tests/nn/test_systems.py` checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit, ndtr

from attnlab.config import build
from attnlab.context import Context
from attnlab.mixers.state_space.structured import StructuredSSM
from attnlab.testing.noise import noise, perturbed
from attnlab.zoo.state_space import STATE_SPACE

DIM = 4


def make(name: str) -> StructuredSSM:
    factory = build(STATE_SPACE[name].spec)
    return factory.module(DIM, **{**factory.kwargs, 'state': 8}, rngs=nnx.Rngs(0))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * ndtr(x)


def gelu_of_jax(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize('name', ['s4', 's4d', 's5', 'lru'])
def test_a_skip_and_a_gated_map_follow_the_system(name):
    with jax.enable_x64(True):
        mixer = perturbed(make(name))
        x = noise(1, 9, DIM, dtype=jnp.float64)
        y, state = jax.jit(mixer)(x, Context.full(1, 9))
        assert state is None
        activation = gelu if name in ('s4', 's4d') else gelu_of_jax
        u = activation(np.asarray(jax.jit(mixer.system)(x, None)[0]) + np.asarray(mixer.D[...]) * np.asarray(x))
        linear = u @ np.asarray(mixer.readout.linear.weight[...]) + np.asarray(mixer.readout.linear.bias[...])
        expected = u * expit(linear) if name == 's5' else linear[..., :DIM] * expit(linear[..., DIM:])
        np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-9)


def test_the_state_is_as_wide_as_the_system():
    mixers = {name: make(name) for name in ('s4', 's4d', 's5', 'lru')}
    shapes = {name: mixer.init_state(3, 100, jnp.bfloat16).memory.shape for name, mixer in mixers.items()}
    assert shapes == {'s4': (3, DIM, 8), 's4d': (3, DIM, 8), 's5': (3, 8), 'lru': (3, 16)}
    assert mixers['s4'].init_state(1, 1, jnp.bfloat16).memory.dtype == jnp.float32
