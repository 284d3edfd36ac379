"""ALiBi's slopes, as the paper's code has them, and waves added to the inputs."""

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.nn.positions import Alibi, NeighbourRope, Rope, Sinusoidal


def test_slopes_of_a_power_of_two():
    np.testing.assert_allclose(Alibi().slopes(8), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(Alibi().slopes(16)[:2], [2.0**-0.5, 2.0**-1])
    np.testing.assert_allclose(Alibi().slopes(1), [2.0**-8])


def test_slopes_between_powers_of_two():
    slopes = Alibi().slopes(12)
    np.testing.assert_allclose(slopes[:8], [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(slopes[8:], [0.70710678, 0.35355339, 0.1767767, 0.08838835], rtol=1e-7)
    np.testing.assert_allclose(Alibi().slopes(3), [2.0**-4, 2.0**-8, 2.0**-2])


def test_waves_by_hand():
    waves = Sinusoidal(base=100.0).encode(jnp.asarray([[0, 3]]), 4)
    expected = [[0.0, 0.0, 1.0, 1.0], [np.sin(3.0), np.sin(0.3), np.cos(3.0), np.cos(0.3)]]
    np.testing.assert_allclose(waves, [expected], rtol=1e-6)


def test_waves_want_an_even_width():
    with pytest.raises(UserError, match='sinusoidal positions need an even width; got 5'):
        Sinusoidal().encode(jnp.asarray([[0]]), 5)


@pytest.mark.parametrize('rope', [Rope(base=-10.0), NeighbourRope(base=-10.0)], ids=repr)
def test_a_base_that_is_not_positive_turns_nothing(rope):
    with pytest.raises(UserError, match=r'base is -10\.0; .* must be positive'):
        rope.rotate(jnp.ones((1, 2, 1, 4)), jnp.asarray([[0, 1]]))
