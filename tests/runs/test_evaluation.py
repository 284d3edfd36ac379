"""What an evaluation says beside its table."""

from rich.console import Console

from attnlab.compare.baselines import trivial_scores
from attnlab.evals.by_slice import BySlice
from attnlab.evals.request import Request
from attnlab.runs.evaluation import evaluate_run, trivial_line
from attnlab.runs.loading import Loaded
from attnlab.tables import Printer
from attnlab.train.setup import prepare
from configs import long_range


def test_an_evaluation_says_what_trivial_predictors_reach_as_comparisons_do(tmp_path, capsys):
    config = long_range.get_config('task=listops,size=smoke,zoo=mingru')
    config.evals[0].examples = 100
    config.model.stack.depth, config.model.dim = 1, 8
    setup = prepare(config)
    evaluator = BySlice.requested(setup, Request(config.evals[0].split, (1, 2), examples=100))
    scores = trivial_scores(config, f'{config.evals[0].name}/all/accuracy')
    assert set(scores) == {'chance', 'majority', 'first token', 'bag of tokens'}
    expected = ', '.join(f'{name} {score:.3g}' for name, score in scores.items())
    said = f'trivial predictors (at most 1,024 examples): all/accuracy {expected}'
    assert trivial_line(setup, evaluator) == said
    loaded = Loaded(setup, setup.initialize().variables, 0)
    evaluate_run(loaded, Request(examples=100), tmp_path, Printer(Console(width=200), 'plain'))
    assert said in capsys.readouterr().out.splitlines()


def test_an_evaluation_of_a_task_without_any_says_nothing():
    setup = prepare(long_range.get_config('task=listops,size=smoke,protocol=pretrain'))
    assert trivial_line(setup, BySlice.requested(setup, Request('test', (1,), examples=100))) is None
