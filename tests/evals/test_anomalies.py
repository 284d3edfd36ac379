"""Anomalies of a series by the errors of a model that fills gaps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.data.series.anomalies import Disturbances, detection
from attnlab.data.series.gaps import Interpolation
from attnlab.data.series.windows import scaled
from attnlab.errors import UserError
from attnlab.evals.anomalies import Anomalies, Detections
from attnlab.evals.cadence import AtEnd
from attnlab.train.setup import prepare
from attnlab.train.state import joined, split
from configs.series import get_config

FINDS = Anomalies(AtEnd(), disturbances=Disturbances(every=32, span=4, size=6.0), count=3, span=2)


@pytest.fixture(scope='module')
def setup():
    config = get_config('task=anomalies,system=linear,lookback=25')
    with config.unlocked():
        config.task.data.rows, config.batch_size = 400, 4
    return prepare(config)


def variables_of(setup):
    _, params, buffers = split(setup.make_model(nnx.Rngs(0)))
    return joined(params, buffers)


def test_every_row_is_scored_once_by_what_was_filled_in_when_it_was_missing(setup):
    """Of a linear model that fills zeros the score of a row is its mean square; of lines, that by hand."""
    variables = variables_of(setup)
    nothing = jax.tree.map(jnp.zeros_like, variables)
    numbers = FINDS.evaluate(setup, nothing).numbers
    series = scaled(setup.task.data)
    values, anomalous = FINDS.disturbances.draw(series.split('test'))
    for metric in ('threshold', 'f1', 'auroc', 'false_alarms'):
        assert numbers[f'model/{metric}'] == pytest.approx(numbers[f'distance_to_mean/{metric}'], rel=1e-5)

    def by_hand(rows):
        scores = np.zeros(len(rows))
        for place in range(3):
            gone = np.arange(25) // 2 % 3 == place
            for first in sorted({min(start, len(rows) - 25) for start in range(0, len(rows), 25)}):
                window = rows[first : first + 25]
                filled = Interpolation().fill(window, ~gone[:, None])
                scores[first : first + 25][gone] = ((filled - window)[gone] ** 2).mean(axis=1)
        return scores

    expected = detection(by_hand(series.split('train')), by_hand(values), anomalous, 0.99)
    for metric, value in expected.items():
        assert numbers[f'linear_interpolation/{metric}'] == pytest.approx(value, rel=1e-5)
    assert numbers['linear_interpolation/auroc'] > 0.6


def test_the_config_ends_with_it_and_the_table_has_a_row_a_score(setup):
    assert [type(one).__name__ for one in setup.evals] == ['BySlice', 'BySlice', 'Anomalies']
    for evaluator in setup.evals:
        evaluator.load_data(setup)
    table = Detections({'model/f1': 0.5, 'model/auroc': 0.75, 'other/f1': 0.25, 'other/auroc': 0.5}).table('a run')
    assert table.rows == [('model', 0.5, 0.75), ('other', 0.25, 0.5)]


def test_trials_that_share_programs_trace_it_once(setup, monkeypatch):
    full, traced = Context.full, []
    monkeypatch.setattr(Context, 'full', lambda *shape: traced.append(shape) or full(*shape))
    variables, first = variables_of(setup), dataclasses.replace(setup)
    FINDS.evaluate(first, variables)
    once = len(traced)
    FINDS.evaluate(dataclasses.replace(setup, seed=setup.seed + 1).sharing(first), variables)
    assert once and len(traced) == once


def test_mistakes_are_named(setup):
    with pytest.raises(UserError, match='the task is Forecasting'):
        FINDS.load_data(prepare(get_config('system=linear')))
    with pytest.raises(UserError, match=r'Anomalies has quantile 1\.0'):
        Anomalies(AtEnd(), quantile=1.0)
    with pytest.raises(UserError, match='40 rows are fewer than a part of Disturbances, 80'):
        Anomalies(AtEnd(), split='valid').load_data(setup)
    short = get_config('task=anomalies,system=linear,lookback=25')
    with short.unlocked():
        short.task.data.rows = 200
    # Before anything is trained.
    with pytest.raises(UserError, match='the valid split has 20 rows; windows of 25 do not fit'):
        Anomalies(AtEnd(), split='valid', disturbances=Disturbances(every=8, span=2)).load_data(prepare(short))
