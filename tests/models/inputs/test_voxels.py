"""Voxels as tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.inputs.voxels import Voxels
from attnlab.nn.positions import GridSinusoids


def test_a_token_is_a_map_of_its_voxel_and_its_place():
    inputs = Voxels(1, 6, side=2, features=3, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 3)), jnp.float32)
    places = inputs.positions.weight[...]
    expected = x @ inputs.linear.weight[...] + inputs.linear.bias[...][None, None] + places[None]
    np.testing.assert_allclose(inputs(x), expected, rtol=1e-5, atol=1e-6)
    assert inputs.context(Context.full(2, 8)).grid == (2, 2, 2)
    plain = Voxels(1, 6, side=2, features=3, positions=None, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(plain(x), expected - places[None], rtol=1e-5, atol=1e-6)
    waves = Voxels(1, 6, side=2, features=3, positions=GridSinusoids(), rngs=nnx.Rngs(0))
    np.testing.assert_allclose(
        waves(x) - plain(x), np.tile(GridSinusoids().encode((2, 2, 2), 6), (2, 1, 1)), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(UserError, match=r'model.inputs.side is 2 and features 3, 8 voxels; the inputs of the task are'):
        inputs(x[:, :6])
