"""Questions to runs: what is read, what is refused, and where what is found goes."""

import io
import json
import shutil

import numpy as np
import pytest
from rich.console import Console

from attnlab.analysis.question import Question
from attnlab.errors import UserError
from attnlab.tables import Column, Printer, Table
from tests.bad_inputs.conftest import originals

__all__ = ['originals']


def test_rows_lie_all_over_the_split_that_the_task_is_evaluated_on(originals):
    question = Question.of(originals / 'run', None, None, 3)
    assert (question.split, question.loaded.step) == ('valid', 4)
    source = question.loaded.setup.task.source('valid', question.loaded.setup.length)
    places = [0, (len(source) - 1) // 2, len(source) - 1]
    for place, batch in zip(places, question.batches(), strict=True):
        np.testing.assert_array_equal(batch['tokens'], source[place]['tokens'][None])
    assert Question.of(originals / 'run', 2, 'train', 1).title == f'{originals / "run"}, step 2, train'
    with pytest.raises(UserError, match=r'rows is 9999; the train split has \d+ rows of 16'):
        Question.of(originals / 'run', None, 'train', 9999).batches()


def test_changed_data_are_refused_and_what_allows_them_is_recorded(originals, tmp_path):
    shutil.copytree(originals / 'run', tmp_path / 'run')
    facts = json.loads((tmp_path / 'run' / 'run.json').read_text())
    facts['starts'][-1]['data']['content_hash'] = 'another'
    (tmp_path / 'run' / 'run.json').write_text(json.dumps(facts))
    with pytest.raises(UserError, match='have changed since it was trained: content_hash was another'):
        Question.of(tmp_path / 'run', None, None, 1)
    allowed = Question.of(tmp_path / 'run', None, None, 1, other_data=True)
    assert allowed.record() == {'step': 4, 'split': 'valid', 'rows': 1, 'ema': False, 'other_data': True}


def test_what_is_found_is_written_shown_and_named(originals, tmp_path):
    question = Question(tmp_path, Question.of(originals / 'run', None, None, 1).loaded, 'valid', 1)
    table, shown = Table('numbers', (Column('number'),), [(7,)], question.title), io.StringIO()
    path, drawn = tmp_path / 'analysis' / '4-kind.json', []
    question.report(Printer(Console(file=shown, width=200), 'plain'), '-kind', {}, {'number': float('nan')}, (table,))
    assert json.loads(path.read_text()) == {'number': None}
    assert f'{tmp_path}, step 4, valid' in shown.getvalue() and shown.getvalue().endswith(f'written: {path}\n')
    question.report(Printer(Console(file=shown, width=200)), '-kind', {}, {'number': 1}, (), drawn.append)
    assert drawn == [path.with_suffix('.png')]
    assert shown.getvalue().endswith(f'written: {path}, {path.with_suffix(".png")}\n')


def test_what_is_found_of_other_rows_stands_beside_it(originals, tmp_path):
    question = Question(tmp_path, Question.of(originals / 'run', None, None, 1).loaded, 'valid', 1)
    path, drawn = tmp_path / 'analysis' / '4-kind.json', []
    for rows, place in ((2, path), (3, path.with_name('4-kind-1.json')), (2, path)):
        question.report(Printer(Console(file=io.StringIO())), '-kind', {'rows': rows}, {}, (), drawn.append)
        assert drawn[-1] == place.with_suffix('.png') and json.loads(place.read_text()) == {'rows': rows}
