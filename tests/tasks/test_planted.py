"""Planted mixtures of experts: what is drawn, and the model that is to find it again."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.stats import norm

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.gaussian_experts import GaussianExperts
from attnlab.models.predictor import Predictor
from attnlab.nn.experts import HierarchicalGate, LaplaceGate, SigmoidGate, TemperedGate
from attnlab.nn.planted import PlantedExperts
from attnlab.tasks.planted import TESTED, Planted

PLANTED = PlantedExperts(experts=3, seed=2)
GATES = {'softmax': PLANTED.gate, 'sigmoid': SigmoidGate(), 'laplace': LaplaceGate(), 'tempered': TemperedGate('tanh')}


def model(planted, start=0.0, **options):
    return GaussianExperts(1, planted=planted, start=start, dtype='float32', rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize('gate', GATES)
def test_the_planted_mixture_is_a_model_without_excess(gate):
    """Its density is the definition's, written again with SciPy, and that of the model that starts at it."""
    planted = dataclasses.replace(PLANTED, gate=GATES[gate])
    task = Planted(planted)
    row = {name: jnp.asarray(each[None]) for name, each in task.source('train', 50)[0].items()}
    x, y = (np.asarray(row[name][0], np.float64) for name in ('tokens', 'targets'))
    rows = planted.router()[:3]
    scores = x @ rows.T
    by_hand = {
        'softmax': np.exp(scores),
        'sigmoid': 1 / (1 + np.exp(-scores)),
        'laplace': np.exp(-np.linalg.norm(x[:, None] - rows, axis=-1)),
        'tempered': np.exp(np.tanh(scores)),
    }[gate]
    shares = by_hand / by_hand.sum(axis=1, keepdims=True)
    means = x @ planted.maps()[:, :2].T + planted.maps()[:, 2]
    expected = -np.log(np.sum(shares * norm.pdf(y[:, None], means, planted.noise), axis=1))
    np.testing.assert_allclose(row['least'][0], expected, rtol=1e-4, atol=1e-5)
    found = task.measure(model(planted, experts=3), row, None)
    np.testing.assert_allclose(found['loss'].mean(), expected.mean(), rtol=1e-4)
    np.testing.assert_allclose(found['excess'].mean(), 0, atol=1e-5)


def test_values_come_from_the_experts_in_their_shares():
    x, y, chosen = PLANTED.draw(np.random.default_rng(0), 20_000)
    np.testing.assert_allclose(np.bincount(chosen) / len(x), PLANTED.shares(x).mean(axis=0), atol=0.01)
    maps = PLANTED.maps()[chosen]
    apart = y - np.sum(maps[:, :2] * x, axis=1) - maps[:, 2]
    np.testing.assert_allclose([apart.mean(), apart.std()], [0, 0.3], atol=0.01)


def test_copies_of_an_expert_count_with_their_shares_and_others_as_far_as_they_are():
    maps = PLANTED.maps()
    assert PLANTED.error(np.concatenate([maps, maps]), np.arange(1.0, 7.0)) == 0
    moved = np.concatenate([maps, maps[:1] + np.array([0.0, 0.0, 0.5])])
    assert PLANTED.error(moved, np.array([1.0, 1.0, 1.0, 3.0])) == pytest.approx(0.5 * 3 / 6)


def test_planted_experts_that_none_is_near_are_seen():
    x = PLANTED.draw(np.random.default_rng(0), 500)[0]
    maps, shares = PLANTED.maps(), PLANTED.shares(x).mean(axis=0)
    assert PLANTED.misplaced(maps, shares, x) == pytest.approx(0, abs=1e-6)
    assert PLANTED.misplaced(np.concatenate([maps, maps]), np.tile(shares, 2), x) == pytest.approx(0, abs=1e-6)
    same = np.repeat(maps[:1], 3, axis=0)
    assert PLANTED.error(same, shares) == 0
    assert PLANTED.misplaced(same, shares, x) == pytest.approx(2 * (1 - shares[0]))


