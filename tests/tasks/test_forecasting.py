"""Forecasting: metrics, baselines and rolling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from attnlab.data.pipeline import spread
from attnlab.data.series.columns import Columns
from attnlab.data.series.drawn import DrawnSeries
from attnlab.errors import UserError
from attnlab.models.predictor import Distributional
from attnlab.tasks.forecasting import Forecasting, errors, rolled, scores
from attnlab.tasks.task import Guessable, Slice, Sliced, Task

TASK = Forecasting(DrawnSeries(rows=400, copies=2), horizon=4)


class Stands(Distributional):
    """Stands for a model that forecasts the last value plus one, two, and so on, of any variates."""

    distributions = True

    def hidden(self, inputs, ctx, state=None):
        return jnp.swapaxes(inputs[:, -1:], 1, 2), None

    def logits(self, hidden):
        return hidden + jnp.arange(1.0, 5.0).reshape(1, 1, -1)

    def losses(self, hidden, targets, key=None):
        return jnp.mean((self.logits(hidden) - targets) ** 2, axis=-1)

    def quantiles(self, hidden, levels):
        """Of normal distributions of deviation one around the forecasts."""
        around = jnp.asarray(norm.ppf(np.asarray(levels)), jnp.float32).reshape(1, 1, -1, 1)
        return self.logits(hidden)[..., None, :] + around


def batch(source, count=3):
    rows = [source[i] for i in range(count)]
    return {name: jnp.asarray(np.stack([row[name] for row in rows])) for name in rows[0]}


def test_errors_are_means_in_every_unit():
    assert isinstance(TASK, Task) and isinstance(TASK, Sliced) and isinstance(TASK, Guessable)
    rows = batch(TASK.source('test', 24))
    rows['weights'] = jnp.array([1.0, 1.0, 0.0])
    measured = TASK.measure(Stands(), rows, None)
    tokens, targets, unit, naive = (np.asarray(rows[name])[:2] for name in ('tokens', 'targets', 'unit', 'naive_error'))
    apart = tokens[:, -1:] + np.arange(1, 5)[None, :, None] - targets
    expected = {
        'loss': np.mean(apart**2),
        'mse': np.mean(apart**2),
        'mae': np.mean(np.abs(apart)),
        'mase': np.mean(np.abs(apart) / naive[:, None]),
        'mse_original': np.mean((apart * unit[:, None]) ** 2),
        'mae_original': np.mean(np.abs(apart) * unit[:, None]),
    }
    for name, value in expected.items():
        assert float(measured[name].mean()) == pytest.approx(value, rel=1e-5), name
    np.testing.assert_allclose(measured['position_mse'].mean(), np.mean(apart**2, axis=(0, 2)), rtol=1e-5)


def test_the_score_of_a_normal_distribution_is_that_in_closed_form():
    rows = batch(TASK.source('test', 24))
    hidden, _ = Stands().hidden(rows['tokens'], None)
    targets = jnp.swapaxes(rows['targets'], 1, 2)
    found = scores(Stands(), hidden, targets, rows)
    z = np.asarray(targets - Stands().logits(hidden))
    exact = z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi)
    assert float(found['crps'].mean()) == pytest.approx(exact.mean(), rel=0.01)
    assert float(found['coverage_80'].mean()) == pytest.approx((np.abs(z) <= norm.ppf(0.9)).mean())
    assert float(found['width_80'].mean()) == pytest.approx(2 * norm.ppf(0.9), rel=1e-5)


def test_forecasts_are_rolled_beyond_the_horizon():
    part = TASK.slices('test', 24, (1, 3), 5)['3x']
    rows = batch(part.source)
    assert rows['targets'].shape == (3, 12, 2) and len(part.source) == 5
    found = rolled(Stands(), rows, TASK.horizon, None)
    np.testing.assert_allclose(found, rows['tokens'][:, -1:] + np.arange(1, 13)[None, :, None], rtol=1e-5)
    measured = TASK.measure(Stands(), rows, None)
    assert 'loss' not in measured and float(measured['mse'].mean()) == pytest.approx(
        float(errors(found, rows)['mse'].mean())
    )


def test_what_is_known_moves_along_and_what_is_observed_stops_rolling():
    """A model that forecasts what it is told is known over the horizon, of two horizons."""

    class Told(Stands):
        def hidden(self, inputs, ctx, state=None):
            assert inputs.shape == (3, 28, 2)
            return jnp.swapaxes(inputs[:, 24:, 1:], 1, 2), None

        def logits(self, hidden):
            return hidden

    task = Forecasting(DrawnSeries(rows=400, copies=2), horizon=4, columns=Columns(known=('1',)))
    rows = batch(task.slices('test', 24, (2,), 3)['2x'].source)
    np.testing.assert_array_equal(rolled(Told(), rows, 4, None), rows['tokens'][:, 24:, 1:])
    assert {name: x.shape for name, x in task.example(24).items()} == {
        name: x.shape for name, x in task.source('train', 24)[0].items()
    }
    assert task.trivial(task.slices('test', 24, (1,), 3)['1x'])['mse'].keys() >= {'ridge', 'repeat_last', 'ridge_known'}
    observed = Forecasting(DrawnSeries(rows=400, copies=2), columns=Columns(targets=('0',)))
    with pytest.raises(UserError, match=r'multiples is \(1, 2\); 1 columns are observed to the present alone'):
        observed.slices('test', 24, (1, 2), 5)


def test_baselines_are_in_every_table_and_below_what_compare_draws():
    parts = TASK.slices('test', 24, (1,), 2**31)
    names = ['repeat_last', 'seasonal_naive', 'ridge', 'ridge_last_value', 'ridge_instance_norm']
    assert list(parts) == ['1x', *names]
    guesses = TASK.trivial(parts['1x'])
    assert guesses['mse'].keys() == set(names) and guesses['loss'] == guesses['mse']
    for name in names:
        rows = batch(parts[name].source, len(parts[name].source))
        measured = TASK.measure(Stands(), rows, None)
        assert float(measured['mse'].mean()) == pytest.approx(guesses['mse'][name], rel=1e-4)
    assert len(parts['1x'].source) == len(TASK.source('test', 24)) == 80 - 4 + 1


def test_training_computes_no_quantiles():
    rows = batch(TASK.source('train', 24))
    assert 'crps' in TASK.measure(Stands(), rows, None)
    assert 'crps' not in TASK.measure(Stands(), rows, jax.random.key(0))


def test_fewer_windows_than_there_are_lie_all_over_the_split():
    """Of the model, of the baselines and of training alike; all that there are in their order."""
    every = TASK.source('test', 24)
    for count in (5, len(every)):
        places = spread(len(every), count)
        parts = TASK.slices('test', 24, (1,), count) | {'of rows': Slice(TASK.source('test', 24, 24 * count), 24)}
        for part in parts.values():
            assert len(part.source) == count
            for place, row in zip(places, (part.source[i] for i in range(count)), strict=True):
                np.testing.assert_array_equal(row['targets'], every[place]['targets'])
