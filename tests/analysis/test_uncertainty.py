"""What is said of a classifier: constructed outputs with known answers, and changed inputs."""

import dataclasses
import pathlib
from unittest import mock

import numpy as np
import pytest
from flax import nnx
from scipy.special import softmax

from attnlab.analysis import odin, uncertainty
from attnlab.analysis.outputs import Outputs, changed
from attnlab.analysis.uncertainty import Scores, UncertaintyRequest, examined, recent
from attnlab.errors import UserError
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.heads.evidential import EvidentialHead
from attnlab.models.heads.language import BoundedHead, LanguageHead
from attnlab.runs.loading import Loaded
from attnlab.tasks.long_range import Classification


def outputs(rng: np.random.Generator, count: int, head: ClassificationHead, scale: float = 1.0) -> Outputs:
    """Features about the corners of a square in the first two of six channels; the head sees these two."""
    labels = rng.integers(0, 4, count)
    corners = 6.0 * np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]])[labels]
    features = np.concatenate([corners, np.zeros((count, 4))], axis=1) + rng.standard_normal((count, 6))
    weight, bias = (np.asarray(each, np.float64) for each in (head.linear.matrix(), head.linear.bias[...]))
    return Outputs(features, scale * (features @ weight + bias), labels)


def test_a_classifier_of_four_corners():
    head = ClassificationHead(6, 1, classes=4, rngs=nnx.Rngs(0))
    head.linear.weight[...] = np.concatenate([np.array([[1, 1, -1, -1], [1, -1, 1, -1]]), np.zeros((4, 4))])
    rng = np.random.default_rng(0)
    trained, chosen, tested = (outputs(rng, count, head) for count in (500, 300, 300))
    scored = Scores.fitted(trained, head)
    away = Outputs(tested.features + np.array([0, 0, 9, 9, 0, 0]), tested.logits, tested.labels)
    found = examined(chosen, tested, scored, 0.1, {'away': away, 'same': tested})
    assert found.accuracy > 0.99
    of_logits, of_features = (
        {'max_probability', 'max_logit', 'negative_entropy', 'energy'},
        {'mahalanobis', 'vim', 'conjnorm'},
    )
    assert set(found.selective) - {'relative'} == of_logits | of_features
    # What the head does not see leaves its logits alone; scores of features tell all of it.
    assert found.detection['away']['energy'] == 0.5 and found.detection['same']['mahalanobis'] == 0.5
    assert found.detection['away']['mahalanobis'] > 0.99 and found.detection['away']['conjnorm'] > 0.9
    # As many of what is unchanged pass as are to, and few of what is far away.
    assert found.false_positives['same']['mahalanobis'] == found.false_positives['away']['energy'] == 0.95
    assert found.false_positives['away']['mahalanobis'] < 0.02 and set(found.false_positives) == {'away', 'same'}
    assert found.conformal['coverage'] > 0.85 and found.conformal['asked'] == 0.9
    assert found.selective['energy']['at 100%'] == found.accuracy
    assert found.odin_step is None and found.cascade is None
    # Of two sizes of a step the one that makes training surer is taken, and its scores are those of ODIN.
    moved = np.stack([odin.odin(trained.logits / 2), odin.odin(2 * trained.logits)])
    with_steps = Scores.fitted(dataclasses.replace(trained, odin=moved), head)
    halves = dataclasses.replace(tested, odin=odin.odin(-tested.logits)[None]).part(1, 2)
    assert with_steps.odin_index == 1 and halves.odin.shape == (1, 150)
    np.testing.assert_allclose(with_steps.of(halves)['odin'], odin.odin(-tested.logits[1::2]))
    cold = examined(*(outputs(np.random.default_rng(1), 300, head, 0.01) for _ in range(2)), scored, 0.1, {})
    # Logits a hundredth as large say little of what is known: a temperature far below one mends it.
    assert cold.temperature < 0.1
    assert cold.calibration['with temperature']['loss'] < cold.calibration['as it is']['loss']
    assert cold.calibration['with temperature']['error']['value'] < cold.calibration['as it is']['error']['value']


