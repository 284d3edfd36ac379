"""What an evaluation says beside its table."""

from attnlab.compare.baselines import trivial_scores
from attnlab.evals.by_slice import BySlice
from attnlab.evals.request import Request
from attnlab.runs.evaluation import trivial_line
from attnlab.train.setup import prepare
from configs import long_range


def test_an_evaluation_says_what_trivial_predictors_reach_as_comparisons_do():
    config = long_range.get_config('task=listops,size=smoke')
    config.evals[0].examples = 100
    setup = prepare(config)
    evaluator = BySlice.requested(setup, Request(config.evals[0].split, (1, 2), examples=100))
    scores = trivial_scores(config, f'{config.evals[0].name}/all/accuracy')
    assert set(scores) == {'chance', 'majority', 'first token', 'bag of tokens'}
    expected = ', '.join(f'{name} {score:.3g}' for name, score in scores.items())
    assert trivial_line(setup, evaluator) == f'trivial predictors (at most 1,024 examples): all/accuracy {expected}'


def test_an_evaluation_of_a_task_without_any_says_nothing():
    setup = prepare(long_range.get_config('task=listops,size=smoke,protocol=pretrain'))
    assert trivial_line(setup, BySlice.requested(setup, Request('test', (1,), examples=100))) is None
