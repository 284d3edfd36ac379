"""The parts of OLinear, and the learned gain of windows, against their written definitions in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import erf

from attnlab.context import Context
from attnlab.data.series.basis import TrainingBasis
from attnlab.data.series.drawn import DrawnSeries
from attnlab.errors import UserError
from attnlab.models.forecasters import LinearForecaster
from attnlab.models.heads.affine import AffineHead
from attnlab.models.heads.orthogonal import OrthogonalHead
from attnlab.models.heads.quantile import MixtureDensityHead
from attnlab.models.inputs.series import OrthogonalVariates
from attnlab.nn.series_windows import InstanceNorm, WindowGain
from attnlab.testing.noise import noise, perturbed

LOOKBACK, HORIZON, VARIATES, DIM, CHANNELS = 12, 4, 3, 8, 2
BASIS = TrainingBasis(DrawnSeries(rows=400))
CTX = Context.full(2, LOOKBACK)


def numbers(one):
    return np.asarray(one[...], np.float64)


def test_tokens_are_copies_of_coordinates():
    made = perturbed(
        OrthogonalVariates(
            HORIZON,
            DIM,
            lookback=LOOKBACK,
            variates=VARIATES,
            covariates=1,
            basis=BASIS,
            channels=CHANNELS,
            rngs=nnx.Rngs(0),
        )
    )
    x = noise(2, LOOKBACK, VARIATES + 1)
    # The covariate is the first token.
    columns = np.asarray(x, np.float64)[:, :, [3, 0, 1, 2]]
    turned = np.einsum('btv,st->bvs', columns, numbers(made.basis))
    copies = numbers(made.embedding)[:, None] * turned[:, :, None] + numbers(made.shift)[:, None]
    expected = copies.reshape(2, VARIATES + 1, -1) @ numbers(made.linear.weight) + numbers(made.linear.bias)
    np.testing.assert_allclose(made(x), expected, rtol=1e-5, atol=1e-5)
    hidden = noise(2, VARIATES + 1, DIM)
    np.testing.assert_array_equal(made.read(hidden), hidden[:, 1:])


def head(**options):
    sizes = {'basis': BASIS, 'variates': VARIATES, 'channels': CHANNELS, 'hidden': 5}
    return perturbed(OrthogonalHead(DIM, HORIZON, **sizes, **options, rngs=nnx.Rngs(0)))


def test_the_head_turns_coordinates_back_to_steps():
    made, h, targets = head(), noise(2, VARIATES, DIM), noise(2, VARIATES, HORIZON, seed=1)
    wide = np.asarray(h, np.float64)
    turned = (wide @ numbers(made.coordinates.weight) + numbers(made.coordinates.bias)).reshape(
        2, VARIATES, CHANNELS, -1
    )
    steps = turned @ numbers(made.basis) + numbers(made.shift)[None, :, None]
    inner = steps.swapaxes(2, 3).reshape(2, VARIATES, -1) @ numbers(made.join.weight) + numbers(made.join.bias)
    inner = inner * (1 + erf(inner / 2**0.5)) / 2
    expected = inner @ numbers(made.steps.weight) + numbers(made.steps.bias)
    np.testing.assert_allclose(made.logits(h), expected, rtol=1e-4, atol=1e-5)
    weights = np.array([1, 2**-0.5, 3**-0.5, 4**-0.5])
    losses = (weights * np.abs(expected - np.asarray(targets))).mean(axis=-1)
    np.testing.assert_allclose(made.losses(h, targets), losses, rtol=1e-4)
    np.testing.assert_allclose(
        head(decay=0.0).losses(h, targets), np.abs(expected - np.asarray(targets)).mean(axis=-1), rtol=1e-4
    )


def test_the_basis_is_no_parameter():
    assert sorted(path[0] for path in nnx.to_flat_state(nnx.state(head(), nnx.Param)).paths) == sorted(
        ['coordinates', 'coordinates', 'join', 'join', 'shift', 'steps', 'steps']
    )


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r'decay of OrthogonalHead is -1\.0'):
        head(decay=-1.0)
    with pytest.raises(UserError, match='variates of the head is 3; the hidden states have 2'):
        head().logits(noise(2, 2, DIM))
    with pytest.raises(UserError, match='a gain of windows does not go with MixtureDensityHead'):
        gained(head=MixtureDensityHead)


def gained(**options):
    made = LinearForecaster(
        HORIZON,
        lookback=LOOKBACK,
        variates=VARIATES,
        window_norm=InstanceNorm(),
        window_gain=WindowGain,
        dtype='float32',
        rngs=nnx.Rngs(0),
        **options,
    )
    return perturbed(made)


@pytest.mark.parametrize(('error', 'of'), [('squared', np.square), ('absolute', np.abs)])
def test_a_gain_of_windows_is_taken_off_the_forecast(error, of):
    """As the released normalisation: `(y - b) / (g + 1e-10)`, then the deviation and the mean of the window."""
    model = gained(head=functools.partial(AffineHead, error=error))
    x, targets = noise(2, LOOKBACK, VARIATES), noise(2, VARIATES, HORIZON, seed=1)

    def reference(gain, bias, values):
        mean = values.mean(axis=1, keepdims=True)
        deviation = np.sqrt(values.var(axis=1, keepdims=True) + 1e-5)
        window = gain * (values - mean) / deviation + bias
        y = window.swapaxes(1, 2) @ numbers(model.head.weight).T + numbers(model.head.bias)
        y = (y - bias[:, None]) / (gain[:, None] + 1e-10)
        return y * deviation.swapaxes(1, 2) + mean.swapaxes(1, 2)

    gain, bias = numbers(model.window_gain.gain), numbers(model.window_gain.bias)
    values = np.asarray(x, np.float64)
    hidden, _ = model.hidden(x, CTX)
    np.testing.assert_allclose(model.logits(hidden), reference(gain, bias, values), rtol=1e-4, atol=1e-4)
    losses = of(reference(gain, bias, values) - np.asarray(targets)).mean(axis=-1)
    np.testing.assert_allclose(model.losses(hidden, targets), losses, rtol=1e-4)

    graphdef, state = nnx.split(model)
    slopes = jax.grad(
        lambda state: jnp.mean((merged := nnx.merge(graphdef, state)).losses(merged.hidden(x, CTX)[0], targets))
    )(state)
    for name, first in (('gain', gain), ('bias', bias)):
        for variate in range(VARIATES):
            step = 1e-6 * (np.arange(VARIATES) == variate)
            ends = [
                of(
                    reference(*((first + s, bias) if name == 'gain' else (gain, first + s)), values)
                    - np.asarray(targets)
                )
                for s in (step, -step)
            ]
            expected = (ends[0].mean() - ends[1].mean()) / 2e-6
            found = float(slopes['window_gain'][name][...][variate])
            assert found == pytest.approx(expected, rel=2e-3, abs=1e-4), (name, variate)


def test_a_gain_that_became_negative_keeps_losses_positive():
    model = gained(head=functools.partial(AffineHead, error='absolute'))
    model.window_gain.gain[...] = -model.window_gain.gain[...]
    losses = model.losses(model.hidden(noise(2, LOOKBACK, VARIATES), CTX)[0], noise(2, VARIATES, HORIZON, seed=1))
    assert (np.asarray(losses) > 0).all()
