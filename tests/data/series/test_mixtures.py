"""Drawn mixtures: what they are a function of, what is in them, and what their baselines reach."""

import numpy as np
import pytest

from attnlab.data.series.mixtures import BASELINES, DrawnMixtures, IdealMask, Separated, Tones
from attnlab.errors import UserError

DATA = DrawnMixtures(train=8, held_out=4)


def test_a_mixture_is_the_sum_of_its_sources_in_its_own_unit():
    row = DATA.rows('train', 500)[0]
    assert row['tokens'].shape == (500, 1) and row['sources'].shape == (2, 500)
    np.testing.assert_allclose(row['sources'].sum(axis=0), row['tokens'][:, 0], atol=1e-5)
    assert row['tokens'].std() == pytest.approx(1.0, abs=1e-5)
    powers = 10 * np.log10(row['sources'].var(axis=1))
    assert abs(powers[0] - powers[1]) <= 5


def test_rows_are_a_function_of_seed_split_and_index():
    first = DATA.rows('train', 300)[1]['tokens']
    np.testing.assert_array_equal(DATA.rows('train', 300, 2)[1]['tokens'], first)
    for other in (DATA.rows('train', 300)[2], DATA.rows('test', 300)[1], DrawnMixtures(seed=1).rows('train', 300)[1]):
        assert np.abs(other['tokens'] - first).max() > 0.1
    assert len(DATA.rows('train', 300)) == 8 and len(DATA.rows('valid', 300)) == 4
    with pytest.raises(IndexError, match='mixture 4 of 4'):
        DATA.rows('test', 300)[4]


def test_fundamentals_are_as_far_apart_as_asked():
    """Without modulation or harmonics a tone is one line of the spectrum."""
    law = Tones(harmonics=1, depth=0.0, apart=1.5, level=0.0)
    for seed in range(5):
        spectra = np.abs(np.fft.rfft(law.draw(np.random.default_rng(seed), 3, 4000)))
        found = np.sort(spectra.argmax(axis=1)) / 4000
        assert law.low - 3e-4 < found[0] and found[-1] < law.high + 3e-4
        assert (found[1:] / found[:-1] > 1.45).all()


def test_noise_modulates_loudness_alone():
    still, moving = (Tones(depth=depth).draw(np.random.default_rng(0), 2, 4000) for depth in (0.0, 1.0))
    for waves, steady in ((still, True), (moving, False)):
        loud = np.sqrt((waves.reshape(2, 8, 500) ** 2).mean(axis=2))
        assert (loud.max(axis=1) / loud.min(axis=1) < 1.1).all() == steady


def test_the_ideal_mask_is_of_the_mixture():
    """Of sources that share no frequency it is the sources; of a mixture of one with itself, half of it."""
    time = np.arange(2048)
    low, high = (np.sin(2 * np.pi * f * time) for f in (0.02, 0.2))
    mixture, sources = (low + high).astype(np.float32), np.stack([low, high]).astype(np.float32)
    found = IdealMask().separate(mixture, sources)
    np.testing.assert_allclose(found[:, 200:-200], sources[:, 200:-200], atol=0.02)
    np.testing.assert_allclose(IdealMask().separate(2 * sources[0], sources[[0, 0]]), sources[[0, 0]], atol=1e-5)
    row = Separated(DATA.rows('test', 100), BASELINES['ideal_mask'])[0]
    assert row['estimates'].shape == row['sources'].shape == (2, 100)


@pytest.mark.parametrize(
    ('make', 'sentence'),
    [
        (lambda: Tones(low=0.1), 'low and high of Tones are 0.1 and 0.05'),
        (lambda: Tones(harmonics=10), 'with 10 harmonics; .* the last harmonic of high below 0.5'),
        (lambda: Tones(apart=0.9), 'apart, depth and level of Tones are 0.9'),
        (lambda: DrawnMixtures(sources=1), 'sources of DrawnMixtures is 1; it must be from 2 to 6'),
        (lambda: DATA.rows('tst', 100), "has no split 'tst'; did you mean 'test'"),
        (lambda: Tones(apart=6.0).draw(np.random.default_rng(0), 2, 100), '2 fundamentals .* cannot be 6.0 times'),
    ],
)
def test_mistakes_are_named(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()
