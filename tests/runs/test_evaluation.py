"""What an evaluation says beside its table."""

import dataclasses
import json

import pytest
from rich.console import Console

from attnlab.compare.baselines import trivial_scores
from attnlab.evals.by_slice import BySlice
from attnlab.evals.request import Request
from attnlab.runs.evaluation import evaluate_run, trivial_line
from attnlab.runs.loading import Loaded
from attnlab.tables import Printer
from attnlab.train.setup import prepare
from configs import long_range


@pytest.fixture(scope='module')
def config():
    config = long_range.get_config('task=listops,size=smoke,zoo=mingru')
    config.evals[0].examples = 100
    config.model.stack.depth, config.model.dim = 1, 8
    return config


@pytest.fixture(scope='module')
def loaded(config):
    setup = prepare(config)
    return Loaded(setup, setup.initialize().variables, 0)


def test_an_evaluation_says_what_trivial_predictors_reach_as_comparisons_do(config, loaded, tmp_path, capsys):
    setup = loaded.setup
    evaluator = BySlice.requested(setup, Request(config.evals[0].split, (1, 2), examples=100))
    scores = trivial_scores(config, f'{config.evals[0].name}/all/accuracy')
    assert set(scores) == {'chance', 'majority', 'first token', 'bag of tokens'}
    expected = ', '.join(f'{name} {score:.3g}' for name, score in scores.items())
    said = f'trivial predictors (at most 1,024 examples): all/accuracy {expected}'
    assert trivial_line(setup, evaluator) == said
    evaluate_run(loaded, Request(examples=100), tmp_path, Printer(Console(width=200), 'plain'))
    assert said in capsys.readouterr().out.splitlines()


def test_an_evaluation_asked_otherwise_leaves_what_there_is(loaded, tmp_path, capsys):
    printer = Printer(Console(width=200), 'plain')
    asked = (
        Request(multiples=(1,), examples=100),
        Request('valid', (1,), examples=100),
        Request(None, (1,), examples=50),
    )
    for request in asked:
        evaluate_run(loaded, request, tmp_path, printer)
    written = [json.loads((tmp_path / 'evals' / f'0{end}.json').read_text()) for end in ('', '-1', '-2')]
    assert [found['split'] for found in written] == ['test', 'valid', 'test']
    assert [found['asked']['examples'] for found in written] == [100, 100, 50]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith('written: ')]
    assert [line.split(',')[0].rpartition('/')[2] for line in said] == ['0.json', '0-1.json', '0-2.json']
    # The split by its name is the one by default, and a request replaces what it found itself.
    evaluate_run(loaded, dataclasses.replace(asked[0], split='test'), tmp_path, printer)
    assert len(list((tmp_path / 'evals').glob('*.json'))) == 3


def test_an_evaluation_of_a_task_without_any_says_nothing():
    setup = prepare(long_range.get_config('task=listops,size=smoke,protocol=pretrain'))
    assert trivial_line(setup, BySlice.requested(setup, Request('test', (1,), examples=100))) is None
