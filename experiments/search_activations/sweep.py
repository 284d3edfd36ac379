"""A search over small trees of functions, and three known nonlinearities with as many trials together."""

import pathlib

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.evals.cadence import EveryNSteps
from attnlab.evals.held_out import HeldOut
from attnlab.sweep.search import GridSearch
from attnlab.sweep.space import Grid
from attnlab.sweep.sweep import sweep_config, with_settings

SEARCH = pathlib.Path(__file__).parents[2] / 'configs' / 'sweeps' / 'activations.py'
KNOWN = ('relu', 'gelu', 'silu')
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
SEEDS = {'cpu': (0,), 'full': (0, 1, 2, 3)}
"""Of the trials: every rate is tried with all of them by a known nonlinearity; the search takes them in turns."""

CONFIRM = 3
"""Fresh seeds that the best trial of every study is run with."""

CPU = {'length': 64, 'batch_size': 16, 'steps': 150, 'model.dim': 48, 'model.stack.depth': 2}
TOKENS = {'cpu': 16_384, 'full': 1_048_576}
"""Of the held-out text."""


def studies(size):
    """The search has as many trials as the three known nonlinearities together."""
    rate = {'rate': spec(Grid, key='optimizer.peak_lr', values=RATES)}
    trials = len(KNOWN) * len(RATES) * len(SEEDS[size])
    searched = config_of(SEARCH, f'trials={trials},size={"tiny" if size == "cpu" else "10m"}')
    base = shortened(searched.base, size)
    found = {'searched': study(base, dict(searched.space) | rate, searched.sampler, trials, size)}
    for name in KNOWN:
        known = with_settings(base, {})
        with known.unlocked(), known.model.stack.blocks[0].mlp.ignore_type():
            known.model.stack.blocks[0].mlp.activation = name
        found[name] = study(known, rate, spec(GridSearch), None, size)
    return {'text': found}


def study(base, space, sampler, trials, size):
    """No trial is given up early, and the best is run with fresh seeds: the same for all."""
    return sweep_config(
        base, space, sampler=sampler, trials=trials, seeds=SEEDS[size], metric='valid/loss', confirm=CONFIRM
    )


def shortened(base, size):
    """The run of a trial, evaluated once."""
    found = with_settings(base, CPU if size == 'cpu' else {})
    with found.unlocked():
        found.checkpoint.every = found.steps
        found.evals = (spec(HeldOut, cadence=spec(EveryNSteps, n=found.steps), tokens=TOKENS[size]),)
        found.report.update(every=found.steps // 10, tensorboard=False)
    return found
