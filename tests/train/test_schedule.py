"""Learning rates at points worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.train.schedule import Constant, Cosine, LinearDecay, Schedule, Staircase, WarmupStableDecay


def at(schedule: Schedule, steps: int, *numbers: int, peak_lr: float = 2.0) -> list[float]:
    """The learning rate of each step, counted from 1."""
    rate = schedule(steps, peak_lr)
    return [float(rate(number - 1)) for number in numbers]


def test_cosine_at_hand_computed_points():
    rates = at(Cosine(warmup=10.0, final=0.1), 110, 1, 5, 10, 35, 60, 85, 110)
    quarter, three_quarters = 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 0.1 + 0.9 * (1 - 0.5**0.5) / 2
    np.testing.assert_allclose(rates, [0.2, 1.0, 2.0, 2 * quarter, 2 * 0.55, 2 * three_quarters, 0.2], rtol=1e-6)


def test_warmup_stable_decay_at_hand_computed_points():
    linear = WarmupStableDecay(warmup=4.0, decay=20.0, final=0.5, shape='linear')
    np.testing.assert_allclose(at(linear, 100, 1, 4, 50, 80, 90, 100), [0.5, 2, 2, 2, 1.5, 1], rtol=1e-6)
    root = WarmupStableDecay(warmup=4.0, decay=20.0, final=0.0, shape='sqrt')
    np.testing.assert_allclose(at(root, 100, 80, 85, 100), [2, 1, 0], atol=1e-6)


@pytest.mark.parametrize('steps', [1, 3, 7, 11])
def test_fractions_that_fill_a_run_fit_however_they_are_rounded(steps):
    learning_rate = WarmupStableDecay(warmup=0.5, decay=0.5)(steps, 1.0)
    assert float(learning_rate(steps - 1)) == pytest.approx(0.0 if steps > 1 else 1.0, abs=1e-6)
    with pytest.raises(UserError, match='too few for a warmup of 2 steps and a decay of 2 steps'):
        WarmupStableDecay(warmup=2.0, decay=2.0)(3, 1.0)


@pytest.mark.parametrize(('fraction', 'steps', 'steady'), [(0.5, 7, 4), (0.5, 8, 4), (0.25, 8, 6)])
def test_a_longer_run_has_the_same_rates_up_to_the_decay_however_it_is_rounded(fraction, steps, steady):
    short, longer = WarmupStableDecay(fraction, fraction), WarmupStableDecay(float(round(fraction * steps)), 1.0)
    rates = zip(at(short, steps, *range(1, steps + 1)), at(longer, 4 * steps, *range(1, steps + 1)), strict=True)
    assert [one == other for one, other in rates] == [True] * steady + [False] * (steps - steady)
    assert short.steady(steps) == steady


def test_linear_decay_at_hand_computed_points():
    rates = at(LinearDecay(warmup=10.0, final=0.2), 110, 1, 5, 10, 35, 60, 110)
    np.testing.assert_allclose(rates, [0.2, 1.0, 2.0, 1.6, 1.2, 0.4], rtol=1e-6)
    assert at(LinearDecay(), 100, 100) == [0.0]


def test_constant_at_hand_computed_points():
    np.testing.assert_allclose(at(Constant(warmup=0.1), 20, 1, 2, 3, 20), [1, 2, 2, 2])
    np.testing.assert_allclose(at(Constant(warmup=0.0), 20, 1, 20), [2, 2])


def test_staircase_at_hand_computed_points():
    stairs = Staircase(warmup=2.0, hold=5.0, every=10.0, factor=0.25)
    np.testing.assert_allclose(at(stairs, 40, 1, 2, 16, 17, 26, 27, 40), [1, 2, 2, 0.5, 0.5, 0.125, 0.03125])
    longer = Staircase(warmup=8.0, every=3.0)
    np.testing.assert_allclose(at(longer, 20, 4, 8, 10, 11, 13, 14, 20), [1, 2, 2, 1, 1, 0.5, 0.125])
    np.testing.assert_allclose(at(Staircase(warmup=0.0), 20, 1, 2, 3, 20), [2, 2, 1, 2 * 0.5**9])


def test_a_duration_below_one_is_a_fraction_and_from_one_on_a_number_of_steps():
    assert at(Constant(warmup=0.5), 8, 1) == [0.5]
    assert at(Constant(warmup=4.0), 8, 1) == [0.5]
    assert at(Constant(warmup=1.0), 8, 1) == [2.0]
    assert at(Constant(warmup=0.999), 1000, 998) == [pytest.approx(2.0 * 998 / 999)]


@pytest.mark.parametrize('schedule', [Cosine(), WarmupStableDecay(), LinearDecay(), Constant(), Staircase()])
def test_short_runs_and_traced_counts(schedule: Schedule):
    assert np.isfinite(at(schedule, 1, 1)).all()
    rate = schedule(50, 2.0)
    traced = jax.jit(jax.vmap(rate))(jnp.arange(50))
    np.testing.assert_allclose(traced, [float(rate(count)) for count in range(50)], rtol=1e-5)
    assert traced.dtype == jnp.float32
    assert (traced >= 0).all() and (traced <= 2.0).all()


@pytest.mark.parametrize(
    ('schedule', 'message'),
    [
        (Cosine(warmup=-0.1), 'warmup is -0.1'),
        (Cosine(warmup=1.5), 'warmup is 1.5'),
        (Cosine(final=1.1), 'final is 1.1'),
        (Cosine(warmup=101.0), 'the run has 100 steps, which are too few for a warmup of 101 steps'),
        (WarmupStableDecay(warmup=50.0, decay=51.0), 'too few for a warmup of 50 steps and a decay of 51 steps'),
        (WarmupStableDecay(shape='cubic'), "'cubic'; it must be 'linear' or 'sqrt'"),
        (Constant(warmup=200.0), 'a warmup of 200 steps'),
        (Staircase(every=1.5), 'every is 1.5'),
        (Staircase(factor=0.0), 'factor is 0.0; it must be a fraction above 0'),
    ],
)
def test_what_makes_no_sense_is_refused(schedule: Schedule, message: str):
    with pytest.raises(UserError, match=message):
        schedule(100, 1.0)
