"""The plan of `experiments/first_comparison`: what makes its numbers bear the claims that are made of them."""

import pathlib

import numpy as np
import pytest

from attnlab.config import build
from attnlab.experiment.experiment import SIZES, Experiment
from attnlab.experiment.studies import check_studies
from attnlab.sweep.sweep import read
from attnlab.train.setup import prepare

FOLDER = pathlib.Path(__file__).parents[2] / 'experiments' / 'first_comparison'


@pytest.fixture(scope='module', params=SIZES)
def studies(request):
    return Experiment(FOLDER, request.param).studies()


def test_effort_is_equal_and_scores_are_of_three_fresh_seeds(studies):
    for group in studies.values():
        sweeps = [read(config) for config in group.values()]
        assert len({(repr(one.space), one.trials, one.seeds, one.confirm, one.metric) for one in sweeps}) == 1
        assert (
            sweeps[0].trials == 4 and sweeps[0].confirm >= 3 and all(config.pruner is None for config in group.values())
        )


def test_recall_has_a_thousand_tokens_and_five_kinds_of_examples(studies):
    problem = build(studies['recall']['mha'].base.task).problem
    assert problem.vocab >= 1024 and len(problem.parts) == 5
    assert len(set(zip(problem.lengths, [part.pairs for part in problem.parts], strict=True))) == 5


def test_strings_of_parity_were_not_trained_on(studies):
    base = studies['parity']['mha'].base
    task = build(base.task)
    (asked,) = task.extra
    assert asked.problem.shortest >= 30 and asked.length <= 40
    assert base.steps * base.batch_size < 2**30 / 100, 'some would be met by chance'
    rng = np.random.default_rng(0)
    assert min(len(asked.problem.generate(rng, asked.length).tokens) for _ in range(50)) >= 30


def test_every_study_can_be_run():
    assert check_studies(Experiment(FOLDER, 'cpu')) == 25


def test_every_task_knows_trivial_predictors():
    for group in Experiment(FOLDER, 'cpu').studies().values():
        task = prepare(next(iter(group.values())).base).task
        assert hasattr(task, 'trivial')
