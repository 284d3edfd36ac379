"""Reconstruction: stretches of a series, and the errors of what knows nothing."""

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.data.pipeline import spread
from attnlab.data.series.drawn import DrawnSeries, Henon
from attnlab.data.series.windows import scaled
from attnlab.errors import UserError
from attnlab.models.predictor import Predictor
from attnlab.tasks.reconstruction import Reconstruction
from attnlab.tasks.task import Guessable, Sliced, Task

TASK = Reconstruction(DrawnSeries(Henon(), rows=200))


class Repeats(Predictor):
    """Stands for a model that predicts the last row."""

    def hidden(self, inputs, ctx, state=None):
        return inputs, None

    def losses(self, hidden, targets, key=None):
        return jnp.mean((hidden - targets) ** 2, axis=-1)


def test_every_row_is_followed_by_the_next():
    assert isinstance(TASK, Task) and isinstance(TASK, Sliced) and isinstance(TASK, Guessable)
    rows = scaled(TASK.data).split('test')
    source = TASK.source('test', 7)
    assert TASK.vocab == 2 and len(rows) == 40 and len(source) == 33
    last = source[32]
    np.testing.assert_allclose(last['tokens'], rows[32:39], rtol=1e-6)
    np.testing.assert_allclose(last['targets'], rows[33:40], rtol=1e-6)
    assert len(TASK.source('test', 7, tokens=20)) == 2
    with pytest.raises(UserError, match=r'config.length is 40; it must be at least 1, and below the 40 rows'):
        TASK.source('test', 40)


def test_baselines_are_those_of_a_model_that_does_as_they_do():
    parts = TASK.slices('test', 7, (1, 2), 10)
    assert list(parts) == ['1x', '2x'] and parts['2x'].source[0]['tokens'].shape == (14, 2)
    source = parts['1x'].source
    batch = {name: jnp.asarray(np.stack([source[i][name] for i in range(10)])) for name in source[0]}
    guesses = TASK.trivial(parts['1x'])['loss']
    assert float(TASK.measure(Repeats(), batch, None)['loss'].mean()) == pytest.approx(guesses['last row'])
    assert guesses['mean'] == pytest.approx(float(jnp.mean(batch['targets'] ** 2)))
    batch['weights'] = batch['weights'].at[1:].set(0)
    alone = float(jnp.mean((batch['tokens'][0] - batch['targets'][0]) ** 2))
    assert float(TASK.measure(Repeats(), batch, None)['loss'].mean()) == pytest.approx(alone)


def test_fewer_stretches_than_there_are_lie_all_over_the_split():
    every, part = TASK.source('test', 7), TASK.slices('test', 7, (1,), 4)['1x'].source
    assert len(part) == 4
    for index, place in enumerate(spread(len(every), 4)):
        np.testing.assert_array_equal(part[index]['tokens'], every[place]['tokens'])
