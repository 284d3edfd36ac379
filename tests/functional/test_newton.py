"""Inverses by Newton's iteration."""

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.functional.newton import newton_inverse
from attnlab.testing.contract import compare_with_differences
from attnlab.testing.noise import noise


def test_it_is_the_inverse_and_has_its_gradients():
    with jax.enable_x64(True):
        points, weights = noise(2, 6, 3, dtype=jnp.float64), noise(2, 6, 6, seed=1, dtype=jnp.float64)
        distances = jnp.sum((points[:, :, None] - points[:, None]) ** 2, axis=-1)
        matrix = jnp.exp(-distances / 2) + 0.01 * jnp.eye(6)[None]
        step = 1.8 / jnp.max(jnp.sum(matrix, axis=-1), axis=-1)[:, None, None] ** 2
        inverse = newton_inverse(matrix, step, 20)
        np.testing.assert_allclose(inverse, np.linalg.inv(matrix), rtol=1e-9, atol=1e-9)
        compare_with_differences('newton', lambda p: jnp.vdot(weights, newton_inverse(p, step, 20)), matrix)
