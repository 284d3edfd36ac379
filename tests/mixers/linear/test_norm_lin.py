"""NormLin against its equations, in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.linear.norm_lin import NormLin
from attnlab.testing.noise import noise
from tests.mixers.linear.equations import DIM, apply, batch, documents, softplus

PACKED = np.asarray([[1] * 9, [1, 1, 1, 2, 2, 3, 4, 4, 4]])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def norm_lin(mixer: NormLin, x: np.ndarray) -> np.ndarray:
    weights = softplus(np.asarray(mixer.weights[...], np.float64))[: len(x), : len(x)]
    return apply(mixer.output, weights / weights.sum(axis=1, keepdims=True) @ apply(mixer.value, x))


def test_the_layer_is_that_of_the_paper():
    mixer = NormLin(DIM, length=12, documents=4, rngs=nnx.Rngs(0))
    x, ctx = batch(PACKED)
    y, _ = jax.jit(mixer)(x, ctx)
    np.testing.assert_allclose(y, documents(lambda row: norm_lin(mixer, row), x, ctx), rtol=1e-9, atol=1e-9)


def test_more_tokens_or_documents_than_it_is_made_for():
    mixer = NormLin(DIM, length=5, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='rows of up to 5 tokens; got 6'):
        mixer(noise(1, 6, DIM), Context.full(1, 6))
    segments = jnp.asarray([[0, 1, 2, 2, 0]], jnp.int32)
    y, _ = mixer(noise(1, 5, DIM), Context(segments, segments))
    assert np.isnan(y).any(axis=-1).tolist() == [[False, False, True, True, False]]
