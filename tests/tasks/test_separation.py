"""Separation: its metrics, its baselines, and what is not counted."""

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.data.series.mixtures import DrawnMixtures
from attnlab.functional.separation import si_snr
from attnlab.models.predictor import Predictor
from attnlab.tasks.separation import Separation
from attnlab.tasks.task import Guessable, Sliced, Task

TASK = Separation(DrawnMixtures(train=6, held_out=4))


class Stands(Predictor):
    """Stands for a model whose estimates are the sources it was told, in the other order, twice as loud, and noise."""

    def __init__(self, batch, by):
        self.estimates = 2 * batch['sources'][:, ::-1] + by * np.random.default_rng(0).standard_normal(
            batch['sources'].shape
        ).astype(np.float32)

    def hidden(self, inputs, ctx, state=None):
        assert inputs.shape[2] == 1 and ctx.positions.shape == inputs.shape[:2]
        return jnp.asarray(self.estimates), None

    def losses(self, hidden, targets, key=None):
        return jnp.full(hidden.shape[:2], -1.5)

    def logits(self, hidden):
        return hidden


def batch(source):
    rows = [source[i] for i in range(len(source))]
    return {name: jnp.asarray(np.stack([row[name] for row in rows])) for name in rows[0]}


def test_ratios_are_of_the_best_order_and_above_that_of_the_mixture():
    assert isinstance(TASK, Task) and isinstance(TASK, Sliced) and isinstance(TASK, Guessable)
    rows = batch(TASK.source('valid', 400))
    rows['weights'] = jnp.array([1.0, 1.0, 1.0, 0.0])
    model = Stands(rows, 0.5)
    measured = TASK.measure(model, rows, None)
    sources, mixture = rows['sources'], np.tile(np.swapaxes(rows['tokens'], 1, 2), (1, 2, 1))
    ratio = np.asarray(si_snr(jnp.asarray(model.estimates[:, ::-1]), sources))
    assert float(measured['si_snr'].mean()) == pytest.approx(ratio[:3].mean(), abs=1e-3) and ratio.min() > 5
    gain = ratio - np.asarray(si_snr(jnp.asarray(mixture), sources))
    assert float(measured['si_snr_improvement'].mean()) == pytest.approx(gain[:3].mean(), abs=1e-3)
    assert float(measured['loss'].mean()) == pytest.approx(-1.5) and float(measured['loss'].count) == 6


def test_baselines_are_in_every_table():
    parts = TASK.slices('test', 400, (1, 2), 3)
    assert list(parts) == ['1x', '2x', 'mixture', 'ideal_mask'] and parts['2x'].length == 800
    assert parts['2x'].source[0]['tokens'].shape == (800, 1) and len(parts['mixture'].source) == 3
    guesses = TASK.trivial(parts['1x'])
    for name in ('mixture', 'ideal_mask'):
        measured = TASK.measure(Stands(batch(parts['1x'].source), 0.0), batch(parts[name].source), None)
        assert 'loss' not in measured
        for metric in ('si_snr', 'si_snr_improvement'):
            assert float(measured[metric].mean()) == pytest.approx(guesses[metric][name], abs=1e-3)
    gains = guesses['si_snr_improvement']
    assert gains['mixture'] == pytest.approx(0.0, abs=1e-5) and gains['ideal_mask'] > 5
    assert guesses['loss']['mixture'] == -guesses['si_snr']['mixture']


def test_a_row_of_zeros_counts_for_nothing_and_has_a_number():
    rows = {name: jnp.asarray(value[None]) for name, value in TASK.example(64).items()}
    assert {name: value.shape[1:] for name, value in rows.items()} == {
        name: value.shape for name, value in TASK.source('train', 64)[0].items()
    }
    measured = TASK.measure(Stands({'sources': np.zeros((1, 2, 64), np.float32)}, 0.0), rows, None)
    assert all(np.isfinite(one.total) and one.count == 0 for one in measured.values())
