"""The basis in which the steps of a window are not correlated."""

import dataclasses

import numpy as np
import pytest

from attnlab.data.series.basis import TrainingBasis, correlations
from attnlab.data.series.columns import Columns
from attnlab.data.series.drawn import DrawnSeries, Lorenz, Seasonal
from attnlab.data.series.windows import scaled
from attnlab.errors import UserError

STEPS = 12


def windows(rows, steps=STEPS):
    return np.lib.stride_tricks.sliding_window_view(rows, steps, axis=0)


def test_correlations_are_those_of_all_windows():
    rows = np.concatenate([DrawnSeries(Lorenz(), rows=300).values(), np.full((300, 1), 4.0)], axis=1)
    expected = np.mean([np.corrcoef(windows(rows[:, variate]), rowvar=False) for variate in range(3)], axis=0)
    np.testing.assert_allclose(correlations(rows, STEPS), expected, atol=1e-10)
    with pytest.raises(UserError, match='no variate changes'):
        correlations(rows[:, 3:], STEPS)


def test_the_basis_is_orthogonal_and_takes_correlations_off():
    series = DrawnSeries()
    found = TrainingBasis(series).rows(96).astype(np.float64)
    np.testing.assert_allclose(found @ found.T, np.eye(96), atol=1e-5)
    past = windows(scaled(series).split('train')[:, 0].astype(np.float64), 96)
    turned = past @ found.T
    # Eigenvalues descend, and are the variances of the coordinates.
    variances = turned.var(axis=0)
    assert (np.diff(variances) < 0.02).all() and variances[0] > 100 * variances[-1]
    before, after = (np.abs(np.corrcoef(one, rowvar=False) - np.eye(96)).mean() for one in (past, turned))
    assert before > 0.4 and after < 0.01


@dataclasses.dataclass(frozen=True)
class Poisoned(Seasonal):
    """Of which the rows behind those of training are other ones."""

    def draw(self, rng, rows):
        drawn = super().draw(rng, rows)
        drawn[int(0.7 * rows) :] = rng.standard_normal((rows - int(0.7 * rows), 1))
        return drawn


def test_training_rows_alone_and_targets_alone_give_the_basis():
    clean, poisoned = (TrainingBasis(DrawnSeries(of, rows=400)).rows(STEPS) for of in (Seasonal(), Poisoned()))
    np.testing.assert_array_equal(clean, poisoned)
    lorenz = DrawnSeries(Lorenz(), rows=400)
    first = TrainingBasis(lorenz, Columns(targets=('0',))).rows(STEPS)
    assert (first != TrainingBasis(lorenz).rows(STEPS)).any()
    with pytest.raises(UserError, match='a basis of 200 steps needs 400 training rows; the series has 280'):
        TrainingBasis(lorenz).rows(200)
