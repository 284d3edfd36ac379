"""`attnlab edit`: a run of text and a run of facts answer as they are told, and remain runs."""

import numpy as np
import pytest

from attnlab.analysis.edited import TextFact
from attnlab.cli import main
from attnlab.errors import UserError
from attnlab.runs.loading import load_run
from attnlab.runs.record import read_record
from tests.bad_inputs.conftest import originals

__all__ = ['originals']

COMMON = ('--compilation_cache=', '--format=csv', '--layer=0', '--rows=4')


@pytest.fixture(scope='module')
def facts(tmp_path_factory):
    folder = tmp_path_factory.mktemp('facts') / 'run'
    small = ('steps=2', 'batch_size=4', 'model.dim=16', 'model.stack.depth=2', 'evals[0].examples=4')
    flags = [f'--config.{each}' for each in (*small, 'report.tensorboard=False')]
    assert main(['train', '--config=recall:task=facts', f'--workdir={folder}', '--compilation_cache=', *flags]) == 0
    return folder


def read(capsys):
    """The probability of the answer before and after."""
    rows = [line.split(',') for line in capsys.readouterr().out.splitlines()]
    place = next(place for place, row in enumerate(rows) if row[:3] == ['answer', 'before', 'after'])
    return tuple(map(float, rows[place + 1][1:]))


def test_a_text_is_answered_otherwise(originals, tmp_path, capsys):
    run, out = originals / 'run', tmp_path / 'edited'
    asked = ['edit', f'--workdir={run}', f'--out={out}', *COMMON]
    assert main([*asked, '--prompt=one two', '--answer=xy', '--steps=200']) == 0
    before, after = read(capsys)
    # So small a model, hardly trained, can be sure of nothing; two characters have a 65,536th at first.
    assert after > 2 * before
    edited = read_record(out).facts['edited']
    assert edited['from'] == str(run) and edited['answer'] == 'xy' and edited['layer'] == 0
    # One map of one layer has changed, by a matrix of rank one.
    old, new = (load_run(each).model().stack.blocks[0] for each in (run, out))
    change = np.asarray(new.mlp.down.weight[...] - old.mlp.down.weight[...])[0]
    assert np.linalg.matrix_rank(change, tol=1e-4 * np.abs(change).max()) == 1
    np.testing.assert_array_equal(new.mixer.output.weight[...], old.mixer.output.weight[...])
    again = [word.replace(str(out), str(tmp_path / 'other')) for word in asked]
    assert main([*again, '--prompt=one two', '--subject=one', '--answer=x']) == 2
    assert '--layer is 0, the last: what it gives token 2 is not read by token 6' in capsys.readouterr().err
    assert main([*asked, '--prompt=one two', '--answer=x']) == 2
    assert 'holds a run already; give --out a new folder' in capsys.readouterr().err


def test_a_fact_is_answered_otherwise(facts, tmp_path, capsys):
    asked = ['edit', f'--workdir={facts}', f'--out={tmp_path}/other', *COMMON, '--row=0']
    first = [word.replace('other', 'edited') for word in asked]
    assert main([*first, '--at=1', '--answer=70', '--steps=200']) == 0
    before, after = read(capsys)
    assert after > 5 * before
    for flags, message in (
        (['--at=4', '--answer=70'], '--at is 4; it must be a token of the row up to 3'),
        (['--at=1', '--answer=900'], '--answer is 900; it must be a token, from 0 to 100'),
        (['--at=1', '--answer=x'], "--answer holds 'x'"),
        (['--answer=70'], '--row is not enough; give --row and --at'),
        (['--at=1', '--answer=70', '--prompt=a'], 'give --prompt and --subject, of a run of text, or --row and --at'),
        (['--at=1'], '--answer is missing'),
    ):
        assert main([*asked, *flags]) == 2
        assert message in capsys.readouterr().err


def test_what_a_prompt_lacks_is_said(originals, facts):
    run = load_run(originals / 'run')
    for fact, message in (
        (TextFact('one two', 'three', 'x'), "--subject is 'three'"),
        (TextFact('one two', '', 'x'), 'both must have a character'),
        (TextFact('one two', 'one', ''), 'both must have a character'),
    ):
        with pytest.raises(UserError, match=message):
            fact.rewritten(run, originals / 'run')
    with pytest.raises(UserError, match='trained for LabelPrediction, not on text: give --row, --at'):
        TextFact('a', 'a', 'b').rewritten(load_run(facts), facts)
