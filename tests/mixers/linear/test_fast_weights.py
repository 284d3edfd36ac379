"""Fast weights against their equations, as loops over tokens in numpy float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from attnlab.context import Context
from attnlab.mixers.linear.fast_weights import FastWeights
from attnlab.nn.fast_weights import (
    AverageDescent,
    AverageRates,
    InnerLoss,
    MomentumDescent,
    MomentumRates,
    NormedResidual,
    SquaredError,
)
from attnlab.nn.gates import OutputGate
from attnlab.nn.preludes import ShortConv
from attnlab.testing.noise import noise
from pallas_kernels import delta_rule, diagonal_low_rank, linear_attention
from tests.mixers.linear.equations import (
    DIM,
    HEADS,
    apply,
    batch,
    check_layer,
    convolved,
    gated_output,
    heads,
    recipe,
    sigmoid,
)

K = DIM // HEADS


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def layer_norm(z: np.ndarray, gain: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    deviation = np.sqrt(z.var() + 1e-6)
    unit = (z - z.mean()) / deviation
    return unit * gain + offset, unit, deviation


def rotated(x: np.ndarray, place: int) -> np.ndarray:
    """Neighbouring channels as complex numbers, times a power of the unit."""
    pairs = x[..., 0::2] + 1j * x[..., 1::2]
    pairs = pairs * np.exp(1j * place * 10000.0 ** (-np.arange(0, K, 2) / K))
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


def ttt(mixer: FastWeights, q, k, v, rate, h: int, chunk: int) -> np.ndarray:
    """The reads of head `h`, `t v`, of queries and keys `t k` that are rotated already."""
    parts = (mixer.start, mixer.bias, mixer.loss.norm.scale, mixer.loss.norm.bias)
    W, (c,), gains, offsets = (np.asarray(p[h], np.float64) for p in parts)
    shares, out = np.asarray(mixer.descent.offsets[...], np.float64), np.zeros_like(q)
    for t in range(len(q)):
        i = t % chunk
        if i == 0:
            base, base_c, total, total_c = W, c, np.zeros_like(W), np.zeros_like(c)
        normed, unit, deviation = layer_norm(k[t] @ base + base_c, gains, offsets)
        g = (normed - (v[t] - k[t])) * gains
        g = (g - g.mean() - unit * (g * unit).mean()) / deviation
        total, total_c = total + rate[t] * np.outer(k[t], g), total_c + rate[t] * g
        share = max(0.0, 1 / (i + 1) + shares[i])
        W, c = base - share * total, base_c - share * total_c
        out[t] = q[t] + layer_norm(q[t] @ W + c, gains, offsets)[0]
    return out


def ttt_reads(mixer: FastWeights, q: np.ndarray, k: np.ndarray, v: np.ndarray, x: np.ndarray, chunk: int) -> np.ndarray:
    """Of queries and keys `t h k`, the reads of all heads with their norm, `t d`."""
    q, k = (np.stack([rotated(each, t % chunk) for t, each in enumerate(a)]) for a in (q, k))
    rate = sigmoid(apply(mixer.descent.step, x)) / K
    each = [ttt(mixer, q[:, h], k[:, h], v[:, h], rate[:, h], h, chunk) for h in range(HEADS)]
    out = np.concatenate(each, axis=1)
    out = (out - out.mean(-1, keepdims=True)) / np.sqrt(out.var(-1, keepdims=True) + 1e-6)
    gain, offset = (np.asarray(p[...], np.float64) for p in (mixer.joint_norm.scale, mixer.joint_norm.bias))
    return out * gain + offset


def ttt_linear(mixer: FastWeights, x: np.ndarray, chunk: int) -> np.ndarray:
    q, k, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.key, mixer.value))
    return apply(mixer.output, ttt_reads(mixer, q, k, v, x, chunk))


IN_MAMBA = {
    'tied': True,
    'prelude': functools.partial(ShortConv, activation=None, bias=True),
    'gate': functools.partial(OutputGate, activation='gelu'),
}
"""The form for the blocks of Mamba, `TTTLinear` of `ttt/models/ttt_layer.py` in test-time-training/ttt-lm-jax."""


def plainly_convolved(conv: ShortConv, x: np.ndarray) -> np.ndarray:
    taps, bias = (np.asarray(each[...], np.float64) for each in (conv.taps, conv.bias))
    past = np.concatenate([np.zeros((len(taps) - 1, x.shape[1])), x])
    return bias + np.stack([(taps * past[t : t + len(taps)]).sum(0) for t in range(len(x))])


def ttt_in_mamba(mixer: FastWeights, x: np.ndarray, chunk: int) -> np.ndarray:
    """Queries and keys are convolutions, with a bias, of one projection; the values and the gate, by GELU, are maps."""
    both, u = apply(mixer.query, x), apply(mixer.gate.linear, x)
    q, k = (heads(plainly_convolved(conv, both)) for conv in mixer.preludes)
    read = ttt_reads(mixer, q, k, heads(apply(mixer.value, x)), x, chunk)
    gelu = u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3))) / 2
    return apply(mixer.output, gelu * read)


def titans(q, k, v, rate, momentum, kept, W: np.ndarray, chunk: int) -> np.ndarray:
    """The reads of one head, `t v`."""
    S, out, base = np.zeros_like(W), np.zeros_like(v), W
    for t in range(len(q)):
        base = W if t % chunk == 0 else base
        S = momentum[t] * S - rate[t] * 2 * np.outer(k[t], k[t] @ base - v[t])
        W = kept[t] * W + S
        out[t] = q[t] @ W
    return out


def titans_linear(mixer: FastWeights, x: np.ndarray, chunk: int) -> np.ndarray:
    q, k, v = convolved(mixer, x)
    q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    descent = mixer.descent
    momentum, forget = (
        sigmoid(apply(linear, x) + np.asarray(bias[...], np.float64))
        for linear, bias in ((descent.momentum, descent.momentum_bias), (descent.forget, descent.forget_bias))
    )
    rate = (1 - momentum) * sigmoid(apply(descent.step, x)) / chunk
    start = np.asarray(mixer.start[...], np.float64)
    arrays = (q, k, v, rate, momentum, 1 - forget)
    out = np.stack([titans(*(a[:, h] for a in arrays), start[h], chunk) for h in range(HEADS)], axis=1)
    return gated_output(mixer, out, x)


EQUATIONS = {
    'ttt_linear': ('ttt_linear', ttt_linear, {}),
    'ttt_linear in the blocks of Mamba': ('ttt_linear', ttt_in_mamba, IN_MAMBA),
    'titans_linear': ('titans_linear', titans_linear, {}),
}


@pytest.mark.parametrize('form', EQUATIONS)
def test_the_layer_is_that_of_the_paper(form: str):
    """Documents of a packed row token by token, and a row of one document by mini-batches, the last one short."""
    name, layer, overrides = EQUATIONS[form]
    equations = functools.partial(layer, chunk=4)
    check_layer(name, equations, chunk=4, **overrides)
    mixer, x = recipe(name, chunk=4, **overrides), batch()[0]
    y, _ = jax.jit(mixer)(x, Context.full(*x.shape[:2]))
    for found, row in zip(y, x, strict=True):
        np.testing.assert_allclose(found, equations(mixer, np.asarray(row)), rtol=1e-9, atol=1e-9)


def test_tied_queries_and_keys_stream_as_they_are_read_at_once():
    """Two preludes have states, split anywhere."""
    mixer, (x, ctx) = recipe('ttt_linear', chunk=4, **IN_MAMBA), batch()
    whole, _ = jax.jit(mixer)(x, ctx)
    state, parts = mixer.init_state(*x.shape[:2], x.dtype), []
    assert mixer.key is None and len(state.preludes) == 2
    for piece in (slice(0, 3), slice(3, 4), slice(4, None)):
        part = Context(ctx.positions[:, piece], ctx.segments[:, piece])
        y, state = jax.jit(mixer)(x[:, piece], part, state)
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, rtol=1e-9, atol=1e-9)


class Minus(InnerLoss):
    """The product with the value, negative."""

    def __init__(self, channels: int, *, heads: int, rngs: nnx.Rngs):
        pass

    def __call__(self, z: Array, k: Array, v: Array) -> Array:
        return -jnp.sum(z * v, axis=-1)

    def read(self, z: Array, q: Array) -> Array:
        return z


def made(loss, descent, chunk: int) -> FastWeights:
    mixer = FastWeights(DIM, heads=HEADS, loss=loss, descent=descent, chunk=chunk, rngs=nnx.Rngs(0))
    mixer.start[...] = jnp.zeros_like(mixer.start[...])
    return mixer


def arrays(length: int = 9) -> tuple[Array, ...]:
    """Queries, keys, values, two arrays of numbers in (0, 1), the second near 1."""
    q, k, v = (noise(2, length, HEADS, K, seed=seed, dtype=jnp.float64) for seed in range(3))
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    first, second = (jax.nn.sigmoid(noise(2, length, HEADS, seed=seed, dtype=jnp.float64)) for seed in (3, 4))
    return q, k, v, first, second


def test_with_one_token_a_batch_it_is_the_delta_rule():
    """Squared errors have twice the gradient of their halves, which the delta rule descends."""
    q, k, v, beta, _ = arrays()
    mixer = made(SquaredError, AverageDescent, chunk=1)
    y = mixer._by_chunk(q, k, v, AverageRates(beta / 2, jnp.ones_like(beta)))
    np.testing.assert_allclose(y, delta_rule(q, k, v, beta, scale=1.0)[0], rtol=1e-10, atol=1e-12)


def test_without_momentum_one_token_a_batch_it_erases_before_it_forgets():
    q, k, v, step, kept = arrays()
    mixer = made(SquaredError, MomentumDescent, chunk=1)
    y = mixer._by_chunk(q, k, v, MomentumRates(step, jnp.full_like(step, -1e9), jnp.log(kept)))
    double = 2 * step[..., None]
    expected, _ = diagonal_low_rank(q, k, double * v, -double * k, None, jnp.log(kept), scale=1.0)
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('chunk', [1, 4, 9])
def test_of_a_product_it_is_linear_attention_with_decay_at_any_batch(chunk: int):
    """The gradient then does not depend on the weights; nine tokens in one batch are one masked product."""
    q, k, v, step, kept = arrays()
    mixer = made(Minus, MomentumDescent, chunk=chunk)
    y = mixer._by_chunk(q, k, v, MomentumRates(step, jnp.full_like(step, -1e9), jnp.log(kept)))
    expected, _ = linear_attention(q, k, step[..., None] * v, jnp.log(kept), scale=1.0)
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)


def test_momentum_of_one_token_a_batch_is_momentum_delta_net():
    """`M = m M - 2 s k (v - S^T k)^T`, `S = f S - M`, at any rates."""
    q, k, v, step, kept = arrays()
    momentum = kept[:, ::-1]
    mixer = made(SquaredError, MomentumDescent, chunk=1)
    y = mixer._by_chunk(q, k, v, MomentumRates(step, jnp.log(momentum), jnp.log(kept)))
    for row, h in np.ndindex(2, HEADS):
        S, M = np.zeros((K, K)), np.zeros((K, K))
        for t in range(9):
            M = momentum[row, t, h] * M - 2 * step[row, t, h] * np.outer(
                k[row, t, h], v[row, t, h] - S.T @ k[row, t, h]
            )
            S = kept[row, t, h] * S - M
            np.testing.assert_allclose(y[row, t, h], S.T @ q[row, t, h], rtol=1e-10, atol=1e-12)


def test_gradients_with_respect_to_weights_are_keys_times_those_of_outputs():
    """The loss as a function of the weights, differentiated."""
    loss = recipe('ttt_linear').loss
    k, v = (noise(1, 3, HEADS, K, seed=seed, dtype=jnp.float64) for seed in range(2))
    weights = noise(1, HEADS, K, K, seed=2, dtype=jnp.float64)

    def outputs(weights: Array) -> Array:
        return jnp.einsum('bchm,bhmv->bchv', k, weights)

    expected = jax.jit(jax.grad(lambda weights: jnp.sum(loss(outputs(weights), k, v))))(weights)
    found = jax.jit(lambda: jnp.einsum('bchm,bchv->bhmv', k, loss.gradient(outputs(weights), k, v)))()
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize('length', [127, 128])
def test_rows_of_any_length_keep_the_weights_of_few_tokens(length):
    """The three matrices of a memory every 64 tokens, for the backward pass of packed documents."""
    mixer = recipe('titans_linear', chunk=4)
    ctx = dataclasses.replace(Context.full(1, length), segments=jnp.ones((1, length), jnp.int32))
    x = jax.ShapeDtypeStruct((1, length, DIM), jnp.float64)
    kept = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(lambda x: mixer(x, ctx)[0], x)[1], x))
    matrices = sum(leaf.size for leaf in kept if leaf.shape[-3:] == (HEADS, K, K)) / (HEADS * K * K)
    assert 2 * 3 <= matrices <= 4 * 3


@pytest.mark.slow
@pytest.mark.parametrize('strength', [1e-3, 10.0])
def test_long_sequences_stay_finite_and_near_the_definition(strength: float):
    """Momentum and forgetting, weak and strong, of queries, keys and values in bfloat16."""
    length, chunk = 65536, 16
    with jax.enable_x64(False):
        q, k, v = (noise(1, length, 1, K, seed=seed, dtype=jnp.bfloat16).astype(jnp.float32) for seed in range(3))
        k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
        step, log_momentum, log_kept = (jnp.abs(noise(1, length, 1, seed=seed)) for seed in (3, 4, 5))
        rates = MomentumRates(jax.nn.sigmoid(step) / (4 * chunk), -log_momentum, -strength * log_kept)
        mixer = FastWeights(K, heads=1, loss=SquaredError, descent=MomentumDescent, chunk=chunk, rngs=nnx.Rngs(0))
        y = jax.jit(mixer._by_chunk)(q, k, v, rates)
        start = np.asarray(mixer.start[0], np.float64)
    parts = (q, k, v, rates.step, jnp.exp(rates.log_momentum), jnp.exp(rates.log_kept))
    expected = titans(*(np.asarray(each[0, :, 0], np.float64) for each in parts), start, chunk)
    assert jnp.all(jnp.isfinite(y))
    np.testing.assert_allclose(y[0, :, 0], expected, rtol=0, atol=1e-3 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize('strength', [1e-3, 1.0])
def test_averages_of_gradients_over_a_long_sequence_stay_near_the_definition(strength: float):
    """Steps weak and strong, of queries, keys and values in bfloat16."""
    length, chunk = 65536, 16
    with jax.enable_x64(False):
        q, k, v = (noise(1, length, 1, K, seed=seed, dtype=jnp.bfloat16).astype(jnp.float32) for seed in range(3))
        step = strength * jax.nn.sigmoid(noise(1, length, 1, seed=3)) / K
        factor = 1 / (jnp.arange(length, dtype=jnp.float32) % chunk + 1)
        rates = AverageRates(step, jnp.broadcast_to(factor[None, :, None], step.shape))
        loss = {'loss': NormedResidual, 'descent': AverageDescent, 'bias': True}
        mixer = FastWeights(K, heads=1, **loss, chunk=chunk, rngs=nnx.Rngs(0))
        y = jax.jit(mixer._by_chunk)(q, k, v, rates)
    parts = (np.asarray(each[0, :, 0], np.float64) for each in (q, k, v, step))
    expected = ttt(mixer, *parts, 0, chunk)
    assert jnp.all(jnp.isfinite(y))
    np.testing.assert_allclose(y[0, :, 0], expected, rtol=0, atol=1e-3 * np.abs(expected).max())
