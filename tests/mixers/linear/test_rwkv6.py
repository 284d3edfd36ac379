"""RWKV-6 against its equations, as loops over tokens in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.functional.exclusive import exclusive_linear_attention
from attnlab.mixers.linear.rwkv6 import RWKV6
from attnlab.testing.noise import noise
from tests.mixers.linear.equations import DIM, HEADS, SEGMENTS, apply, check_layer, heads, silu


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def rwkv6(mixer: RWKV6, x: np.ndarray) -> np.ndarray:
    step = np.concatenate([np.zeros_like(x[:1]), x[:-1]]) - x
    mixtures = mixer.mixtures
    mix, first, up = (np.asarray(p[...], np.float64) for p in (mixtures.mix, mixtures.first, mixtures.up))
    inner = np.tanh(apply(mixtures.down, x + step * first)).reshape(len(x), 5, -1)
    x_w, x_k, x_v, x_r, x_g = (x + step * (mix[i] + inner[:, i] @ up[i]) for i in range(5))
    r, k, v = heads(apply(mixer.query, x_r)), heads(apply(mixer.key, x_k)), heads(apply(mixer.value, x_v))
    start = np.asarray(mixer.decay.start[...], np.float64)
    w = heads(np.exp(-np.exp(start + apply(mixer.decay.up, np.tanh(apply(mixer.decay.down, x_w))))))
    bonus, gain, offset = (np.asarray(p[...], np.float64) for p in (mixer.bonus, mixer.norm.scale, mixer.norm.bias))
    out = np.zeros_like(v)
    for h in range(HEADS):
        memory = np.zeros((DIM // HEADS,) * 2)
        for t in range(len(x)):
            y = memory.T @ r[t, h] + (r[t, h] * bonus[h] * k[t, h]).sum() * v[t, h]
            memory = w[t, h][:, None] * memory + np.outer(k[t, h], v[t, h])
            out[t, h] = (y - y.mean()) / np.sqrt(y.var() + 1e-5 * len(y)) * gain[h] + offset[h]
    return apply(mixer.output, out.reshape(len(x), -1) * silu(apply(mixer.gate, x_g)))


def test_the_layer_is_that_of_the_paper():
    check_layer('rwkv6', rwkv6, rank=3, mix_rank=2)


@pytest.mark.parametrize('strength', [0.3, 30.0])
def test_reads_before_writes(strength):
    """The definition, step after step, with documents and a state to begin with; also where decays are strong."""
    q, k, v = (noise(2, 9, 2, 4, seed=seed, dtype=jnp.float64) for seed in range(3))
    log_decay = -strength * jnp.abs(noise(2, 9, 2, 4, seed=3, dtype=jnp.float64))
    bonus, state = noise(2, 4, seed=4, dtype=jnp.float64), noise(2, 2, 4, 4, seed=5, dtype=jnp.float64)
    y, last = exclusive_linear_attention(q, k, v, log_decay, bonus, state=state, segments=jnp.asarray(SEGMENTS))
    for row in range(2):
        for h in range(2):
            memory = np.asarray(state[row, h])
            for t in range(9):
                if t and SEGMENTS[row, t] != SEGMENTS[row, t - 1]:
                    memory = np.zeros_like(memory)
                own = np.sum(q[row, t, h] * bonus[h] * k[row, t, h]) * v[row, t, h]
                np.testing.assert_allclose(y[row, t, h], memory.T @ q[row, t, h] + own, rtol=1e-10, atol=1e-12)
                memory = np.exp(log_decay[row, t, h])[:, None] * memory + np.outer(k[row, t, h], v[row, t, h])
            np.testing.assert_allclose(last[row, h], memory, rtol=1e-10, atol=1e-12)


def test_the_first_token_reads_its_bonus_alone():
    q, k, v = (noise(1, 1, 1, 4, seed=seed, dtype=jnp.float64) for seed in range(3))
    y, _ = exclusive_linear_attention(q, k, v, jnp.full((1, 1, 1, 4), -1.0), jnp.full((1, 4), 2.0))
    np.testing.assert_allclose(y, 2 * jnp.sum(q * k) * v, rtol=1e-12)


def test_the_start_is_that_of_the_released_code():
    """Numbers of channels of 8, in heads of 4, half way down."""
    mixer = RWKV6(8, heads=2, place=0.5, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(mixer.mixtures.mix[...][:, 2], [0.5, 0.5, 0.35, *[1 - 0.25**0.25] * 2], rtol=1e-6)
    np.testing.assert_allclose(mixer.decay.start[...][jnp.array([0, 7])], [-6, -1], rtol=1e-6)
    np.testing.assert_allclose(mixer.bonus[...][0, :3], [0.5, 0.5 * 6 / 7 + 0.1, 0.5 * 5 / 7 - 0.1], rtol=1e-5)


def test_layers_start_by_their_place_as_in_the_released_code():
    """The third of four: mixtures by the layers that remain, that of values by the place too, gains below one."""
    third = RWKV6(8, heads=2, place=2 / 3, remaining=0.5, norm_gain=0.75**0.7, rngs=nnx.Rngs(0))
    steep, gentle = 1 - 0.25**0.5, 1 - 0.25**0.25
    np.testing.assert_allclose(third.mixtures.mix[...][:, 2], [steep, steep, steep - 0.2, gentle, gentle], rtol=1e-6)
    np.testing.assert_allclose(third.decay.start[...][3], -6 + 5 * (3 / 7) ** (0.7 + 1.3 * 2 / 3), rtol=1e-6)
    np.testing.assert_allclose(third.norm.scale[...], np.full((2, 4), 0.75**0.7), rtol=1e-6)


def test_errors():
    with pytest.raises(UserError, match=r'heads is 3; it must divide dim, which is 8$'):
        RWKV6(8, heads=3, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='the place of RWKV6 is 2'):
        RWKV6(8, heads=2, place=2.0, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r'remaining of RWKV6 is 1\.5'):
        RWKV6(8, heads=2, remaining=1.5, rngs=nnx.Rngs(0))
