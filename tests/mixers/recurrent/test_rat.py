"""RAT against its equations, and its two ends: chunks of one token are attention, one chunk is a recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit, softmax

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.rotary import rotate
from attnlab.mixers.recurrent.rat import RAT
from attnlab.nn.positions import Rope
from attnlab.testing.noise import noise, perturbed
from pallas_kernels import attention

DIM, HEADS, LENGTH = 8, 4, 11


def made(chunk: int) -> RAT:
    return perturbed(RAT(DIM, heads=HEADS, chunk=chunk, rngs=nnx.Rngs(0)))


def weights(module) -> np.ndarray:
    return np.asarray(module.weight[...], np.float64)


def parts(mixer: RAT, u: np.ndarray) -> tuple[np.ndarray, ...]:
    """Queries, keys and values by head, and gates."""
    q, k = (
        np.tile((u @ weights(each)).reshape(len(u), 2, -1), (1, HEADS // 2, 1)) for each in (mixer.query, mixer.key)
    )
    v = (u @ weights(mixer.value)).reshape(len(u), HEADS, -1)
    return q, k, v, expit(u @ weights(mixer.forget) + np.asarray(mixer.bias[...], np.float64)).reshape(v.shape)


def rotated(x: np.ndarray, places: np.ndarray) -> np.ndarray:
    return np.asarray(rotate(jnp.asarray(x[None]), jnp.asarray(places[None], jnp.int32), base=10000.0))[0]


def by_hand(mixer: RAT, u: np.ndarray) -> np.ndarray:
    q, k, v, g = parts(mixer, u)
    running = np.zeros((2, *k[0].shape))
    states = []
    for t in range(len(u)):
        past = np.zeros_like(running) if t % mixer.chunk == 0 else running
        running = g[t] * past + (1 - g[t]) * np.stack([k[t], v[t]])
        states.append(running)
    places = np.arange(len(u)) // mixer.chunk
    keys, values = rotated(np.asarray(states)[:, 0], places), np.asarray(states)[:, 1]
    q, out = rotated(q, places), np.zeros_like(v)
    for t in range(len(u)):
        seen = [j for j in range(t) if j % mixer.chunk == mixer.chunk - 1] + [t]
        for h in range(HEADS):
            out[t, h] = softmax(keys[seen, h] @ q[t, h] / np.sqrt(DIM // HEADS)) @ values[seen, h]
    return out.reshape(len(u), -1) * expit(u @ weights(mixer.output_gate)) @ weights(mixer.output)


@pytest.mark.parametrize('chunk', [4, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_the_layer_is_that_of_the_paper(chunk):
    with jax.enable_x64(True):
        mixer = made(chunk)
        x = noise(1, LENGTH, DIM, dtype=jnp.float64)
        y, _ = jax.jit(mixer)(x, Context.full(1, LENGTH))
        np.testing.assert_allclose(y[0], by_hand(mixer, np.asarray(x[0])), rtol=1e-9, atol=1e-9)


def test_chunks_of_one_token_whose_gates_are_shut_are_attention():
    with jax.enable_x64(True):
        mixer = made(1)
        mixer.forget.weight[...] = 0 * mixer.forget.weight[...]
        mixer.bias[...] = mixer.bias[...] - 100
        x = noise(1, LENGTH, DIM, dtype=jnp.float64)
        y, _ = jax.jit(mixer)(x, Context.full(1, LENGTH))
        q, k, v, _ = parts(mixer, np.asarray(x[0]))
        places = np.arange(LENGTH)
        read = attention(*(jnp.asarray(each)[None] for each in (rotated(q, places), rotated(k, places), v)))
        gated = np.asarray(read).reshape(LENGTH, -1) * expit(np.asarray(x[0]) @ weights(mixer.output_gate))
        np.testing.assert_allclose(y[0], gated @ weights(mixer.output), rtol=1e-9, atol=1e-9)


def test_one_chunk_is_a_recurrence_whatever_the_queries():
    with jax.enable_x64(True):
        mixer = made(LENGTH)
        x = noise(1, LENGTH, DIM, dtype=jnp.float64)
        y, _ = jax.jit(mixer)(x, Context.full(1, LENGTH))
        _, _, v, g = parts(mixer, np.asarray(x[0]))
        h, read = np.zeros_like(v[0]), []
        for t in range(LENGTH):
            h = g[t] * h + (1 - g[t]) * v[t]
            read.append(h.reshape(-1))
        gated = np.asarray(read) * expit(np.asarray(x[0]) @ weights(mixer.output_gate))
        np.testing.assert_allclose(y[0], gated @ weights(mixer.output), rtol=1e-9, atol=1e-9)


def test_gates_start_with_the_lengths_of_chunks_and_the_state_shrinks_by_them():
    mixer = RAT(64, heads=4, chunk=16, rngs=nnx.Rngs(0))
    assert mixer.bias[...].min() >= 0 and 2.3 < mixer.bias[...].max() <= np.log(15.001)
    assert mixer.init_state(2, 160, jnp.bfloat16).summaries.keys.shape == (2, 10, 4, 16)
    with pytest.raises(UserError, match='3 groups do not divide 4 heads'):
        RAT(64, heads=4, groups=3, position=Rope(), rngs=nnx.Rngs(0))