def test_changed_inputs_keep_padding():
    rng = np.random.default_rng(2)
    segments = np.array([[1, 1, 1, 0], [1, 1, 1, 1]])
    rows = {'tokens': rng.standard_normal((2, 4, 1)).astype(np.float32), 'segments': segments, 'label': np.zeros(2)}
    made = dict(changed(rows, rows))
    assert list(made) == ['noise', 'shuffled', 'inverted', 'five times']
    for one in made.values():
        assert one['tokens'].dtype == np.float32 and one['tokens'][0, 3] == rows['tokens'][0, 3]
    np.testing.assert_allclose(np.sort(made['shuffled']['tokens'], axis=1)[1], np.sort(rows['tokens'], axis=1)[1])
    np.testing.assert_array_equal(made['five times']['tokens'][1], 5 * rows['tokens'][1])
    tokens = {**rows, 'tokens': np.array([[4, 5, 6, 0], [6, 6, 4, 5]], np.int32)}
    noise = dict(changed(tokens, tokens))['noise']['tokens']
    assert set(noise[segments > 0].tolist()) <= {4, 5, 6} and noise.dtype == np.int32


def test_members_of_an_ensemble_that_say_the_same_agree():
    head = ClassificationHead(6, 1, classes=4, rngs=nnx.Rngs(0))
    head.linear.weight[...] = np.concatenate([np.array([[1, 1, -1, -1], [1, -1, 1, -1]]), np.zeros((4, 4))])
    rng = np.random.default_rng(3)
    one = outputs(rng, 40, head, 0.1)
    other = dataclasses.replace(one, logits=np.roll(one.logits, 1, axis=1))
    same, apart = one.together([one]), one.together([other])
    np.testing.assert_allclose(softmax(same.logits, axis=1), softmax(one.logits, axis=1), rtol=1e-9)
    p, q = softmax(one.logits, axis=1), softmax(other.logits, axis=1)
    np.testing.assert_allclose(np.exp(apart.logits), (p + q) / 2, rtol=1e-9)
    np.testing.assert_allclose(Scores().of(same)['agreement'], 0, atol=1e-12)
    assert (Scores().of(apart)['agreement'] < 0).all()
    assert apart.part(1, 2).members.shape == (2, 20, 4)
    # Logits of means are logarithms of probabilities: their size is that of none, and no map gave them.
    whole = Scores.fitted(outputs(rng, 40, head), head)
    assert {'energy', 'max_logit', 'vim'} <= whole.of(one).keys()
    assert {'energy', 'max_logit', 'vim'} & whole.of(apart).keys() == set()
    with pytest.raises(UserError, match='members of an ensemble have 3 and 4 classes'):
        one.together([dataclasses.replace(one, logits=one.logits[:, :3])])
    with pytest.raises(UserError, match='members of an ensemble are asked for different labels'):
        one.together([dataclasses.replace(one, labels=1 - one.labels)])
    # Evidence is not a linear map of features.
    evidential = Scores.fitted(outputs(rng, 40, head), EvidentialHead(6, 1, classes=4, rngs=nnx.Rngs(0)))
    assert evidential.virtual is None
    assert evidential.left_out == {'vim': 'logits of EvidentialHead are no linear map of what it reads'}


def tokens(rng: np.random.Generator, rows: int, head: LanguageHead, moved: float = 0.0) -> Outputs:
    """Rows of five predictions over four tokens, from features about a mean of the row's."""
    groups = np.repeat(np.arange(rows), 5)
    features = 3 * rng.standard_normal((rows, 6))[groups] + 0.3 * rng.standard_normal((5 * rows, 6))
    features[:, 5] = 0.01 * features[:, 5] + moved
    logits = features @ np.asarray(head.weight[...], np.float64).T
    return Outputs(features, logits, logits.argmax(axis=1), groups=groups)


