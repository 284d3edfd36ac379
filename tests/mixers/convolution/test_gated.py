"""The gated convolution against its equation, written as a loop over tokens in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.convolution.gated import GatedConvolution


def test_equation():
    """`y_t = (b + sum_i a_i x_{t-w+1+i}) (x_t W + c) + x_t`, taps that would reach into another document left out."""
    with jax.enable_x64(True):
        mixer = GatedConvolution(4, width=3, rngs=nnx.Rngs(0))
        mixer.conv.bias[...] = np.arange(4, dtype=np.float32)
        mixer.gate.bias[...] = np.arange(4, dtype=np.float32) - 1
        x = np.random.default_rng(0).normal(size=(1, 6, 4))
        positions = np.array([[0, 1, 2, 0, 1, 2]])
        segments = np.array([[1, 1, 1, 2, 2, 2]])
        y, _ = mixer(jnp.asarray(x), Context(jnp.asarray(positions, jnp.int32), jnp.asarray(segments, jnp.int32)))
    taps, weight = np.asarray(mixer.conv.taps[...]), np.asarray(mixer.gate.weight[...], np.float64)
    for t in range(6):
        conv = np.arange(4.0)
        for i in range(3):
            before = t - 2 + i
            if before >= 0 and segments[0, before] == segments[0, t]:
                conv = conv + taps[i] * x[0, before]
        wanted = conv * (x[0, t] @ weight + np.arange(4.0) - 1) + x[0, t]
        np.testing.assert_allclose(y[0, t], wanted, rtol=1e-6, atol=1e-6)


def test_a_width_below_one_is_refused():
    with pytest.raises(UserError, match='width of GatedConvolution is 0; it must be a whole number of at least 1'):
        GatedConvolution(4, width=0, rngs=nnx.Rngs(0))
