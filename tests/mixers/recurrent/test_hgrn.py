"""HGRN against its equations, written as a loop over tokens in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit

import attnlab
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.recurrent.hgrn import HGRN
from attnlab.nn.norms import LayerNorm
from attnlab.testing.noise import noise, perturbed

DIM = 4


def mapped(module, x: np.ndarray) -> np.ndarray:
    y = x @ np.asarray(module.weight[...], np.float64)
    return y if module.bias is None else y + np.asarray(module.bias[...], np.float64)


def by_hand(mixer: HGRN, u: np.ndarray) -> np.ndarray:
    def linear(module) -> np.ndarray:
        return mapped(module, u)

    def silu(x: np.ndarray) -> np.ndarray:
        return x * expit(x)

    candidate = silu(linear(mixer.candidate))
    candidate = candidate[:, :DIM] + 1j * candidate[:, DIM:]
    kept = mixer.bound + (1 - mixer.bound) * expit(linear(mixer.forget))
    turn = np.exp(1j * np.asarray(mixer.angle[...], np.float64))
    h, read = np.zeros(DIM, complex), []
    for t in range(len(u)):
        h = kept[t] * turn * h + (1 - kept[t]) * candidate[t]
        read.append(np.concatenate([h.real, h.imag]))
    read = np.asarray(read)
    scale = np.asarray(mixer.norm.scale[...], np.float64)
    if isinstance(mixer.norm, LayerNorm):
        read = (read - read.mean(-1, keepdims=True)) / np.sqrt(read.var(-1, keepdims=True) + 1e-5) * scale
        read = read + np.asarray(mixer.norm.bias[...], np.float64)
    else:
        read = read / np.sqrt((read**2).mean(-1, keepdims=True) + 1e-6) * scale
    return mapped(mixer.output, read * silu(linear(mixer.gate)))


@pytest.mark.parametrize('bound', [0.0, 0.7])
def test_the_layer_is_that_of_the_paper(bound):
    with jax.enable_x64(True):
        mixer = perturbed(HGRN(DIM, lower_bound=bound, rngs=nnx.Rngs(0)))
        x = noise(1, 9, DIM, dtype=jnp.float64)
        y, _ = jax.jit(mixer)(x, Context.full(1, 9))
        np.testing.assert_allclose(y[0], by_hand(mixer, np.asarray(x[0])), rtol=1e-9, atol=1e-9)


def test_the_row_has_the_biases_and_the_layer_norm_of_the_released_code():
    with jax.enable_x64(True):
        mixer = perturbed(attnlab.make_mixer('hgrn', DIM, rngs=nnx.Rngs(0)))
        assert isinstance(mixer.norm, LayerNorm)
        assert all(linear.bias is not None for linear in (mixer.candidate, mixer.gate, mixer.forget, mixer.output))
        x = noise(1, 9, DIM, dtype=jnp.float64)
        y, _ = jax.jit(mixer)(x, Context.full(1, 9))
        np.testing.assert_allclose(y[0], by_hand(mixer, np.asarray(x[0])), rtol=1e-9, atol=1e-9)


def test_angles_start_as_frequencies_and_bounds_are_below_one():
    mixer = HGRN(DIM, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(mixer.angle[...], [1, 1e-2, 1e-4, 1e-6], rtol=1e-5)
    assert mixer.angle.get_metadata()['group'] == 'dynamics'
    with pytest.raises(UserError, match='lower_bound of HGRN is 1'):
        HGRN(DIM, lower_bound=1.0, rngs=nnx.Rngs(0))
