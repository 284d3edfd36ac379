import jax.numpy as jnp
import numpy as np

from attnlab.functional.normalizers import SumNormalizer


def test_sum_normalizer():
    total = jnp.asarray([2.0, 4.0])[None, None, None]
    np.testing.assert_allclose(SumNormalizer(eps=1.0)(total, jnp.asarray([[[3.0]]])), total / 4)
    np.testing.assert_array_equal(SumNormalizer()(jnp.zeros_like(total), jnp.zeros((1, 1, 1))), jnp.zeros_like(total))
