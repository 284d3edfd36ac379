"""Hyena against its equations, written as sums over tokens in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.convolution.hyena import Hyena
from attnlab.nn.filters import ImplicitFilter
from attnlab.testing.noise import noise, perturbed

DIM = 3


def numbers(parameter) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


def linear(module, x: np.ndarray) -> np.ndarray:
    return x @ numbers(module.weight) + (0 if module.bias is None else numbers(module.bias))


def filters(module: ImplicitFilter, lags: int) -> np.ndarray:
    place = np.arange(lags)[:, None] / module.length
    angle = 2 * np.pi * place * np.linspace(1e-4, max(module.bands - 1, 1e-4), module.bands)
    x = np.concatenate([place, np.exp(-1j * angle).real, np.exp(-1j * angle).imag], axis=-1)
    for layer in module.hidden:
        x = np.sin(numbers(module.frequency) * linear(layer, x))
    rates = np.linspace(np.log(0.01) / 1.5, np.log(0.01) / 0.3, module.dim)
    return linear(module.last, x) * np.exp(-place * np.abs(rates))


def by_hand(mixer: Hyena, u: np.ndarray, mixed: np.ndarray) -> np.ndarray:
    *gates, v = np.split(mixed, mixer.order + 1, axis=-1)
    kernels = np.split(filters(mixer.filters, len(u)), mixer.order - 1, axis=-1)
    for j in range(mixer.order - 1):
        v = gates[mixer.order - 1 - j] * v
        read = [sum(kernels[j][lag] * v[t - lag] for lag in range(t + 1)) for t in range(len(u))]
        v = np.asarray(read) + numbers(mixer.direct)[j] * v
    return linear(mixer.output, v * gates[0])


@pytest.mark.parametrize(('order', 'bands'), [(3, 4), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_the_operator_is_that_of_the_paper(order, bands):
    with jax.enable_x64(True):

        def made(channels, *, length, rngs):
            return ImplicitFilter(channels, length=length, hidden=8, bands=bands, frequency=2.0, rngs=rngs)

        mixer = perturbed(Hyena(DIM, order=order, length=10, filters=made, rngs=nnx.Rngs(0)))
        x = noise(1, 12, DIM, dtype=jnp.float64)
        y, _ = jax.jit(mixer)(x, Context.full(1, 12))
        mixed = jax.jit(lambda x: mixer.prelude(mixer.input(x), None)[0])(x)
        np.testing.assert_allclose(y[0], by_hand(mixer, np.asarray(x[0]), np.asarray(mixed[0])), rtol=1e-9, atol=1e-9)


def test_a_call_too_long_is_refused_and_a_stream_too_long_is_nan():
    mixer = Hyena(DIM, length=8, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='9 tokens do not fit in a state of length 8'):
        jax.eval_shape(mixer, noise(1, 9, DIM), Context.full(1, 9), mixer.init_state(1, 8, jnp.float32))
    with pytest.raises(UserError, match='order of Hyena is 1'):
        Hyena(DIM, order=1, rngs=nnx.Rngs(0))
    state = mixer.init_state(1, 3, jnp.float32)
    step = jax.jit(mixer)
    for t in range(4):
        y, state = step(noise(1, 1, DIM), Context.full(1, 1, start=t), state)
        assert bool(jnp.isfinite(y).all()) == (t < 3)


@pytest.mark.slow
def test_in_float32_a_stream_agrees_with_one_pass_over_4096_tokens():
    mixer = Hyena(8, length=4096, rngs=nnx.Rngs(0))
    x, ctx = noise(1, 4096, 8), Context.full(1, 4096)
    y, _ = jax.jit(mixer)(x, ctx)
    state = mixer.init_state(1, 4096, jnp.float32)
    _, state = jax.jit(mixer)(x[:, :4094], Context.full(1, 4094), state)
    step = jax.jit(mixer)
    for t in (4094, 4095):
        found, state = step(x[:, t : t + 1], Context.full(1, 1, start=t), state)
        assert float(jnp.max(jnp.abs(found[:, 0] - y[:, t]))) < 1e-4 * float(jnp.max(jnp.abs(y)))
