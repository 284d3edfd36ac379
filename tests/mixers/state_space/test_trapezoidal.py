"""Mamba-3 against its equations, written as loops over tokens in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.config import build, spec
from attnlab.errors import UserError
from attnlab.functional.trapezoid import accumulated_angles, trapezoidal_attention
from attnlab.mixers.state_space.trapezoidal import TrapezoidalSSM
from attnlab.nn.norms import HeadRMSNorm
from attnlab.testing.noise import noise, perturbed
from pallas_kernels import linear_attention
from tests.mixers.linear.equations import DIM, batch, documents, sigmoid, silu, softplus

HEAD_DIM, STATE = 4, 8


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def weights(parameter) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


def made(**overrides) -> TrapezoidalSSM:
    sizes = {'head_dim': HEAD_DIM, 'state': STATE} | overrides
    return perturbed(build(spec(TrapezoidalSSM, **sizes))(DIM, rngs=nnx.Rngs(0)))


def rms(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def rotated(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    out = x.copy()
    for pair, angle in enumerate(angles):
        first, second = x[2 * pair], x[2 * pair + 1]
        out[2 * pair] = first * np.cos(angle) - second * np.sin(angle)
        out[2 * pair + 1] = first * np.sin(angle) + second * np.cos(angle)
    return out


def mamba3(mixer: TrapezoidalSSM, u: np.ndarray) -> np.ndarray:
    inner, rank, heads = 2 * DIM, mixer.rank, 2 * DIM // HEAD_DIM
    widths = [inner, inner, rank * STATE, rank * STATE, heads, heads, heads]
    projected = u @ weights(mixer.input.weight)
    z, x, B, C, step, rate, part, turn = np.split(projected, np.cumsum(widths), axis=1)
    dt, part = softplus(step + weights(mixer.step_size.bias)), sigmoid(part)
    A = -np.where(rate >= 0, 1 + rate, 1 / (1 - rate))
    ones = np.ones((1, heads, HEAD_DIM))
    of_values, of_gates, of_outputs = (
        ones if each is None else weights(each) for each in (mixer.rank_values, mixer.rank_gates, mixer.rank_outputs)
    )
    B, C = (
        rms(each.reshape(len(u), rank, STATE), weights(norm.scale), 1e-5)
        for each, norm in ((B, mixer.key_norm), (C, mixer.query_norm))
    )
    y = np.zeros((len(u), heads, HEAD_DIM))
    for h in range(heads):
        here = slice(h * HEAD_DIM, (h + 1) * HEAD_DIM)
        S, angle, before = np.zeros((STATE, HEAD_DIM)), np.zeros(turn.shape[1]), np.zeros((STATE, HEAD_DIM))
        for t in range(len(u)):
            angle = angle + np.pi * np.tanh(turn[t]) * dt[t, h]
            written, queries, values = np.zeros_like(S), [], []
            for r in range(rank):
                key = rotated(B[t, r] + weights(mixer.key_bias)[r, h], angle)
                queries.append(rotated(C[t, r] + weights(mixer.query_bias)[r, h], angle))
                values.append(x[t, here] * of_values[r, h])
                written += np.outer(key, values[-1])
            decay = np.exp(A[t, h] * dt[t, h])
            S = decay * S + (1 - part[t, h]) * dt[t, h] * decay * before + part[t, h] * dt[t, h] * written
            before = written
            for r in range(rank):
                read = S.T @ queries[r] + weights(mixer.D)[h] * values[r]
                if mixer.norm is not None:
                    read = rms(read, weights(mixer.norm.scale)[h], mixer.norm.eps)
                y[t, h] += read * silu(z[t, here] * of_gates[r, h]) * of_outputs[r, h]
    return y.reshape(len(u), inner) @ weights(mixer.output.weight)


@pytest.mark.parametrize(
    'overrides',
    [{}, {'rank': 3, 'fraction': 1.0, 'norm': spec(HeadRMSNorm, apart=True, eps=1e-5)}],
    ids=['one rank', 'three ranks and a norm'],
)
def test_the_layer_is_that_of_the_paper(overrides):
    mixer = made(**overrides)
    x, ctx = batch()
    y, state = jax.jit(mixer)(x, ctx)
    assert state is None
    np.testing.assert_allclose(y, documents(lambda row: mamba3(mixer, row), x, ctx), rtol=1e-9, atol=1e-9)


attend = jax.jit(trapezoidal_attention)


def arrays(rank: int):
    """Queries, keys, values, log decays and steps; of the keys, values and steps also what they were before."""
    q, k, v = (noise(1, 6, rank, 2, width, seed=seed, dtype=jnp.float64) for seed, width in enumerate((4, 4, 3)))
    log_decay, dt = (jnp.abs(noise(1, 6, 2, seed=seed, dtype=jnp.float64)) for seed in (3, 4))
    return q, k, v, -log_decay, dt


def before(*arrays):
    return tuple(jnp.pad(each, ((0, 0), (1, 0), *((0, 0),) * (each.ndim - 2)))[:, :-1] for each in arrays)


def test_without_a_weight_of_the_past_it_is_the_recurrence_of_mamba2():
    q, k, v, log_decay, dt = arrays(1)
    y, _ = attend(q, k, v, log_decay, dt, jnp.zeros_like(dt), before(k, v, dt))
    q, k, v = (each[:, :, 0] for each in (q, k, v))
    expected, _ = linear_attention(q, k, dt[..., None] * v, log_decay, scale=1.0)
    np.testing.assert_allclose(y[:, :, 0], expected, rtol=1e-10, atol=1e-12)


def test_equal_ranks_with_an_equal_share_of_the_values_are_one():
    q, k, v, log_decay, dt = arrays(1)
    one, _ = attend(q, k, v, log_decay, dt / 3, dt, before(k, v, dt / 3))
    q, k, v = (jnp.repeat(each, 4, axis=2) for each in (q, k, v / 4))
    four, _ = attend(q, k, v, log_decay, dt / 3, dt, before(k, v, dt / 3))
    np.testing.assert_allclose(four, jnp.repeat(one, 4, axis=2), rtol=1e-10, atol=1e-12)


def test_angles_are_sums_less_whole_turns():
    steps, first = noise(1, 50, 2, 3, dtype=jnp.float64), noise(1, 2, 3, seed=1, dtype=jnp.float64)
    starts = jnp.zeros((1, 50), bool).at[0, 20].set(True)
    found = jax.jit(accumulated_angles)(steps, starts, first)
    sums = np.concatenate([first[:, None] + np.cumsum(steps[:, :20], 1), np.cumsum(steps[:, 20:], 1)], axis=1)
    assert found.min() >= 0 and found.max() < 2 * np.pi
    np.testing.assert_allclose(np.exp(1j * found), np.exp(1j * sums), rtol=1e-10, atol=1e-12)


def test_it_starts_as_the_paper_does():
    mixer = TrapezoidalSSM(64, rank=4, rngs=nnx.Rngs(0))
    assert mixer.input.weight.shape == (64, 2 * 128 + 2 * 4 * 128 + 3 * 2 + 32)
    for parameter, value in (
        (mixer.key_bias, 1),
        (mixer.query_bias, 1),
        (mixer.D, 1),
        (mixer.rank_values, 1 / 4),
        (mixer.rank_gates, 1),
        (mixer.rank_outputs, 1 / 4),
    ):
        np.testing.assert_array_equal(parameter[...], np.full(parameter.shape, value, np.float32))
    for parameter in (mixer.D, mixer.step_size.bias):
        assert parameter.get_metadata()['group'] == 'dynamics'


@pytest.mark.parametrize(
    ('sizes', 'message'),
    [
        ({'head_dim': 3}, 'head_dim is 3; it must divide the inner width, 2 times 8'),
        ({'head_dim': 4, 'state': 6}, 'fraction 0.5 of a state of 6 is 3; it must be an even number'),
    ],
)
def test_mistakes_are_named(sizes, message):
    with pytest.raises(UserError, match=message):
        TrapezoidalSSM(DIM, rngs=nnx.Rngs(0), **sizes)
