"""MesaNet against its equations, as loops over tokens in numpy float64 with a direct solver."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from attnlab.errors import UserError
from attnlab.functional.ridge import Regression, ridge_regression
from attnlab.mixers.linear.mesa import MesaNet
from attnlab.nn.gates import OutputGate
from attnlab.testing.contract import Subject, compare_with_differences
from attnlab.testing.contract.streaming import check_decoding
from attnlab.testing.noise import noise
from pallas_kernels import linear_attention
from tests.mixers.linear.equations import (
    DIM,
    HEADS,
    apply,
    check_layer,
    gated_output,
    heads,
    normed,
    sigmoid,
    silu,
    softplus,
)

K = DIM // HEADS


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def direct(q, k, v, strength, decay, ridge) -> np.ndarray:
    """The reads of one head, `t v`."""
    P, S, out = np.zeros((K, K)), np.zeros((K, v.shape[-1])), np.zeros_like(v)
    for t in range(len(q)):
        P = decay[t] * P + strength[t] * np.outer(k[t], k[t])
        S = decay[t] * S + strength[t] * np.outer(k[t], v[t])
        out[t] = S.T @ np.linalg.solve(P + np.diag(ridge), q[t])
    return out


def read(mixer: MesaNet, x: np.ndarray) -> np.ndarray:
    found = []
    for linear, conv in zip((mixer.query, mixer.key), mixer.convs, strict=True):
        projected, taps = apply(linear, x), np.asarray(conv.taps[...], np.float64)
        y = np.zeros_like(projected)
        for t, i in np.ndindex(len(x), len(taps)):
            if t >= i:
                y[t] += taps[-1 - i] * projected[t - i]
        y = heads(silu(y))
        found.append(y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6))
    return of_each_head(mixer, *found, x)


def of_each_head(mixer: MesaNet, q: np.ndarray, k: np.ndarray, x: np.ndarray) -> np.ndarray:
    v = heads(apply(mixer.value, x))
    strength, decay = sigmoid(apply(mixer.strength, x)), sigmoid(apply(mixer.forget.linear, x))
    ridge = softplus(np.asarray(mixer.ridge[...], np.float64)) + 0.25
    return np.stack(
        [direct(q[:, h], k[:, h], v[:, h], strength[:, h], decay[:, h], ridge[h]) for h in range(HEADS)], axis=1
    )


def test_the_layer_is_that_of_the_paper():
    """Which starts with a ridge of one."""
    check_layer('mesa_net', lambda mixer, x: apply(mixer.output, normed(mixer, read(mixer, x))))
    fresh = MesaNet(DIM, heads=HEADS, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(softplus(np.asarray(fresh.ridge[...], np.float64)) + 0.25, 1.0, rtol=1e-6)


def test_without_a_prelude_queries_and_keys_are_projected_alone():
    def layer(mixer: MesaNet, x: np.ndarray) -> np.ndarray:
        q, k = (heads(apply(linear, x)) for linear in (mixer.query, mixer.key))
        q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        return apply(mixer.output, normed(mixer, of_each_head(mixer, q, k, x)))

    check_layer('mesa_net', layer, prelude=None)


@pytest.mark.slow
def test_the_gated_layer_is_that_of_the_paper():
    check_layer('mesa_net', lambda mixer, x: gated_output(mixer, read(mixer, x), x), gate=OutputGate)


def arrays() -> tuple[Array, ...]:
    q, k, v = (noise(1, 9, 1, K, seed=seed, dtype=jnp.float64) for seed in range(3))
    strength = jax.nn.sigmoid(noise(1, 9, 1, seed=3, dtype=jnp.float64))
    ridge = 0.25 + jnp.abs(noise(1, K, seed=4, dtype=jnp.float64))
    return q, k, v, strength, jnp.zeros((1, 9, 1)), ridge


def run(*arrays: Array, steps: int = K) -> Array:
    return ridge_regression(*arrays, steps=steps)[0]


def test_without_decay_it_is_ridge_regression_on_all_pairs():
    """As many steps as channels solve it to rounding, further ones change nothing, and one less does not solve it."""
    q, k, v, strength, log_decay, ridge = arrays()
    root = np.sqrt(np.asarray(strength[0, :, 0]))[:, None]
    inputs = np.concatenate([root * k[0, :, 0], np.diag(np.sqrt(ridge[0]))])
    outputs = np.concatenate([root * v[0, :, 0], np.zeros((K, K))])
    expected = q[0, -1, 0] @ np.linalg.lstsq(inputs, outputs)[0]
    for steps in (K, 3 * K):
        found = run(q, k, v, strength, log_decay, ridge, steps=steps)
        np.testing.assert_allclose(found[0, -1, 0], expected, rtol=1e-9)
    fewer = run(q, k, v, strength, log_decay, ridge, steps=K - 1)
    assert np.abs(fewer[0, -1, 0] - expected).max() > 1e-6


@pytest.mark.slow
def test_the_first_token_is_the_formula_of_sherman_and_morrison():
    q, k, v, strength, log_decay, ridge = arrays()
    b, k0 = strength[0, 0, 0], k[0, 0, 0]
    expected = b * (k0 @ (q[0, 0, 0] / ridge[0])) / (1 + b * k0 @ (k0 / ridge[0])) * v[0, 0, 0]
    np.testing.assert_allclose(run(q, k, v, strength, log_decay, ridge)[0, 0, 0], expected, rtol=1e-10)


@pytest.mark.slow
def test_with_a_large_ridge_it_is_linear_attention():
    q, k, v, strength, _, ridge = arrays()
    log_decay, large = jnp.log(strength[:, ::-1]), jnp.full_like(ridge, 1e9)
    expected, _ = linear_attention(q, k, strength[..., None] * v, log_decay, scale=1.0)
    np.testing.assert_allclose(1e9 * run(q, k, v, strength, log_decay, large), expected, rtol=1e-6)


@pytest.mark.slow
def test_gradients_of_the_solution_are_differences():
    """Through documents and a state too."""
    q, k, v, strength, _, ridge = arrays()
    P = noise(1, 1, K, K, seed=6, dtype=jnp.float64)
    state = P @ jnp.swapaxes(P, -1, -2), noise(1, 1, K, K, seed=7, dtype=jnp.float64)
    weights = noise(1, 9, 1, K, seed=5, dtype=jnp.float64)

    def loss(inputs):
        (*given, factor), (keys, values) = inputs
        keys = (keys + jnp.swapaxes(keys, -1, -2)) / 2
        segments = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 2, 2]])
        y, _ = ridge_regression(*given, factor, steps=3 * K, state=Regression(keys, values), segments=segments)
        return jnp.vdot(weights, y)

    compare_with_differences('ridge regression', loss, ((q, k, v, strength, jnp.log(strength), ridge), state))


def test_gradients_are_in_proportion_to_what_comes_back():
    """With the offset of the released code too, beside which those of a mean over tokens are nothing."""
    q, *others = arrays()
    weights = noise(*q.shape, seed=5, dtype=jnp.float64)

    def gradient(factor: float, offset: float) -> Array:
        solve = functools.partial(ridge_regression, steps=K, offset=offset)
        return jax.grad(lambda q: factor * jnp.vdot(weights, solve(q, *others)[0]))(q)

    whole, small, without = jax.jit(lambda: [gradient(1.0, 1e-5), gradient(1e-6, 1e-5), gradient(1.0, 0.0)])()
    np.testing.assert_allclose(1e6 * small, whole, rtol=1e-9)
    np.testing.assert_allclose(whole, without, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize('strength', [1e-3, 10.0])
def test_long_sequences_stay_finite_and_near_the_definition(strength: float):
    """In float32, of keys of length one as the layer has them, in bfloat16."""
    length = 65536
    with jax.enable_x64(False):
        q, k, v = (noise(1, length, 1, K, seed=seed, dtype=jnp.bfloat16) for seed in range(3))
        q, k = (each / jnp.linalg.norm(each, axis=-1, keepdims=True) for each in (q, k))
        write = jax.nn.sigmoid(noise(1, length, 1, seed=3))
        log_decay = -strength * jnp.abs(noise(1, length, 1, seed=4))
        y, _ = jax.jit(functools.partial(ridge_regression, steps=30))(q, k, v, write, log_decay, jnp.ones((1, K)))
    parts = (np.asarray(each[0, :, 0], np.float64) for each in (q, k, v, write, jnp.exp(log_decay)))
    expected = direct(*parts, np.ones(K))
    assert jnp.all(jnp.isfinite(y))
    np.testing.assert_allclose(y[0, :, 0], expected, rtol=0, atol=1e-3 * np.abs(expected).max())


def released(q, P, ridge, steps: int, offset: float, x: np.ndarray) -> np.ndarray:
    """The steps of the released code (`fla/ops/mesa_net/naive.py`), for one token, from `x`."""
    A = P + np.diag(ridge)
    r = q - A @ x
    p, size = r.copy(), r @ r
    for _ in range(steps):
        length = size / (p @ A @ p + offset)
        x, r = x + length * p, r - length * (A @ p)
        p, size = r + (r @ r) / (size + offset) * p, r @ r
    return x


@pytest.mark.parametrize(('offset', 'guess'), [(0.0, False), (1e-5, False), (0.0, True), (1e-2, True)])
def test_steps_are_those_of_the_released_code(offset: float, guess: bool):
    """Too few to solve it, in a prompt from zero, then for one token, from zero or from the guess."""
    q, k, v, strength, _, ridge = arrays()
    log_decay = jnp.log(strength[:, ::-1])
    how = {'steps': 2, 'offset': offset, 'guess': guess}
    first, last = ([each[:, part] for each in (q, k, v, strength, log_decay)] for part in (slice(8), slice(8, None)))
    prompt, state = ridge_regression(*first, ridge, **how)
    token, _ = ridge_regression(*last, ridge, **how, state=state)
    P, S = np.zeros((K, K)), np.zeros((K, K))
    for t, found in enumerate([*prompt[0, :, 0], token[0, 0, 0]]):
        decay, weighted = np.exp(log_decay[0, t, 0]), strength[0, t, 0] * k[0, t, 0]
        P, S = decay * P + np.outer(weighted, k[0, t, 0]), decay * S + np.outer(weighted, v[0, t, 0])
        start = q[0, t, 0] / (np.diag(P) + ridge[0]) if guess and t == 8 else np.zeros(K)
        solution = released(np.asarray(q[0, t, 0]), P, np.asarray(ridge[0]), 2, offset, np.asarray(start))
        np.testing.assert_allclose(found, S.T @ solution, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('how', [{'offset': 1e-5}, {'guess': True}], ids=str)
def test_the_options_of_the_released_code_keep_the_contract(how: dict):
    with jax.enable_x64(False):
        subject = Subject(functools.partial(MesaNet, heads=4, **how), causal=True)
        check_decoding(subject)


def test_a_solver_makes_a_step():
    with pytest.raises(UserError, match='steps of MesaNet is 0; it must be a whole number of at least 1'):
        MesaNet(DIM, heads=HEADS, steps=0, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='offset of MesaNet is -1'):
        MesaNet(DIM, heads=HEADS, offset=-1.0, rngs=nnx.Rngs(0))
