"""Scale-invariant ratios against their definition, and orders of sources against the Hungarian method."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from scipy.optimize import linear_sum_assignment

from attnlab.functional.separation import best_order, every_pair, matched, si_snr
from attnlab.testing.noise import noise

SOURCES = noise(3, 2, 64)
ESTIMATES = SOURCES + 0.3 * noise(3, 2, 64, seed=1)


def test_the_ratio_is_that_of_the_definition():
    e, s = (np.asarray(x, np.float64)[0, 0] for x in (ESTIMATES, SOURCES))
    e, s = e - e.mean(), s - s.mean()
    along = (e @ s) / (s @ s) * s
    expected = 10 * np.log10((along @ along) / ((e - along) @ (e - along)))
    assert float(si_snr(ESTIMATES, SOURCES)[0, 0]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize('factor', [-3.0, 0.1, 40.0])
def test_no_factor_and_no_constant_changes_it(factor):
    expected = si_snr(ESTIMATES, SOURCES)
    np.testing.assert_allclose(si_snr(factor * ESTIMATES + 2, SOURCES), expected, atol=1e-3)
    np.testing.assert_allclose(si_snr(ESTIMATES, factor * SOURCES - 1), expected, atol=1e-3)
    assert float(jnp.abs(si_snr(ESTIMATES + 0.3 * noise(3, 2, 64, seed=2), SOURCES) - expected).min()) > 0.1


def test_silence_has_a_number():
    nothing = jnp.zeros((1, 1, 8))
    for pair in ((nothing, noise(1, 1, 8)), (noise(1, 1, 8), nothing), (nothing, nothing)):
        np.testing.assert_allclose(si_snr(*pair), -80.0, atol=1e-3)


@pytest.mark.parametrize('count', [2, 3, 4])
def test_the_best_order_is_that_of_the_hungarian_method(count):
    scores = noise(5, count, count)
    order = np.asarray(best_order(scores))
    for row, found in zip(np.asarray(scores), order, strict=True):
        np.testing.assert_array_equal(found, linear_sum_assignment(-row)[1])
    np.testing.assert_allclose(
        matched(scores, jnp.asarray(order)), np.take_along_axis(np.asarray(scores), order[..., None], 2)[..., 0]
    )


def test_estimates_in_another_order_find_their_sources():
    sources = noise(4, 3, 64)
    order = np.array([2, 0, 1])
    scores = every_pair(5 * sources[:, order] + 0.1 * noise(4, 3, 64, seed=1), sources)
    np.testing.assert_array_equal(best_order(scores), np.tile(order, (4, 1)))
    assert float(matched(scores, best_order(scores)).min()) > 20


def test_gradients_are_those_of_differences():
    with jax.enable_x64(True):
        sources, estimates = noise(2, 2, 16, dtype=jnp.float64), noise(2, 2, 16, seed=1, dtype=jnp.float64)

        def loss(estimates):
            scores = every_pair(estimates, sources)
            return -jnp.sum(matched(scores, best_order(scores)))

        check_grads(jax.jit(loss), (estimates,), order=1, modes=('rev',), rtol=1e-6, atol=1e-6)
