"""State-space models around their systems, whose equations `tests/nn/test_systems.py` and `test_selective.py` check."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit, ndtr

from attnlab.config import build
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.state_space.structured import StructuredSSM
from attnlab.nn.readouts import SelfGate
from attnlab.testing.noise import noise, perturbed
from attnlab.zoo.state_space import STATE_SPACE

DIM = 4


def make(name: str, **form: bool | int) -> StructuredSSM:
    factory = build(STATE_SPACE[name].spec)
    return factory.module(DIM, **{**factory.kwargs, 'state': 8, **form}, rngs=nnx.Rngs(0))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * ndtr(x)


def gelu_of_jax(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize('name', ['s4', 's4d', 's5', 's6', 'lru'])
def test_a_skip_and_a_gated_map_follow_the_system(name):
    with jax.enable_x64(True):
        mixer = perturbed(make(name))
        x = noise(1, 9, DIM, dtype=jnp.float64)
        y, state = jax.jit(mixer)(x, Context.full(1, 9))
        assert state is None
        activation = gelu if name in ('s4', 's4d', 's6') else gelu_of_jax
        u = activation(np.asarray(jax.jit(mixer.system)(x, None)[0]) + np.asarray(mixer.D[...]) * np.asarray(x))
        linear = u @ np.asarray(mixer.readout.linear.weight[...]) + np.asarray(mixer.readout.linear.bias[...])
        expected = u * expit(linear) if name == 's5' else linear[..., :DIM] * expit(linear[..., DIM:])
        np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-9)


def test_a_self_gate_multiplies_what_it_read_on_request():
    """`half_glu2` of S5."""
    read, given = (SelfGate(DIM, multiplied=each, rngs=nnx.Rngs(0)) for each in ('activated', 'given'))
    y = noise(1, 5, DIM)
    gate = expit(gelu_of_jax(np.asarray(y)) @ np.asarray(given.linear.weight[...]))
    np.testing.assert_allclose(given(y), np.asarray(y) * gate, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(read(y), gelu_of_jax(np.asarray(y)) * gate, rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="is 'all'; it must be 'activated' or 'given'"):
        SelfGate(DIM, multiplied='all', rngs=nnx.Rngs(0))


def test_s5_does_not_grow_with_the_tokens_where_training_has_moved_its_eigenvalues():
    mixer = make('s5')
    mixer.system.A_real[...] = jnp.full_like(mixer.system.A_real[...], 0.5)
    x = noise(1, 4_096, DIM)
    y = np.abs(np.asarray(jax.jit(mixer)(x, Context.full(1, 4_096))[0]))
    assert y[:, -64:].max() < 10 * y[:, :64].max()


def test_both_ways_there_is_no_stream_and_time_is_not_divided():
    mixer = make('s4', causal=False)
    assert make('s4').divides_time and not mixer.divides_time
    with pytest.raises(UserError, match='a bidirectional mixer cannot be streamed'):
        mixer.init_state(1, 4, jnp.float32)


def test_the_state_is_as_wide_as_the_system():
    mixers = {name: make(name) for name in ('s4', 's4d', 's5', 's6', 'lru')}
    shapes = {name: mixer.init_state(3, 100, jnp.bfloat16).memory.shape for name, mixer in mixers.items()}
    assert shapes == {'s4': (3, DIM, 8), 's4d': (3, DIM, 8), 's5': (3, 8), 's6': (3, DIM, 8), 'lru': (3, 16)}
    assert mixers['s4'].init_state(1, 1, jnp.bfloat16).memory.dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize('name', ['s4', 's4d', 's5', 's6', 'lru'])
def test_16384_tokens_in_one_pass_and_a_step_after_a_stream(name):
    """What decodes agrees with what trained, and gradients through the whole row are finite."""
    mixer, length = make(name, state=64), 16_384
    x, ctx = noise(1, length, DIM), Context.full(1, length)
    graphdef, params = nnx.split(mixer)

    def whole(params, x):
        y, _ = nnx.merge(graphdef, params)(x, ctx)
        return jnp.sum(y[:, -1]), y

    (_, y), gradients = jax.jit(jax.value_and_grad(whole, has_aux=True))(params, x)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradients))
    state = mixer.init_state(1, length, jnp.float32)
    _, state = jax.jit(mixer)(x[:, :-1], Context.full(1, length - 1), state)
    last, _ = jax.jit(mixer)(x[:, -1:], Context.full(1, 1, start=length - 1), state)
    assert float(jnp.max(jnp.abs(last[:, 0] - y[:, -1]))) < 1e-4 * float(jnp.max(jnp.abs(y)))
