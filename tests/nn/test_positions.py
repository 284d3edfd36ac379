"""ALiBi's slopes, as the paper's code has them."""

import numpy as np

from attnlab.nn.positions import Alibi


def test_slopes_of_a_power_of_two():
    np.testing.assert_allclose(Alibi().slopes(8), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(Alibi().slopes(16)[:2], [2.0**-0.5, 2.0**-1])
    np.testing.assert_allclose(Alibi().slopes(1), [2.0**-8])


def test_slopes_between_powers_of_two():
    slopes = Alibi().slopes(12)
    np.testing.assert_allclose(slopes[:8], [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(slopes[8:], [0.70710678, 0.35355339, 0.1767767, 0.08838835], rtol=1e-7)
    np.testing.assert_allclose(Alibi().slopes(3), [2.0**-4, 2.0**-8, 2.0**-2])
