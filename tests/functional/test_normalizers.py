import jax.numpy as jnp
import numpy as np

from attnlab.functional.normalizers import FloorNormalizer, SumNormalizer


def test_sum_normalizer():
    total = jnp.asarray([2.0, 4.0])[None, None, None]
    np.testing.assert_allclose(SumNormalizer(eps=1.0)(total, jnp.asarray([[[3.0]]])), total / 4)
    np.testing.assert_array_equal(SumNormalizer()(jnp.zeros_like(total), jnp.zeros((1, 1, 1))), jnp.zeros_like(total))


def test_floor_normalizer():
    total = jnp.asarray([2.0, 4.0])[None, None, None]
    for weight, divisor in ((3.0, 3.0), (0.5, 1.0), (-2.0, 1.0)):
        got = FloorNormalizer(floor=1.0)(total, jnp.full((1, 1, 1), weight))
        np.testing.assert_allclose(got, total / divisor, rtol=1e-6)
