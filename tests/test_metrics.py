"""Sums and counts, and what is counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attnlab.metrics import Average, likeliest, perplexity


@pytest.mark.parametrize('module', [np, jnp])
def test_a_mean_of_nothing_is_nan_and_warns_nobody(module):
    parts = Average(module.asarray([3.0, 0.0]), module.asarray([2.0, 0.0]))
    np.testing.assert_array_equal(parts.mean(), [1.5, np.nan])
    assert np.isnan(Average(np.asarray(0.0), np.asarray(0.0)).mean())


@pytest.mark.parametrize('spec', [None, PartitionSpec(None, None, 'tensor')], ids=['one device', 'divided classes'])
def test_the_likeliest_label_is_the_first_of_the_greatest_logits(spec):
    """Many are equal, as logits of 16 bits are."""
    rng = np.random.default_rng(0)
    logits, labels = jnp.asarray(rng.integers(0, 3, (5, 40, 6)), jnp.bfloat16), jnp.asarray(rng.integers(0, 6, (5, 40)))
    if spec is not None:
        logits = jax.device_put(
            logits, NamedSharding(jax.make_mesh((2,), ('tensor',), axis_types=(AxisType.Auto,)), spec)
        )
    found = jax.jit(likeliest)(logits, labels)
    np.testing.assert_array_equal(found, np.asarray(logits).argmax(-1) == labels)
    assert found.any() and not found.all()


def test_no_label_is_the_likeliest_beside_a_nan():
    logits = jnp.asarray([[jnp.nan] * 3, [0.0, 2.0, jnp.nan], [-jnp.inf, -jnp.inf, -jnp.inf], [0.0, jnp.inf, 1.0]])
    for label, wanted in enumerate([[False, False, True, False], [False, False, False, True], [False] * 4]):
        assert likeliest(logits, jnp.full(4, label)).tolist() == wanted


def test_the_perplexity_of_nothing_known_is_not_infinite():
    assert perplexity(0.0) == 1 and perplexity(800.0) == perplexity(np.inf) == np.inf and np.isnan(perplexity(np.nan))
