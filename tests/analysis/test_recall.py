"""The best linear read of states: of a delay line, of any states of white noise, and of a system as it is streamed."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnlab.analysis.recall import responses, unrecalled, unrecalled_throughout
from attnlab.context import Context
from attnlab.data.synthetic.memory import band_covariance, band_noise
from attnlab.models.linear_memory import LinearMemory
from attnlab.nn.systems import DiagonalSystem, LowRankSystem
from attnlab.testing.noise import noise

WHITE = np.eye(40)[0]


def test_a_delay_line_tells_what_it_holds_and_nothing_else():
    line = np.eye(40)[:, :7] * 3.0
    np.testing.assert_allclose(unrecalled(line, WHITE, 1e-12), np.arange(40) >= 7, atol=1e-11)


def test_of_white_noise_as_many_values_are_told_as_there_are_states():
    states = np.random.default_rng(0).standard_normal((40, 9))
    assert np.isclose(np.sum(1 - unrecalled(states, WHITE, 1e-12)), 9)
    assert np.isclose(np.sum(1 - unrecalled(np.concatenate([states, 2 * states], axis=1), WHITE, 1e-12)), 9)


def test_no_least_squares_fit_is_better_than_the_closed_form():
    """Of states that hold twenty thousand drawn signals."""
    states = np.random.default_rng(1).standard_normal((32, 5))
    rng = np.random.default_rng(2)
    signals = np.stack([band_noise(rng, 32, 0.5) for _ in range(20_000)])[:, ::-1].astype(np.float64)
    held = signals @ states
    fit = np.linalg.lstsq(held, signals, rcond=None)[0]
    np.testing.assert_allclose(
        unrecalled(states, band_covariance(32, 0.5)), np.mean((held @ fit - signals) ** 2, axis=0), atol=0.03
    )


def test_one_read_for_all_tokens_is_that_of_least_squares():
    """Of states that are updated token by token, asked at every token that has one `lag` before it."""
    rng, lag, steps = np.random.default_rng(3), 4, 24
    states = rng.standard_normal((steps, 5)) * 0.8 ** np.arange(steps)[:, None]
    signals = np.stack([band_noise(rng, steps, 0.5) for _ in range(4_000)]).astype(np.float64)
    held = [signals[:, t::-1] @ states[: t + 1] for t in range(lag, steps)]
    asked = np.concatenate([signals[:, t - lag] for t in range(lag, steps)])
    held = np.concatenate(held)
    fit = np.linalg.lstsq(held, asked, rcond=None)[0]
    error = np.mean((held @ fit - asked) ** 2) / np.mean(asked**2)
    found = unrecalled_throughout(states, band_covariance(steps, 0.5), lag)
    assert found > 0.1 and abs(found - error) < 0.02


def test_a_smooth_signal_is_not_recalled_from_a_glimpse_of_it_by_digits_that_float32_has_not():
    """Three tokens of a signal with few frequencies tell all of it, but for rounding."""
    glimpse, covariance = np.eye(200)[:, :16], band_covariance(200, 0.05)
    assert unrecalled(glimpse, covariance, 1e-15)[60] < 0.7 * unrecalled(glimpse, covariance)[60]


def test_responses_are_those_of_the_convolution():
    """Read as the outputs are, the responses of the states of a channel are its kernel."""
    for make in (LowRankSystem, DiagonalSystem):
        system = make(2, state=4, causal=True, low=0.1, high=0.3, rngs=nnx.Rngs(0))
        impulse = jnp.zeros((1, 30, 2)).at[:, 0].set(1)
        kernel = jax.jit(lambda x, system=system: system(x, None)[0])(impulse)[0]
        held = responses(system, 2, 30).reshape(30, 2, 4)
        for d in range(2):
            fit, *_ = np.linalg.lstsq(held[:, d], np.asarray(kernel[:, d]), rcond=None)
            np.testing.assert_allclose(held[:, d] @ fit, kernel[:, d], atol=1e-4)


def test_the_model_is_linear_in_its_signal():
    model = LinearMemory(3, dim=4, state=4, system=DiagonalSystem, dtype='float32', rngs=nnx.Rngs(0))
    x = noise(2, 12, 1)
    read = jax.jit(lambda x: model.logits(model.hidden(x, Context.full(2, 12))[0]))
    assert read(x).shape == (2, 12, 3)
    np.testing.assert_allclose(read(3 * x), 3 * read(x), rtol=1e-4, atol=1e-5)
