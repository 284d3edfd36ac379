"""Mixed chunk attention against its equations, token by token in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attnlab
from attnlab.context import Context
from attnlab.functional.rotary import rotate
from attnlab.mixers.linear.mixed_chunk import MixedChunkAttention
from attnlab.mixers.softmax.gated_unit import GatedAttentionUnit
from attnlab.testing.noise import noise, perturbed
from tests.mixers.linear.equations import DIM, apply, batch, documents, silu


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def pair(module, z: np.ndarray) -> np.ndarray:
    """A query and a key of every token, rotated."""
    gain, offset = (np.asarray(each[...], np.float64)[:, None] for each in (module.gain, module.offset))
    places = jnp.arange(len(z))[None]
    return np.stack(
        [
            np.asarray(rotate(jnp.asarray(each)[None, :, None], places, base=10000.0))[0, :, 0]
            for each in z[None] * gain + offset
        ]
    )


def flash(mixer: MixedChunkAttention, x: np.ndarray) -> np.ndarray:
    u, v, z = np.split(silu(apply(mixer.input, x)), (2 * DIM, 4 * DIM), axis=-1)
    (q, k), (far_q, far_k) = pair(mixer.local, z), pair(mixer.across, z)
    read = np.zeros_like(v)
    for i in range(len(x)):
        for j in range(i + 1):
            near = i // mixer.chunk == j // mixer.chunk
            score = (q[i] @ k[j] if near else far_q[i] @ far_k[j]) / mixer.chunk
            read[i] += (max(score, 0) ** 2 if near else score) * v[j]
    return apply(mixer.output, u * read)


@pytest.mark.parametrize('chunk', [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_the_layer_is_that_of_the_paper(chunk):
    """Of every document by itself: chunks are counted from its first token."""
    mixer = perturbed(attnlab.make_mixer('flash', DIM, key_dim=6, chunk=chunk, rngs=nnx.Rngs(0)))
    assert isinstance(mixer, MixedChunkAttention)
    assert all(linear.bias is not None for linear in (mixer.input, mixer.output))
    x, ctx = batch()
    y, state = jax.jit(mixer)(x, ctx)
    assert state is None
    np.testing.assert_allclose(y, documents(lambda row: flash(mixer, row), x, ctx), rtol=1e-9, atol=1e-9)


def test_with_one_chunk_it_is_the_gated_attention_unit():
    mixer = perturbed(MixedChunkAttention(DIM, key_dim=6, chunk=12, rngs=nnx.Rngs(0)))
    unit = GatedAttentionUnit(DIM, key_dim=6, length=12, rngs=nnx.Rngs(0))
    unit.input, unit.heads, unit.output = mixer.input, mixer.local, mixer.output
    x, ctx = noise(2, 12, DIM, dtype=jnp.float64), Context.full(2, 12)
    np.testing.assert_allclose(mixer(x, ctx)[0], unit(x, ctx)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_over_a_long_sequence_in_bfloat16_it_stays_near_the_equations():
    mixer, chunk = perturbed(MixedChunkAttention(DIM, key_dim=6, chunk=64, rngs=nnx.Rngs(0))), 64
    x = noise(1, 65536, DIM, dtype=jnp.bfloat16)
    y, _ = jax.jit(mixer)(x, Context.full(1, 65536))
    u, v, z = np.split(silu(apply(mixer.input, np.asarray(x[0], np.float64))), (2 * DIM, 4 * DIM), axis=-1)
    (q, k), (far_q, far_k) = pair(mixer.local, z), pair(mixer.across, z)
    read, memory = np.zeros_like(v), np.zeros((6, 2 * DIM))
    for start in range(0, len(v), chunk):
        part = slice(start, start + chunk)
        weights = np.tril(np.maximum(q[part] @ k[part].T / chunk, 0) ** 2)
        read[part] = weights @ v[part] + far_q[part] @ memory / chunk
        memory = memory + far_k[part].T @ v[part]
    expected = apply(mixer.output, u * read)
    assert jnp.all(jnp.isfinite(y))
    np.testing.assert_allclose(np.asarray(y[0], np.float64), expected, rtol=0, atol=0.02 * np.abs(expected).max())
