"""Normalisation and decomposition of windows, against numpy."""

import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.nn.series_windows import InstanceNorm, LastValue, Trend, level_and_scale
from attnlab.testing.noise import noise

X = np.asarray(noise(2, 9, 3))


def test_statistics_of_windows():
    for x in (X, noise(2, 9, 3)):
        level, scale = LastValue().statistics(x)
        np.testing.assert_array_equal(level, X[:, -1:])
        np.testing.assert_array_equal(scale, 1)
        level, scale = InstanceNorm().statistics(x)
        np.testing.assert_allclose(level, X.mean(axis=1, keepdims=True), atol=1e-6)
        np.testing.assert_allclose(scale, np.sqrt(X.var(axis=1, keepdims=True) + 1e-5), rtol=1e-6)
        level, scale = level_and_scale(None, x)
        assert not np.asarray(level).any() and (np.asarray(scale) == 1).all()
    with pytest.raises(UserError, match=r'eps of InstanceNorm is 0\.0; it must be above 0'):
        InstanceNorm(eps=0.0)


def test_a_trend_repeats_the_ends():
    rest, trend = Trend(5).divide(noise(2, 9, 3))
    padded = np.concatenate([X[:, :1]] * 2 + [X] + [X[:, -1:]] * 2, axis=1)
    expected = np.stack([padded[:, t : t + 5].mean(axis=1) for t in range(9)], axis=1)
    np.testing.assert_allclose(trend, expected, atol=1e-6)
    np.testing.assert_allclose(rest + trend, X, atol=1e-6)
    with pytest.raises(UserError, match='width of Trend is 4; it must be odd'):
        Trend(4)
