"""Imputation: errors and the loss are of missing values alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.data.pipeline import spread
from attnlab.data.series.drawn import DrawnSeries
from attnlab.errors import UserError
from attnlab.models.forecasters import LinearForecaster
from attnlab.nn.series_windows import Covariates, InstanceNorm
from attnlab.tasks.imputation import Imputation
from attnlab.tasks.task import Guessable, Sliced, Task
from attnlab.testing.noise import perturbed

TASK = Imputation(DrawnSeries(rows=400, copies=2), steps=12)


def model():
    sizes = {'lookback': 12, 'variates': 2, 'covariates': Covariates(observed=2), 'window_norm': InstanceNorm()}
    return perturbed(LinearForecaster(12, **sizes, dtype='float32', rngs=nnx.Rngs(0)))


def batch(source, count=3):
    rows = [source[i] for i in range(count)]
    return {name: jnp.asarray(np.stack([row[name] for row in rows])) for name in rows[0]}


def test_the_loss_is_the_error_of_missing_values():
    assert isinstance(TASK, Task) and isinstance(TASK, Sliced) and isinstance(TASK, Guessable)
    rows = batch(TASK.source('test', 12))
    rows['weights'] = jnp.array([1.0, 1.0, 0.0])
    filler = model()
    measured = TASK.measure(filler, rows, jax.random.key(0))
    found = np.swapaxes(filler.logits(filler.hidden(rows['tokens'], Context.full(3, 12))[0]), 1, 2)
    apart, unit = (found - rows['targets'])[:2], np.broadcast_to(rows['unit'][:2, None], (2, 12, 2))
    gone = np.asarray(rows['missing'][:2]) > 0
    expected = {
        'mse': np.mean(apart[gone] ** 2),
        'mae': np.mean(np.abs(apart[gone])),
        'mse_original': np.mean((apart * unit)[gone] ** 2),
        'mae_original': np.mean(np.abs(apart * unit)[gone]),
    }
    expected['loss'] = expected['mse']
    for name, value in expected.items():
        assert float(measured[name].mean()) == pytest.approx(value, rel=1e-4), name
    assert float(measured['loss'].count) == gone.sum()


def test_what_is_there_has_no_gradient():
    """Of the values that are there as targets; of those that are missing there is one."""
    rows, filler = batch(TASK.source('test', 12)), model()

    def loss(targets):
        return TASK.measure(filler, rows | {'targets': targets}, None)['loss'].mean()

    gradient = np.asarray(jax.grad(loss)(rows['targets']))
    assert ((gradient != 0) == (np.asarray(rows['missing']) > 0)).all()
    # And the model's own: as that of the mean squared error, written out.
    graphdef, params = nnx.split(filler)

    def by_task(params):
        return TASK.measure(nnx.merge(graphdef, params), rows, None)['loss'].mean()

    def by_hand(params):
        one = nnx.merge(graphdef, params)
        found = jnp.swapaxes(one.logits(one.hidden(rows['tokens'], Context.full(3, 12))[0]), 1, 2)
        return jnp.sum(rows['missing'] * (found - rows['targets']) ** 2) / jnp.sum(rows['missing'])

    for a, b in zip(*(jax.tree.leaves(jax.grad(one)(params)) for one in (by_task, by_hand)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_shares_and_baselines_are_slices():
    parts = TASK.slices('test', 12, (1, 2), 2**31)
    shares = [f'missing={share}' for share in (0.125, 0.25, 0.375, 0.5)]
    assert list(parts) == ['1x', *shares, 'window_mean', 'linear_interpolation']
    assert len(parts['1x'].source) == 80 - 12 + 1
    gone = [np.mean([row['missing'].mean() for row in batch_of(parts[name].source)]) for name in shares]
    np.testing.assert_allclose(gone, [0.125, 0.25, 0.375, 0.5], atol=0.04)
    guesses = TASK.trivial(parts['1x'])
    for name in ('window_mean', 'linear_interpolation'):
        rows = batch(parts[name].source, len(parts[name].source))
        measured = TASK.measure(model(), rows, None)
        assert 'loss' not in measured
        assert float(measured['mse'].mean()) == pytest.approx(guesses['mse'][name], rel=1e-4)
    assert guesses['mse']['linear_interpolation'] < guesses['mse']['window_mean'] and guesses['loss'] == guesses['mse']


def batch_of(source):
    return [source[index] for index in range(len(source))]


def test_sizes_are_those_of_the_windows():
    assert {name: value.shape for name, value in TASK.example(12).items()} == {
        name: np.shape(value) for name, value in TASK.source('train', 12)[0].items()
    }
    with pytest.raises(UserError, match=r'config.length is 24; windows of the task have 12 rows \(task.steps\)'):
        TASK.source('train', 24)


def test_fewer_windows_than_there_are_lie_all_over_the_split_with_their_own_gaps():
    every = TASK.source('test', 12)
    parts = TASK.slices('test', 12, (1,), 4)
    for index, place in enumerate(spread(len(every), 4)):
        found, whole = parts['1x'].source[index], every[place]
        for name in ('targets', 'missing'):
            np.testing.assert_array_equal(found[name], whole[name])
        np.testing.assert_array_equal(parts['window_mean'].source[index]['targets'], whole['targets'])
