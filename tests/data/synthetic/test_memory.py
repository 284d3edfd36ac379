"""Signals to be remembered: their variance, band and covariance, and where the labels are."""

import numpy as np
import pytest

from attnlab.data.synthetic.memory import Delay, Recollection, band_covariance, band_noise
from attnlab.data.synthetic.problem import Examples
from attnlab.errors import UserError


def test_noise_has_variance_one_its_band_and_the_covariance_in_closed_form():
    rng = np.random.default_rng(0)
    draws = np.stack([band_noise(rng, 64, 0.25) for _ in range(20_000)])
    covariance = draws.T @ draws / len(draws)
    expected = band_covariance(64, 0.25)
    lags = np.abs(np.arange(64)[:, None] - np.arange(64)[None])
    np.testing.assert_allclose(covariance, expected[lags], atol=0.05)
    assert expected[0] == 1 and abs(covariance[0, 63]) < 0.1
    power = np.mean(np.abs(np.fft.rfft(draws * np.hanning(64), axis=1)) ** 2, axis=0)
    assert power[12:].max() < 0.01 * power[3:6].mean()
    assert len(np.unique(band_covariance(64, 1.0)[1:].round(2))) <= 2


def test_labels_are_earlier_values():
    row = Examples(Delay(lag=5), 12, baselines=True)[3]
    assert row['tokens'].shape == (12, 1) and row['at'].tolist() == list(range(5, 12))
    np.testing.assert_array_equal(row['targets'], row['tokens'][:7])
    np.testing.assert_allclose(row['baseline/zero'], row['tokens'][:7, 0] ** 2, rtol=1e-6)
    row = Examples(Recollection(points=3), 12)[0]
    assert row['at'].tolist() == [11] and Recollection(points=3).places(12).tolist() == [0, 6, 11]
    np.testing.assert_array_equal(row['targets'][0], row['tokens'][[0, 6, 11], 0])


@pytest.mark.parametrize(
    ('problem', 'message'),
    [
        (Delay(lag=12), 'length is 12; Delay needs more than 12 tokens'),
        (Delay(band=0.0), 'band of Delay is 0.0'),
        (Recollection(points=13), 'length is 12; Recollection needs at least 13 tokens'),
    ],
)
def test_mistakes_are_named(problem, message):
    with pytest.raises(UserError, match=message):
        problem.check(12)
