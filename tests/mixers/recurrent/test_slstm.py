"""sLSTM against a loop over tokens, unstabilised, in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit

import attnlab
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.recurrent.slstm import SLSTM
from attnlab.testing.noise import noise, perturbed

DIM, HEADS = 6, 2


def by_hand(mixer: SLSTM, u: np.ndarray, smoothed: np.ndarray) -> np.ndarray:
    W, R, b = (np.asarray(p[...], np.float64) for p in (mixer.inputs, mixer.recurrent, mixer.bias))
    h, c, n = (np.zeros((HEADS, DIM // HEADS)) for _ in range(3))
    rows = []
    for t in range(len(u)):
        read = np.stack([np.einsum('hk,hkv->hv', h, R[gate]) for gate in range(4)])
        x, z = (each[t].reshape(HEADS, -1) for each in (smoothed, u))
        gates = np.stack([np.einsum('hk,hkv->hv', each, W[gate]) for gate, each in enumerate((x, x, z, z))]) + read + b
        write, keep = np.exp(gates[0]), expit(gates[1])
        c, n = keep * c + write * np.tanh(gates[2]), keep * n + write
        h = expit(gates[3]) * c / n
        rows.append(h)
    rows = np.asarray(rows)
    unit = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
    y = unit * np.asarray(mixer.norm.scale[...], np.float64) + np.asarray(mixer.norm.bias[...], np.float64)
    return y.reshape(len(u), -1)


def test_the_layer_is_a_loop_over_tokens_and_documents_start_anew():
    with jax.enable_x64(True):
        mixer = perturbed(SLSTM(DIM, heads=HEADS, rngs=nnx.Rngs(0)), 0.5)
        x = noise(1, 12, DIM, dtype=jnp.float64)
        segments = jnp.asarray([[1] * 5 + [2] * 7], jnp.int32)
        y, _ = jax.jit(mixer)(x, Context(jnp.zeros((1, 12), jnp.int32), segments))
        smoothed, _ = jax.jit(mixer.prelude)(x, segments)
        for start, stop in ((0, 5), (5, 12)):
            expected = by_hand(mixer, np.asarray(x[0, start:stop]), np.asarray(smoothed[0, start:stop]))
            np.testing.assert_allclose(y[0, start:stop], expected, rtol=1e-9, atol=1e-9)


def test_the_convolution_of_the_row_has_a_bias():
    mixer = perturbed(attnlab.make_mixer('slstm', DIM, heads=HEADS, rngs=nnx.Rngs(0)), 0.5)
    silent, _ = mixer.prelude(jnp.zeros((1, 2, DIM)), None)
    np.testing.assert_allclose(silent[0, 0], jax.nn.silu(mixer.prelude.bias[...]), rtol=1e-6)
    assert np.asarray(silent).any()


def test_strong_gates_stay_finite():
    mixer = SLSTM(DIM, heads=HEADS, rngs=nnx.Rngs(0))
    mixer.bias[...] = mixer.bias[...].at[0].set(jnp.asarray([300.0, -300.0, 0.0]))
    y, _ = jax.jit(mixer)(noise(1, 12, DIM), Context.full(1, 12))
    assert bool(jnp.isfinite(y).all())


def test_forget_gates_start_by_a_power_law():
    mixer = SLSTM(32, heads=2, rngs=nnx.Rngs(0))
    forget = np.asarray(mixer.bias[...])[1]
    assert forget[0, 0] == 5 and forget[1, -1] == -7 and (np.diff(forget) < 0).all()
    assert not np.asarray(mixer.recurrent[...]).any()
    with pytest.raises(UserError, match=r'heads is 3; it must divide dim, which is 32$'):
        SLSTM(32, heads=3, rngs=nnx.Rngs(0))
