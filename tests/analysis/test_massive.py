"""Massive activations: those that were planted, where they stand, and what they do to the loss."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.analysis.massive import largest, looked_at, massive, medians
from attnlab.analysis.question import Question
from attnlab.cli import main
from attnlab.errors import UserError
from attnlab.models.heads.language import TiedHead
from attnlab.runs.loading import load_run
from attnlab.testing.noise import noise
from attnlab.train.rows import rows_of
from attnlab.train.setup import prepare
from configs import series
from tests.bad_inputs.conftest import originals

__all__ = ['originals']

LETTER, CHANNEL = ord('a'), 3


def test_the_criterion_is_of_magnitude_and_of_the_median():
    x = noise(2, 5, 4).at[0, 2, 1].set(-500.0).at[1, 2, 1].set(90.0).at[0, 4, 3].set(9000.0)
    real = jnp.ones((2, 5), bool).at[0, 4].set(False)
    x = jnp.where(jnp.abs(x) < 50, x / 10, x)
    np.testing.assert_allclose(medians(x, real)[0], np.median(np.abs(x[0, :4])), rtol=1e-6)
    # 90 is 1000 medians and too small, 9000 is of padding.
    assert np.argwhere(massive(x, real)).tolist() == [[0, 2, 1]]
    # 500 is large enough, and too few of these medians.
    assert not massive(x + jnp.where(jnp.abs(x) < 50, 10, 0), real).any()
    rows = np.argwhere(largest(x, real))
    assert np.bincount(rows[:, 0]).tolist() == [3, 3] and [0, 2, 1] in rows.tolist() and [1, 2, 1] in rows.tolist()


def planted(loaded, value):
    """The run with a number in the embedding of one letter."""

    def change(model):
        assert not isinstance(model.head, TiedHead)
        model.embedding.weight[...] = model.embedding.weight[...].at[LETTER, CHANNEL].set(value)
        return model

    return loaded.altered(change)


def test_planted_activations_are_found_and_set(originals):
    plain = load_run(originals / 'run')
    rows = rows_of(plain.setup, 'valid', 2)
    tokens = np.concatenate([row['tokens'] for row in rows])
    expected = int(np.sum(tokens == LETTER))
    found, without = (looked_at(planted(plain, value), rows) for value in (-5000.0, 0.0))
    level = found.levels[0]
    assert expected > 1 and level.massive == expected and level.channels == {CHANNEL: expected}
    assert level.tokens == {int(at): int(np.sum(tokens[:, at] == LETTER)) for at in np.argwhere(tokens == LETTER)[:, 1]}
    assert [place.value for place in level.largest[:2]] == [-5000.0] * 2
    assert all(tokens[place.row, place.token] == LETTER and place.channel == CHANNEL for place in level.largest[:2])
    # Set to zero, the model is that in whose table it is zero; the mean of equal ones is as they are.
    assert found.loss != pytest.approx(without.loss, rel=1e-3)
    assert level.losses['massive_zero'] == pytest.approx(without.loss, rel=1e-5)
    assert level.losses['massive_mean'] == pytest.approx(found.loss, rel=1e-5)
    assert without.levels[0].massive == 0 and set(without.levels[0].losses) == {'largest_zero', 'largest_mean'}


def test_a_model_whose_head_reads_more_than_its_layers_is_refused():
    setup = prepare(series.get_config('zoo=mha,data=seasonal,lookback=32,horizon=16'))
    question = SimpleNamespace(loaded=SimpleNamespace(setup=setup), workdir='run', check_layers=lambda: None)
    with pytest.raises(UserError, match='run holds a StackForecaster, whose head does not read the output of its lay'):
        Question.check_stream(question)


def test_a_run_is_looked_at(originals, capsys):
    run = originals / 'run'
    assert main(['analyse', f'--workdir={run}', '--massive', '--rows=2', '--compilation_cache=']) == 0
    printed = capsys.readouterr().out
    assert 'massive are those above 100 and 1000 medians, of which there are none' in printed
    record = json.loads((run / 'analysis' / '4-massive.json').read_text())
    assert len(record['levels']) == 2 and len(record['levels'][1]['largest']) == 3
    sizes = [abs(place['value']) for place in record['levels'][1]['largest']]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > record['levels'][1]['median'] > 0
