"""Runs of models of dynamical systems by themselves: measures of known pairs, and exponents that are known."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.config import spec
from attnlab.data.series.series import Shares
from attnlab.errors import UserError
from attnlab.evals.attractor import Attractor, divergence, let_go, spectral_distance
from attnlab.evals.cadence import AtEnd
from attnlab.models.predictor import Dynamical
from attnlab.train.setup import prepare
from attnlab.train.state import joined, split
from configs import dynamics, grokking


def test_divergence_counts_what_lies_outside():
    truth = np.random.default_rng(0).uniform(size=(4000, 2))
    assert divergence(truth, truth) == pytest.approx(0)
    half = np.concatenate([truth, np.full_like(truth, 7.0)])
    assert divergence(half, truth) == pytest.approx(np.log(2), abs=1e-3)
    half[len(truth) :] = np.nan
    assert divergence(half, truth) == pytest.approx(np.log(2), abs=1e-3)
    assert divergence(np.full_like(truth, np.inf), truth) > 10


def test_divergence_is_of_all_bins_however_many():
    rng = np.random.default_rng(1)
    truth, rows = rng.normal(size=(300, 2)), rng.normal(size=(200, 2))
    ends = list(zip(truth.min(axis=0), truth.max(axis=0), strict=True))
    inside = [np.histogramdd(each, bins=30, range=ends)[0].reshape(-1) for each in (truth, rows)]
    counts = [np.append(each, len(of) - each.sum()) + 1e-5 for each, of in zip(inside, (truth, rows), strict=True)]
    p, q = (each / each.sum() for each in counts)
    assert divergence(rows, truth) == pytest.approx(np.sum(p * np.log(p / q)), rel=1e-6)
    one = rng.normal(size=(300, 1))
    assert divergence(one, one) == pytest.approx(0, abs=1e-9) and divergence(one + 9, one) > 10


@pytest.mark.parametrize('variates', [4, 8, 20, 250])
def test_divergence_tells_rows_of_many_variates_apart(variates):
    """Better is nearer, and what rests in the middle, or leaves, is farthest."""
    rng = np.random.default_rng(2)
    truth, again = rng.normal(size=(2, 300, variates))
    half = np.where(np.arange(300)[:, None] % 2, again, np.nan)
    others = again, again + 0.5, again + 1, again + 9, np.full_like(again, 1e300), np.full_like(again, np.nan)
    found = [divergence(rows, truth) for rows in others]
    assert found[0] < 0.2 and np.all(np.diff(found[:5]) > 0.1) and np.isfinite(found).all()
    assert divergence(truth, truth) == 0 and found[5] > found[3] and divergence(half, truth) > found[3]
    assert found[0] < divergence(0.7 * again, truth) < divergence(0 * again, truth)


def test_divergence_of_many_variates_is_that_of_known_densities():
    """Normal rows whose mean is moved by `m`: `m^2 / 2` a variate, either way."""
    truth, again = np.random.default_rng(3).normal(size=(2, 8_000, 4))
    assert divergence(again, truth) == pytest.approx(0, abs=0.1)
    assert divergence(again + 0.5, truth) == pytest.approx(0.5, abs=0.1)
    assert divergence(again + 1, truth) == pytest.approx(2, abs=0.4)


def test_spectra_are_apart_by_frequency_not_by_size_or_phase():
    t = np.arange(4000)[:, None]
    slow, fast = np.sin(0.05 * t), np.sin(0.9 * t)
    assert spectral_distance(3 * np.sin(0.05 * t + 1) + 2, slow) < 0.02
    assert spectral_distance(fast, slow) > 0.99
    assert spectral_distance(np.where(t > 100, np.nan, slow), slow) == 1.0


class HenonMap(Dynamical):
    """Stands for a model: the map of Henon 1976, whose greatest exponent is known."""

    def enter(self, row):
        return row

    def step(self, state):
        return jnp.stack([1 - 1.4 * state[:, 0] ** 2 + state[:, 1], 0.3 * state[:, 0]], axis=1)

    def observed(self, state):
        return state

    def region(self, state):
        return (state[:, :1] > 0).astype(jnp.int32)


def test_the_exponent_of_a_map_is_the_known_one():
    run, regions, exponent = jax.jit(lambda first: let_go(HenonMap(), first, 100, 20_000))(jnp.zeros((1, 2)))
    assert float(exponent) == pytest.approx(0.419, abs=0.01)
    np.testing.assert_array_equal(np.asarray(regions)[:, 0], np.asarray(run)[:, 0] > 0)
    np.testing.assert_allclose(run[1:, 1], 0.3 * run[:-1, 0], rtol=1e-5, atol=1e-6)


def test_a_map_that_falls_to_a_point(tmp_path):
    """`z <- 0.9 z + 0.1`: its run ends at one, and a row 20 rows on is that much nearer."""
    config = dynamics.get_config('data=henon,state=3,rectified=1')
    with config.unlocked():
        config.task.data.rows, config.batch_size = 2_000, 4
    setup = prepare(config)
    evaluator = Attractor(AtEnd(), starts=50, transient=300)
    evaluator.load_data(setup)
    model = setup.make_model(nnx.Rngs(0))
    model.recurrent[...] = jnp.zeros((3, 3))
    model.diagonal[...], model.offset[...] = jnp.full(3, 0.9), jnp.full(3, 0.1)
    _, params, buffers = split(model)
    found = evaluator.evaluate(setup, joined(params, buffers))
    assert found.numbers['exponent'] == pytest.approx(np.log(0.9), abs=1e-4) and found.numbers['regions'] == 1
    np.testing.assert_allclose(found.runs['model'], 1.0, atol=1e-4)
    rows = found.runs['truth']
    places = np.linspace(0, len(rows) - 21, 50).astype(int)
    expected = np.mean((1 + 0.9**20 * (rows[places] - 1) - rows[places + 20]) ** 2)
    assert found.numbers['error'] == pytest.approx(expected, rel=1e-3)
    assert found.numbers['truth_again/divergence'] < found.numbers['gaussian/divergence'] < 20
    assert found.numbers['model/divergence'] > found.numbers['gaussian/divergence']
    assert [row[0] for row in found.table('a run').rows] == ['model', 'truth again', 'gaussian']
    found.draw(tmp_path)
    names = ['attractor.csv', 'attractor.png', 'powers.csv', 'powers.png']
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    with (tmp_path / 'attractor.csv').open() as file:
        assert float(next(csv.DictReader(file))['truth 0']) == pytest.approx(rows[0, 0])


def test_what_cannot_run_is_named():
    with pytest.raises(UserError, match='Attractor is for a task of Reconstruction and a model that runs by itself'):
        Attractor(AtEnd()).load_data(prepare(grokking.get_config('')))
    with pytest.raises(UserError, match='Attractor has ahead 5000'):
        Attractor(AtEnd(), ahead=5000).load_data(prepare(dynamics.get_config('data=henon')))
    uneven = dynamics.get_config('data=henon')
    with uneven.unlocked():
        uneven.task.data.split = spec(Shares, train=0.3, test=0.6)
    with pytest.raises(UserError, match='the test split has 12000 rows and training 6000, of which as many'):
        Attractor(AtEnd()).load_data(prepare(uneven))