def test_rows_of_predictions_are_told_from_others_by_their_means():
    rng, head = np.random.default_rng(6), LanguageHead(6, 4, rngs=nnx.Rngs(0))
    head.weight[...] = head.weight[...].at[:, 5].set(0.0)
    trained, chosen, tested = (tokens(rng, count, head) for count in (40, 20, 30))
    scored = Scores.fitted(trained, head)
    # Logits of a vocabulary are a map without a bias: they are all zero at the origin.
    np.testing.assert_allclose(scored.virtual.origin, 0, atol=1e-12)
    assert 'vim' in Scores.fitted(trained, BoundedHead(6, 4, soft_cap=3.0, rngs=nnx.Rngs(0))).left_out
    found = examined(chosen, tested, scored, 0.1, {'away': tokens(rng, 30, head, moved=1.0)})
    assert {'mahalanobis', 'conjnorm', 'vim'} <= found.selective.keys() == found.detection['away'].keys()
    of_rows = found.detection['away (rows)']
    assert of_rows.keys() == found.selective.keys()
    # The head does not see what has moved; distances of a row's mean tell it.
    assert abs(of_rows['energy'] - 0.5) < 0.25 and of_rows['mahalanobis'] > 0.99
    means = np.stack([trained.features[trained.groups == row].mean(axis=0) for row in range(40)])
    apart = tested.by_row(tested.features) - means.mean(axis=0)
    centred = means - means.mean(axis=0)
    covariance = centred.T @ centred / 40
    covariance += 1e-4 * np.trace(covariance) / 6 * np.eye(6)
    expected = -0.5 * np.einsum('rd,de,re->r', apart, np.linalg.inv(covariance), apart)
    np.testing.assert_allclose(scored.of_rows(tested, scored.of(tested))['mahalanobis'], expected, rtol=1e-6)
    np.testing.assert_allclose(
        scored.of_rows(tested, scored.of(tested))['energy'], scored.of(tested)['energy'].reshape(30, 5).mean(axis=1)
    )
    # Rows are halved whole.
    assert tested.part(1, 2).rows.tolist() == list(range(1, 30, 2)) and len(tested.part(1, 2).labels) == 75
    assert tested.only(3).groups.tolist() == [3] * 5


def test_all_of_an_ensemble_cost(monkeypatch):
    rng = np.random.default_rng(5)
    known = Outputs(np.zeros((8, 1)), rng.standard_normal((8, 3)), rng.integers(0, 3, 8))
    run = mock.Mock(spec=Loaded, setup=mock.Mock(length=2, task=mock.Mock(spec=Classification)), ema=False)
    monkeypatch.setattr(uncertainty, '_run', lambda *_, **__: run)
    monkeypatch.setattr(uncertainty, 'stacked', lambda *_: {'label': known.labels})
    monkeypatch.setattr(uncertainty, 'outputs', lambda *_: known)
    monkeypatch.setattr(uncertainty, 'forward_flops_per_token', lambda setup: 5.0)
    found = examined(known, known, Scores(), 0.1, {})
    for count in (1, 3):
        here, other = pathlib.Path('here'), pathlib.Path('other')
        both = uncertainty._handed_on(found, UncertaintyRequest(second=other), here, [run] * count, {}, known, 'test')
        assert both.cascade.cost[0] == count


def test_recent_rows_cover_where_all_of_them_do_not():
    rng = np.random.default_rng(4)
    # Half way through labels stop following the logits.
    logits = 4 * rng.standard_normal((2000, 3))
    labels = np.where(np.arange(2000) < 1000, logits.argmax(1), rng.integers(0, 3, 2000))
    found = Outputs(np.zeros((2000, 1)), logits, labels)
    even, fresh = (recent(found, 0.1, decay) for decay in (1.0, 0.95))
    assert even['recent: coverage'] < 0.88 < fresh['recent: coverage']
    with pytest.raises(UserError, match=r'--decay is 0\.0'):
        recent(found, 0.1, 0.0)
