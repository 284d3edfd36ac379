"""Samplers and pruners on studies of numbers that are drawn here, without runs."""

import math

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from attnlab.sweep.search import Tpe, Whole

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