@pytest.mark.parametrize(('activation', 'known'), [('identity', False), ('tanh', True)])
def test_a_temperature_is_known_where_rows_cannot_grow_with_it(activation, known):
    planted = dataclasses.replace(PLANTED, gate=TemperedGate(activation))
    x = jnp.asarray(planted.draw(np.random.default_rng(0), 200)[0])
    router = planted.router()
    grown = np.concatenate([2 * router[:3], [[np.log(2), 0]]])
    shares, other = (
        np.asarray(planted.gate.affinities(planted.gate.scores(x, jnp.asarray(each, jnp.float32))))
        for each in (router, grown)
    )
    assert np.allclose(shares, other, rtol=1e-4) != known
    asked = shares.mean(axis=0, dtype=np.float64)
    assert planted.misrouted(router, planted.maps(), asked) == 0
    assert planted.misrouted(router + np.array([[1.0, 2.0]] * 3 + [[0.0, 5.0]]), planted.maps(), asked) < 1e-12
    assert planted.misrouted(grown, planted.maps(), np.ones(3)) == pytest.approx(planted.size + np.log(2))
    twice = np.concatenate([router[:3], router])
    assert planted.misrouted(twice, np.tile(planted.maps(), (2, 1)), np.ones(6)) == pytest.approx(0, abs=1e-12)


def test_twice_as_many_experts_start_at_the_planted_ones():
    found = model(PLANTED, experts=6)
    np.testing.assert_allclose(found.maps[...], np.tile(PLANTED.maps(), (2, 1)), rtol=1e-6)
    x = jnp.asarray(Planted(PLANTED).source('test', 40)[0]['tokens'])
    np.testing.assert_allclose(found.shares(x)[:, :3], model(PLANTED, experts=3).shares(x) / 2, rtol=1e-4)
    tempered = model(dataclasses.replace(PLANTED, gate=TemperedGate()), experts=6)
    np.testing.assert_allclose(tempered.router[...], np.concatenate([found.router[...], [[0, 0]]]), rtol=1e-6)
    away = model(PLANTED, experts=6, start=0.3)
    assert 0.05 < np.std(np.asarray(away.maps[...] - found.maps[...])) < 0.6


def test_the_gradient_lowers_the_loss_of_a_sample():
    task = Planted(PLANTED)
    row = {name: jnp.asarray(each[None]) for name, each in task.source('train', 200)[0].items()}
    graphdef, params = nnx.split(model(PLANTED, experts=3, start=0.3))

    def loss(params):
        return task.measure(nnx.merge(graphdef, params), row, None)['loss'].mean()

    value, gradient = jax.value_and_grad(loss)(params)
    assert loss(jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient)) < value


def test_what_a_trainer_asks_of_the_model_and_the_task():
    made = model(PLANTED, experts=3)
    assert isinstance(made, Predictor)
    row, zeros = Planted().source('test', 7)[0], Planted().example(7)
    assert {name: (x.shape, x.dtype) for name, x in row.items()} == {n: (x.shape, x.dtype) for n, x in zeros.items()}
    part = Planted().slices('test', 7, (1,), 1)['all']
    assert part.length == TESTED == len(part.source[0]['targets'])
    x = jnp.asarray(row['tokens'][None])
    assert [stage.value.shape for stage in made.stages(x, Context.full(1, 7))] == [(1, 7, 3), (1, 7, 3)]
    np.testing.assert_allclose(made.pooled(x, Context.full(1, 7))[0], row['tokens'].mean(0), rtol=1e-4, atol=1e-6)
    assert made.logits(x).shape == (1, 7, 1)


MISTAKES = {
    'rows of groups': (lambda: PlantedExperts(gate=HierarchicalGate()), 'must have one row an expert'),
    'no noise': (lambda: PlantedExperts(noise=0.0), 'noise of PlantedExperts is 0.0; it must be positive'),
    'fewer experts': (lambda: model(PLANTED, experts=4), 'experts is 4; it must be a multiple of those planted, 3'),
    'a start below zero': (lambda: model(PLANTED, experts=3, start=-1.0), 'start is -1.0; it must be at least 0'),
    'another split': (lambda: Planted().source('tset', 3), "PlantedSample has no split 'tset'; did you mean 'test'"),
}


@pytest.mark.parametrize('case', MISTAKES)
def test_mistakes_are_named_in_one_line(case):
    call, sentence = MISTAKES[case]
    with pytest.raises(UserError, match=sentence) as caught:
        call()
    assert '\n' not in str(caught.value)
