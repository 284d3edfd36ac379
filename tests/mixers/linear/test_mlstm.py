"""mLSTM against its equations without a stabiliser, as loops over tokens in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.functional.stabilised import running_maximum, stabilised_linear_attention
from attnlab.mixers.linear.mlstm import MLSTM
from attnlab.mixers.linear.mlstm_block import MLSTMBlock
from attnlab.testing.noise import noise
from pallas_kernels import linear_attention
from tests.mixers.linear.equations import (
    DIM,
    HEADS,
    SEGMENTS,
    apply,
    batch,
    check_layer,
    documents,
    heads,
    recipe,
    sigmoid,
    silu,
)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def unstabilised(q, k, v, log_forget, log_input, memory, eps=0.0) -> np.ndarray:
    """The equations of one head as they stand, `t k`; `memory` has a last column for the keys themselves."""
    out = np.zeros_like(v)
    for t in range(len(q)):
        written = np.outer(k[t], np.append(v[t], 1.0))
        memory = np.exp(log_forget[t]) * memory + np.exp(log_input[t]) * written
        read = memory.T @ q[t] / np.sqrt(q.shape[-1])
        out[t] = read[:-1] / (max(abs(read[-1]), 1.0) + eps)
    return out


def mlstm(mixer: MLSTM, x: np.ndarray) -> np.ndarray:
    q, k, v = (heads(apply(linear, x)) for linear in (mixer.query, mixer.key, mixer.value))
    biases = (np.asarray(p[...], np.float64) for p in (mixer.input_bias, mixer.forget_bias))
    given, kept = (
        15 * np.tanh((apply(linear, x) + bias) / 15)
        for linear, bias in zip((mixer.input_gate, mixer.forget_gate), biases, strict=True)
    )
    gain, offset = (np.asarray(p[...], np.float64) for p in (mixer.norm.scale, mixer.norm.bias))
    out = np.zeros_like(v)
    for h in range(HEADS):
        empty = np.zeros((q.shape[-1], v.shape[-1] + 1))
        y = unstabilised(q[:, h], k[:, h], v[:, h], np.log(sigmoid(kept[:, h])), given[:, h], empty, eps=1e-6)
        y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
        out[:, h] = y * gain[h] + offset[h]
    return apply(mixer.output, out.reshape(len(x), -1) * sigmoid(apply(mixer.gate, x)))


def block_of_xlstm(mixer: MLSTMBlock, x: np.ndarray) -> np.ndarray:
    """`mLSTMLayer` and `mLSTMCell` of the released code."""
    m, z = np.split(apply(mixer.input, x), 2, axis=1)
    c, taps = np.zeros_like(m) + np.asarray(mixer.prelude.bias[...]), np.asarray(mixer.prelude.taps[...], np.float64)
    for t, i in np.ndindex(len(x), len(taps)):
        if t >= i:
            c[t] += taps[-1 - i] * m[t - i]
    c = silu(c)
    q, k, v = (
        np.einsum('tbi,bio->tbo', y.reshape(len(x), -1, 4), np.asarray(linear.weight[...], np.float64)).reshape(y.shape)
        for linear, y in ((mixer.query, c), (mixer.key, c), (mixer.value, m))
    )
    seen = np.concatenate([q, k, v], axis=1)
    given = apply(mixer.input_gate, seen) + np.asarray(mixer.input_bias[...])
    kept = np.log(sigmoid(apply(mixer.forget_gate, seen) + np.asarray(mixer.forget_bias[...])))
    q, k, v = (heads(each) for each in (q, k, v))
    out, gain = np.zeros_like(v), np.asarray(mixer.norm.scale[...], np.float64)
    for h in range(HEADS):
        empty = np.zeros((q.shape[-1], v.shape[-1] + 1))
        y = unstabilised(q[:, h], k[:, h], v[:, h], kept[:, h], given[:, h], empty)
        out[:, h] = gain[h] * (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
    return apply(mixer.output, (out.reshape(m.shape) + np.asarray(mixer.skip[...]) * c) * silu(z))


def test_the_block_is_that_of_the_released_code():
    """But for the eps of denominators, which depends on a stabiliser there."""
    mixer = recipe('mlstm_block')
    x, ctx = batch()
    y, _ = jax.jit(mixer)(x, ctx)
    expected = documents(lambda row: block_of_xlstm(mixer, row), x, ctx)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    fresh = MLSTMBlock(DIM, heads=HEADS, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(fresh.forget_bias[...], [3.0, 6.0])
    assert not fresh.input_gate.weight[...].any() and 0 < jnp.abs(fresh.input_bias[...]).max() < 0.5
    np.testing.assert_array_equal(fresh.skip[...], np.ones(2 * DIM))


def test_the_layer_is_that_of_the_paper():
    check_layer('mlstm', mlstm)
    check_layer('mlstm', mlstm, input_bias=2.0)


def arrays(scale: float):
    q, k, v = (noise(2, 9, 2, 4, seed=seed, dtype=jnp.float64) for seed in range(3))
    forget, given = (noise(2, 9, 2, seed=seed, dtype=jnp.float64) for seed in (3, 4))
    return q, k, v, jax.nn.log_sigmoid(scale * forget), scale * given


NOTHING = (jnp.zeros((2, 2, 4, 5)), jnp.zeros((2, 2)))


@pytest.mark.parametrize('scale', [pytest.param(1.0, marks=pytest.mark.slow), 30.0])
def test_stabilised_is_unstabilised(scale):
    """Over documents, and in pieces whose state is handed on; logits of input gates to either side of 30 among them."""
    q, k, v, forget, given = arrays(scale)
    segments = jnp.asarray(SEGMENTS)
    fresh = jnp.zeros(2, bool)
    y, _ = stabilised_linear_attention(
        q, k, v, forget, given, state=NOTHING, continues=fresh, segments=segments, eps=0.0
    )
    for row in range(2):
        for document in np.unique(SEGMENTS[row]):
            where = SEGMENTS[row] == document
            for h in range(2):
                parts = (np.asarray(each[row, :, h])[where] for each in (q, k, v, forget, given))
                expected = unstabilised(*parts, np.zeros((4, 5)))
                np.testing.assert_allclose(y[row, :, h][where], expected, rtol=1e-9, atol=1e-12)
    state, continues, pieces = NOTHING, fresh, []
    for start, end in ((0, 1), (1, 4), (4, 9)):
        part = [each[:, start:end] for each in (q, k, v, forget, given)]
        if start:
            continues = segments[:, start] == segments[:, start - 1]
        piece, state = stabilised_linear_attention(
            *part, state=state, continues=continues, segments=segments[:, start:end], eps=0.0
        )
        pieces.append(piece)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), y, rtol=1e-9, atol=1e-12)


def test_no_number_is_above_what_is_written():
    """In float32, with logits that float32 could not exponentiate."""
    q, k, v, forget, given = (each.astype(jnp.float32) for each in arrays(200.0))
    state = tuple(each.astype(jnp.float32) for each in NOTHING)
    y, (memory, _) = stabilised_linear_attention(q, k, v, forget, given, state=state, continues=jnp.zeros(2, bool))
    assert jnp.all(jnp.isfinite(y)) and jnp.max(jnp.abs(memory)) < 9 * 9


def test_with_input_gates_of_one_it_is_linear_attention():
    q, k, v, forget, given = arrays(1.0)
    zero = jnp.zeros_like(given)
    y, _ = stabilised_linear_attention(q, k, v, forget, zero, state=NOTHING, continues=jnp.zeros(2, bool), eps=0.0)
    read, _ = linear_attention(q, k, jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1), forget)
    np.testing.assert_allclose(y, read[..., :-1] / jnp.maximum(jnp.abs(read[..., -1:]), 1), rtol=1e-9, atol=1e-12)


def test_the_running_maximum_is_its_recurrence():
    forget, given = -jnp.abs(noise(1, 40, 2, dtype=jnp.float64)), noise(1, 40, 2, seed=1, dtype=jnp.float64)
    found, m = running_maximum(forget, given), -np.inf
    for t in range(40):
        m = np.maximum(np.asarray(forget[0, t]) + m, given[0, t])
        np.testing.assert_allclose(found[0, t], m, rtol=1e-12)


def test_heads_that_do_not_divide():
    with pytest.raises(UserError, match='heads is 3; it must divide dim, which is 8, unless value_dim is given'):
        MLSTM(DIM, heads=3, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='block of MLSTMBlock is 3; it must divide the inner width, 2 times 8'):
        MLSTMBlock(DIM, heads=HEADS, block=3, rngs=nnx.Rngs(0))
