"""The recurrent block of Griffin and minGRU against their equations, written as loops over tokens in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.config import build
from attnlab.context import Context
from attnlab.mixers.recurrent.diagonal import DiagonalRecurrence
from attnlab.testing.noise import noise, perturbed
from attnlab.zoo.recurrent import RECURRENT

DIM = 8
SEGMENTS = np.asarray([[1] * 9, [1, 1, 1, 2, 2, 3, 3, 0, 0]])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def recipe(name: str, **overrides) -> DiagonalRecurrence:
    """The recipe, every parameter moved off its initial value."""
    factory = build(RECURRENT[name].spec)
    return perturbed(factory.module(DIM, **{**factory.kwargs, **overrides}, rngs=nnx.Rngs(0)))


def weights(parameter) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


def linear(module, x: np.ndarray) -> np.ndarray:
    return x @ weights(module.weight) + weights(module.bias)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def rg_lru(mixer: DiagonalRecurrence, u: np.ndarray) -> np.ndarray:
    gate = gelu(linear(mixer.gate.linear, u))
    lifted, taps = linear(mixer.lift.linear, u), weights(mixer.prelude.taps)
    x = np.zeros_like(lifted)
    for t in range(len(u)):
        x[t] = weights(mixer.prelude.bias)
        for i in range(4):
            if t - 3 + i >= 0:
                x[t] += taps[i] * lifted[t - 3 + i]

    def block_diagonal(module) -> np.ndarray:
        blocks = weights(module.weight)
        groups = np.split(x, len(blocks), axis=1)
        return np.concatenate([g @ w for g, w in zip(groups, blocks, strict=True)], axis=1) + weights(module.bias)

    r, i = sigmoid(block_diagonal(mixer.gates.recurrence_gate)), sigmoid(block_diagonal(mixer.gates.input_gate))
    slowest = sigmoid(-weights(mixer.gates.rate))  # The paper's a, of which a_t is the power 8 r_t.
    h, out = np.zeros(x.shape[1]), np.zeros_like(x)
    for t in range(len(u)):
        a = slowest ** (8 * r[t])
        h = i[t] * x[t] if t == 0 else a * h + np.sqrt(1 - a**2) * i[t] * x[t]
        out[t] = h
    return linear(mixer.output, out * gate)


def mingru(mixer: DiagonalRecurrence, u: np.ndarray) -> np.ndarray:
    z, candidate = sigmoid(linear(mixer.gates.update, u)), linear(mixer.gates.candidate, u)
    candidate = np.where(candidate >= 0, candidate + 0.5, sigmoid(candidate))
    h, out = np.full(z.shape[1], 0.5), np.zeros_like(z)
    for t in range(len(u)):
        h = (1 - z[t]) * h + z[t] * candidate[t]
        out[t] = h
    return linear(mixer.output, out)


def minlstm(mixer: DiagonalRecurrence, u: np.ndarray) -> np.ndarray:
    f, i = sigmoid(linear(mixer.gates.forget, u)), sigmoid(linear(mixer.gates.input, u))
    candidate = linear(mixer.gates.candidate, u)
    candidate = np.where(candidate >= 0, candidate + 0.5, sigmoid(candidate))
    h, out = np.full(f.shape[1], 0.5), np.zeros_like(f)
    for t in range(len(u)):
        h = f[t] / (f[t] + i[t]) * h + i[t] / (f[t] + i[t]) * candidate[t]
        out[t] = h
    return linear(mixer.output, out)


@pytest.mark.parametrize(
    ('equations', 'overrides'),
    [(rg_lru, {'width': 16}), (mingru, {}), (mingru, {'width': 12}), (minlstm, {})],
    ids=['rg_lru', 'mingru', 'wide mingru', 'minlstm'],
)
def test_the_layer_is_that_of_the_paper(equations, overrides):
    mixer = recipe(equations.__name__, **overrides)
    x = noise(2, 9, DIM, dtype=jnp.float64)
    ctx = Context(jnp.zeros((2, 9), jnp.int32), jnp.asarray(SEGMENTS, jnp.int32))
    y, state = jax.jit(mixer)(x, ctx)
    assert state is None
    for i, row in enumerate(SEGMENTS):
        for document in np.unique(row):
            where = row == document
            np.testing.assert_allclose(y[i][where], equations(mixer, np.asarray(x[i])[where]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(('name', 'overrides'), [('rg_lru', {'width': 16}), ('mingru', {})])
@pytest.mark.parametrize('segments', [pytest.param(None, marks=pytest.mark.slow), [1] * 9, [0, 0, 0, 1, 1, 2, 2, 0, 0]])
def test_a_chunk_goes_on_where_the_one_before_stopped(name, overrides, segments):
    """The first token of a chunk starts a document only where the segment changes; of padding likewise."""
    mixer = recipe(name, **overrides)
    x = noise(1, 9, DIM, dtype=jnp.float64)
    ctx = Context(jnp.zeros((1, 9), jnp.int32), None if segments is None else jnp.asarray([segments], jnp.int32))
    whole, _ = jax.jit(mixer)(x, ctx)
    state, pieces = mixer.init_state(1, 9, jnp.float64), []
    for start, stop in ((0, 1), (1, 2), (2, 4), (4, 9)):
        part = Context(ctx.positions[:, start:stop], None if ctx.segments is None else ctx.segments[:, start:stop])
        y, state = jax.jit(mixer)(x[:, start:stop], part, state)
        pieces.append(y)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, rtol=1e-9, atol=1e-9)


def test_the_state_keeps_its_type():
    mixer = recipe('rg_lru', width=16)
    state = mixer.init_state(3, 100, jnp.bfloat16)
    assert state.hidden.shape == (3, 16) and state.hidden.dtype == jnp.float32
    assert mixer.init_state(3, 100, jnp.float64).hidden.dtype == jnp.float64
    assert recipe('mingru').init_state(3, 100, jnp.float32).prelude is None


def test_the_rate_is_of_the_group_dynamics():
    assert recipe('rg_lru', width=16).gates.rate.get_metadata()['group'] == 'dynamics'
