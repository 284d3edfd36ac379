"""Sums and counts."""

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.metrics import Average


@pytest.mark.parametrize('module', [np, jnp])
def test_a_mean_of_nothing_is_nan_and_warns_nobody(module):
    parts = Average(module.asarray([3.0, 0.0]), module.asarray([2.0, 0.0]))
    np.testing.assert_array_equal(parts.mean(), [1.5, np.nan])
    assert np.isnan(Average(np.asarray(0.0), np.asarray(0.0)).mean())
