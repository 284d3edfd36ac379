"""What lies on one grid, interpolated on another, against JAX's own resizing of images."""

import jax
import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.functional.grids import resampled, resampling


@pytest.mark.parametrize('to', [(8, 10), (3, 7), (4, 5), (2, 2), (1, 9)], ids=str)
def test_a_grid_is_resampled_as_images_are_resized(to):
    x = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    expected = jax.image.resize(x.reshape(4, 5, 3), (*to, 3), 'linear', antialias=True)
    found = resampled(x, (4, 5), to)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.reshape(-1, 3), rtol=1e-5, atol=1e-6)


def test_a_volume_is_resampled_axis_by_axis():
    x = np.random.default_rng(0).standard_normal((24, 1))
    found = resampled(x, (2, 3, 4), (4, 3, 2)).reshape(4, 3, 2)
    first, last = resampling(2, 4), resampling(4, 2)
    expected = np.einsum('ia,abc,kc->ibk', first, x.reshape(2, 3, 4), last)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_half_as_many_places_are_weighted_means_of_their_neighbours():
    np.testing.assert_allclose(resampling(4, 2)[0], np.array([3, 3, 1, 0]) / 7)
    np.testing.assert_allclose(resampling(2, 4), [[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]])


def test_mistakes_are_named():
    with pytest.raises(UserError, match='4 places on an axis cannot be interpolated at 0'):
        resampling(4, 0)
    with pytest.raises(UserError, match='on a grid of 2 axes cannot be interpolated on one of 3'):
        resampled(np.zeros((4, 1)), (2, 2), (2, 2, 1))
