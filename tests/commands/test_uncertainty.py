"""`attnlab uncertainty` of runs of a few steps: of a language model, several of them, and a classifier."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis import odin, scores, uncertainty
from attnlab.analysis.outputs import changed, outputs, reader, stacked
from attnlab.analysis.risk import LOSSES
from attnlab.cli import main
from attnlab.data.long_range.drawn import Drawn
from attnlab.quantize.formats import Symmetric
from attnlab.quantize.layers import Quantization
from attnlab.runs.loading import load_run
from attnlab.tasks.task import context
from attnlab.train.cost import forward_flops_per_token
from tests.bad_inputs.conftest import LANGUAGE, SMALL, originals

__all__ = ['originals']


def asked(run, *flags):
    """The exit status of the command."""
    return main(['uncertainty', f'--workdir={run}', '--compilation_cache=', *flags])


def record(run, name='4-uncertainty'):
    """What it has written last: results of other requests stay beside it."""
    written = [path for path in run.glob(f'analysis/{name}*.json') if re.fullmatch(r'(-\d+)?', path.stem[len(name) :])]
    return json.loads(max(written, key=lambda path: path.stat().st_mtime_ns).read_text())


@pytest.fixture(scope='module')
def larger(originals, tmp_path_factory):
    """A run of the same text, of another seed, width and length, whose head is no linear map."""
    folder = tmp_path_factory.mktemp('larger') / 'run'
    config = f'--config={LANGUAGE}:zoo=mha,head=softmax_soft_cap,data={originals / "text.txt"}'
    short = [flag for flag in SMALL if 'dim' not in flag and 'length' not in flag]
    changed = ['--config.model.dim=16', '--config.length=24', '--config.seed=3']
    assert main(['train', config, *short, *changed, f'--workdir={folder}']) == 0
    return folder


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    """A classifier of drawn images."""
    folder = tmp_path_factory.mktemp('images') / 'run'
    short = ('--config.model.dim=8', '--config.model.stack.depth=1', '--config.steps=2', '--config.batch_size=2')
    kept = ('--config.checkpoint.every=2', '--config.report.tensorboard=False', '--compilation_cache=')
    evaluated = '--config.evals=()'
    config = '--config=images:zoo=mingru,data=count'
    assert main(['train', config, *short, *kept, evaluated, f'--workdir={folder}']) == 0
    return folder


def test_features_of_a_language_model_are_what_its_head_reads(originals):
    loaded = load_run(originals / 'run')
    rows = stacked(loaded, 'valid', 3, 1)
    found = outputs(loaded, rows)
    model = loaded.model()
    hidden, _ = jax.jit(lambda rows: model.hidden(rows['tokens'], context(rows)))(rows)
    there = rows['weights'] > 0
    assert not there.all() or there.size == len(found.labels)
    np.testing.assert_allclose(found.features, np.asarray(hidden)[there], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.logits, np.asarray(model.logits(hidden))[there], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.labels, rows['targets'][there])
    np.testing.assert_array_equal(found.groups, np.nonzero(there)[0])


def test_the_step_of_a_text_is_along_the_sign_of_the_derivative_of_its_embeddings(originals):
    loaded = load_run(originals / 'run')
    rows = {name: jnp.asarray(array) for name, array in stacked(loaded, 'valid', 1, 1).items()}
    # What is not predicted counts for nothing.
    rows['weights'] = rows['weights'] * (jnp.arange(rows['weights'].shape[1]) < 5)[None]
    unit = float(jax.jit(lambda variables: odin.spread(loaded.setup, variables, rows))(loaded.variables))
    table = loaded.model().embedding.weight[...][rows['tokens']]
    np.testing.assert_allclose(unit, table.std(), rtol=1e-4)

    def logits(vectors):
        model = nnx.merge(loaded.setup.graphdef, loaded.variables)
        model.embed = lambda tokens, ctx: vectors
        return model.logits(model.hidden(rows['tokens'], context(rows))[0])[0, :5]

    def score(vectors):
        return jnp.sum(jax.nn.log_softmax(logits(vectors) / odin.TEMPERATURE).max(axis=-1))

    step = unit * jnp.sign(jax.jit(jax.grad(score))(table))
    found = reader(loaded, odin.SIZES, unit)({name: np.asarray(array) for name, array in rows.items()})
    assert found.odin.shape == (len(odin.SIZES), 5)
    plain, expected = (
        odin.odin(np.asarray(jax.jit(logits)(x), np.float64)) for x in (table, table + odin.SIZES[-1] * step)
    )
    assert np.abs(expected - plain).max() > 0
    np.testing.assert_allclose(found.odin[-1] - plain, expected - plain, rtol=0.02, atol=1e-9)


def test_a_language_model_has_the_scores_of_features(originals, monkeypatch, capsys):
    run, read = originals / 'run', []
    # The splits of this text are alike: which is read for what is noted.
    monkeypatch.setattr(uncertainty, 'stacked', lambda *each: (read.append(each[1:3]), stacked(*each))[1])
    assert asked(run, '--rows=8', '--fitted_rows=6') == 0
    printed = capsys.readouterr().out
    assert 'what the model says of its rows' in printed and 'noise (rows)' in printed
    found = record(run)
    names = {
        *('max_probability', 'max_logit', 'negative_entropy', 'energy'),
        *('mahalanobis', 'conjnorm', 'vim', 'odin'),
    }
    assert set(found['selective']) | {'relative'} == names | {'relative'} and 'odin' not in found['left_out']
    assert set(found['detection']) == {'noise', 'noise (rows)', 'shuffled', 'shuffled (rows)'}
    assert (found['fitted_split'], found['fitted_rows']) == ('train', 6) and found['odin_step'] in odin.SIZES
    assert found['step'] == 4
    assert 0 <= found['conformal']['coverage'] <= 1 and set(found['of_itself']) >= {'sure', 'variance'}
    assert read == [('valid', 8), ('train', 6)]
    loaded = load_run(run)
    trained, rows = stacked(loaded, 'train', 6, 1), stacked(loaded, 'valid', 8, 1)
    known, tested, noise = (outputs(loaded, each) for each in (trained, rows, dict(changed(rows, trained))['noise']))
    score = scores.Mahalanobis.fitted(known.features, known.labels).score
    expected = scores.auroc(score(tested.part(1, 2).features), score(noise.features))
    np.testing.assert_allclose(found['detection']['noise']['mahalanobis'], expected, rtol=1e-6)
    assert found['false_positives'].keys() == found['detection'].keys() and 'passes where 95 %' in printed
    assert asked(run, '--rows=8', '--fitted_split=valid') == 2
    assert '--fitted_split is valid, which is the split that is reported' in capsys.readouterr().err


def test_language_models_together(originals, larger, capsys):
    run = originals / 'run'
    assert asked(run, f'--ensemble={larger}', f'--cascade={larger}', '--budget=1.9', '--rows=8') == 0
    printed = capsys.readouterr().out
    assert 'cascade by a learned rule' in printed and 'cascade within the budget' in printed
    found = record(run, '4-uncertainty-ensemble')
    assert {'agreement', 'mahalanobis', 'odin'} <= found['selective'].keys()
    assert found['left_out'].keys() >= {'max_logit', 'energy', 'vim'}
    members = [load_run(place) for place in (run, larger)]
    # All members read every row, and as the first one does: the second run, a member, costs as much as it does alone.
    at_16 = dataclasses.replace(members[1].setup, length=16)
    alone = forward_flops_per_token(members[0].setup) / forward_flops_per_token(at_16)
    np.testing.assert_allclose(found['cascade']['cost'][0], 1 + alone)
    assert 0.1 < alone < 0.9
    rows = stacked(members[0], 'valid', 8, 1)
    first, second = (outputs(each, rows) for each in members)
    together = first.together([second])
    np.testing.assert_allclose(found['accuracy'], together.part(1, 2).right.mean())
    # What is handed on is a row: of none the accuracy is that of the ensemble, of all that of the second run.
    assert found['cascade']['rates'] == [round(tenth * 0.8) / 8 for tenth in range(11)]
    ends = [together.by_row(each.right).mean() for each in (together, second)]
    np.testing.assert_allclose([found['cascade']['accuracy'][place] for place in (0, -1)], ends)
    confidence = together.by_row(scores.max_probability(together.logits))
    np.testing.assert_allclose(found['cascade']['thresholds'][:-1], np.sort(confidence)[[0, 1, 2, 2, 3, 4, 5, 6, 6, 7]])
    # The head of the larger one is no linear map, which is said.
    assert asked(larger, '--rows=8') == 0
    assert 'logits of BoundedHead are no linear map' in capsys.readouterr().out
    assert 'vim' not in record(larger)['selective']


def test_a_row_costs_as_much_in_few_bits(originals):
    loaded = load_run(originals / 'run')
    few = loaded.altered(Quantization(Symmetric(4)))
    assert uncertainty._operations(few) == uncertainty._operations(loaded) > 0


@pytest.mark.parametrize('name', LOSSES)
def test_a_risk_of_a_language_model(originals, capsys, name):
    run = originals / 'run'
    assert asked(run, '--rows=12', f'--risk={name}', '--risk_level=0.4', '--decay=0.9') == 0
    assert f'risk of {name}, of a row, 0.4 at most in expectation' in capsys.readouterr().out
    found = record(run)
    loaded = load_run(run)
    of = outputs(loaded, stacked(loaded, 'valid', 12, 1))
    chosen, tested = of.part(0, 2), of.part(1, 2)
    setting = found['risk']['setting']

    def lost(part):
        p = np.exp(part.logits) / np.exp(part.logits).sum(axis=1, keepdims=True)
        own = p[np.arange(len(p)), part.labels]
        gone = 1 - own > setting + 1e-12 if name == 'missed' else (p.max(axis=1) > setting + 1e-12) & ~part.right
        return np.array([gone[part.groups == row].mean() for row in np.unique(part.groups)])

    # Six rows choose: 6/7 of their mean loss and 1/7 are 0.4 at most, and this is said of the other six.
    assert lost(chosen).sum() / 7 + 1 / 7 <= 0.4 + 1e-9
    np.testing.assert_allclose(found['risk']['risk']['value'], lost(tested).mean(), atol=1e-9)
    assert (found['risk']['loss'], found['risk']['level']) == (name, 0.4)
    assert 0 <= found['recent_risk']['risk']['value'] <= 1 and 'recent: coverage' in found['conformal']
    assert asked(run, '--rows=12', f'--risk={name}', '--risk_level=0.1') == 2
    assert '--risk_level is 0.1; 6 rows that choose promise 0.143 at best' in capsys.readouterr().err


def test_scores_are_fitted_to_no_examples_that_are_reported_whatever_their_split_is_called(images, capsys, monkeypatch):
    monkeypatch.setattr(Drawn, 'same_rows', lambda data, split, other: {split, other} == {'valid', 'test'})
    assert asked(images, '--split=test', '--fitted_split=valid') == 2
    assert '--fitted_split is valid, whose examples are those of test, the split' in capsys.readouterr().err


def test_a_classifier(originals, images, capsys):
    assert asked(images, '--rows=24', '--fitted_rows=24', '--risk=wrong', '--risk_level=0.2', '--decay=0.95') == 0
    assert 'risk of wrong' in capsys.readouterr().out
    found = record(images, '2-uncertainty')
    assert {'mahalanobis', 'conjnorm', 'vim', 'odin'} <= found['selective'].keys()
    assert set(found['detection']) == {'noise', 'shuffled', 'inverted', 'five times'} and found['of_itself'] == {}
    for flag in (f'--cascade={images}', f'--ensemble={images}'):
        assert asked(originals / 'run', '--rows=8', flag) == 2
        assert 'images' in capsys.readouterr().err.casefold()
