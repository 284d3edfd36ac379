"""Voxels as tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.inputs.voxels import SomeVoxels, Voxels
from attnlab.nn.positions import GridSinusoids, LearnedPlaces


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


@pytest.mark.parametrize('positions', [LearnedPlaces, GridSinusoids(), None], ids=['learned', 'sinusoids', 'none'])
def test_some_voxels_are_mapped_as_among_all(positions):
    """A voxel has the activations that it has among all, wherever it stands in the row."""
    whole, some = (
        kind(1, 6, side=3, features=2, positions=positions, rngs=nnx.Rngs(0)) for kind in (Voxels, SomeVoxels)
    )
    x = np.random.default_rng(0).normal(size=(1, 27, 2)).astype(np.float32)
    chosen = np.array([25, 3, 11, 4])
    places = np.stack(np.unravel_index(chosen, (3, 3, 3)), axis=-1)
    row = np.concatenate([x[0, chosen], places], axis=1).astype(np.float32)
    np.testing.assert_allclose(some(jnp.asarray(row)[None])[0], whole(jnp.asarray(x))[0, chosen], rtol=1e-5, atol=1e-6)
    ctx = Context.full(1, 4)
    assert some.context(ctx) is ctx
    with pytest.raises(UserError, match=r'model.inputs.features is 2, and 3 numbers say where a voxel is'):
        some(jnp.asarray(x))
