import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.parametrize('normalizer', [SumNormalizer(), FloorNormalizer()])
def test_sums_that_float16_has_and_their_inverses_that_it_has_not(normalizer):
    weights = jnp.asarray([0.0, 1e-5], jnp.float16)[None, :, None]
    read = normalizer(weights[..., None], weights)
    assert read.dtype == jnp.float16
    assert read[0, 0, 0, 0] == 0
    np.testing.assert_allclose(read[0, 1, 0, 0], 1, atol=0.1)
