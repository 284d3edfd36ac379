"""Samplers and pruners on studies of numbers that are drawn here, without runs."""

import math

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from attnlab.sweep.search import Asha, Hyperband, Pruner, Tpe, Whole, shares

RATES = {'rate': FloatDistribution(1e-4, 1e-1, log=True), 'decay': FloatDistribution(1e-2, 1.0, log=True)}
LIMIT = 8e-3


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def searched(sampler, trials):
    """The rates tried where the loss falls up to a rate above which a run diverges."""
    study, rates = optuna.create_study(), []
    for number in range(trials):
        study.sampler = Whole(sampler.optuna(number), RATES)
        trial = study.ask()
        rates.append(trial.relative_params['rate'])
        for name, kind in RATES.items():
            trial.suggest_float(name, kind.low, kind.high, log=True)
        if rates[-1] > LIMIT:
            study.tell(trial, state=TrialState.FAIL)
        else:
            study.tell(trial, math.log(rates[-1] / LIMIT) ** 2)
    return np.array(rates)


def test_tpe_learns_from_trials_that_diverge():
    """Left out, as optuna leaves out failed trials, three in four estimated trials diverged; at random a third do."""
    found = [np.mean(searched(Tpe(seed=seed, startup=10), 40)[10:] > LIMIT) for seed in range(4)]
    assert np.mean(found) < 0.55, found


def halved(pruner: Pruner, values, steps, every, name='study', direction='minimize'):
    """The last step of every trial, one after another, whose value at a step is that given and `every / step` more."""
    study, ended = optuna.create_study(study_name=name, direction=direction, pruner=pruner.optuna(steps)), []
    for value in values:
        trial = study.ask()
        for step in range(every, steps + 1, every):
            trial.report(value + every / step, step)
            if step < steps and trial.should_prune():
                break
        ended.append(step)
        study.tell(
            trial,
            state=TrialState.PRUNED if step < steps else TrialState.COMPLETE,
            values=None if step < steps else value,
        )
    return ended


VALUES = np.random.default_rng(0).uniform(1, 2, 40)


@pytest.mark.parametrize('direction', ['minimize', 'maximize'])
@pytest.mark.parametrize(('every', 'reduction'), [(60, 3), (100, 3), (60, 2)])
def test_halving_is_that_of_optuna(direction, every, reduction):
    """Also where evaluations lie behind rungs."""

    class Theirs(Pruner):
        def optuna(self, steps):
            return optuna.pruners.SuccessiveHalvingPruner(60, reduction)

    ours, theirs = (
        halved(pruner, VALUES, 1200, every, direction=direction) for pruner in (Asha(60, reduction), Theirs())
    )
    assert ours == theirs and len(set(ours)) > 1


def test_the_effort_of_hyperband_does_not_depend_on_what_its_study_is_called():
    """Optuna's took 8,280 to 12,000 steps for the same 16 trials."""
    assert len({tuple(halved(Hyperband(60), VALUES[:16], 1200, 60, name)) for name in ('gla', 'mha', 'mamba2')}) == 1


def test_brackets_are_filled_in_turn_and_are_compared_with_themselves():
    assert shares(3, 3) == (9, 5, 3)
    pruner = Hyperband(60).optuna(1200)
    assert [pruner.bracket(number) for number in range(19)] == [0] * 9 + [1] * 5 + [2] * 3 + [0] * 2
    # Every trial is worse than all before it.
    assert halved(Hyperband(60), range(17), 1200, 60) == [1200] + [60] * 8 + [1200] + [180] * 4 + [1200] + [540] * 2
    # Where the last rung is the end, one bracket prunes nothing.
    assert halved(Hyperband(60), range(17), 540, 60)[14:] == [540] * 3


def test_a_decision_is_the_same_when_it_is_made_again():
    """A worker that dies between a decision and its note leaves nothing but what was reported."""
    study = optuna.create_study(pruner=Asha(60).optuna(1200))
    for value in (1.0, 2.0):
        trial = study.ask()
        trial.report(value, 60)
        assert [trial.should_prune() for _ in range(2)] == [value == 2.0] * 2
