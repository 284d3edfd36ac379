"""AL-RNNs of the Lorenz system: how many rectified units, and how often rows overwrite units in training."""

import pathlib

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.evals.attractor import Attractor
from attnlab.evals.cadence import AtEnd
from attnlab.experiment.experiment import Finished, Run, label_of

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'dynamics.py'
ALWAYS, NEVER = 1, 10**6
FORCING = 16

SYSTEMS = {
    **{f'p{count}': (count, FORCING) for count in (0, 2, 4, 8)},
    'p8_always': (8, ALWAYS),
    'p8_never': (8, NEVER),
}
"""Rectified units, and rows from one that overwrites the observed units to the next."""

RATES = {'low': 3e-3, 'high': 1e-2}
STEPS = {'cpu': 7_000, 'full': 100_000}
SEEDS = 3
STEP = 0.01
"""Time between two rows."""


def runs(size):
    """A run a system, rate and seed."""
    return [
        Run(label_of(system, rate, seed), config(size, system, rate, seed))
        for system in SYSTEMS
        for rate in RATES
        for seed in range(SEEDS)
    ]


def config(size, system, rate, seed):
    """The run of a system, let go by itself at its end on validation, which chooses rates, and on test."""
    rectified, forcing = SYSTEMS[system]
    named = 'tiny' if size == 'cpu' else 'paper'
    found = config_of(CONFIG, f'data=lorenz,rectified={rectified},forcing={forcing},size={named}')
    with found.unlocked():
        found.seed, found.steps = seed, STEPS[size]
        found.checkpoint.every = found.steps
        found.optimizer.peak_lr = RATES[rate]
        # Of 60,000 rows a fifth for either, so that densities have rows enough.
        found.task.data.rows = 60_000
        found.task.data.split.train = 0.6
        found.evals = tuple(
            spec(Attractor, cadence=spec(AtEnd), split=split, name=split) for split in ('valid', 'test')
        )
        found.report.update(every=found.steps // 10, tensorboard=False)
    return found


def measure(finished: Finished):
    """The measures of the run of the model, of what stands beside it; its exponent a unit of time, if it has one."""
    found = {name.replace('/', '_'): last(finished, name) for name in NUMBERS}
    exponent = last(finished, 'test/exponent')
    return found | {'exponent': None if exponent is None else exponent / STEP}


NUMBERS = (
    'valid/model/divergence',
    *(
        f'test/{run}/{name}'
        for run in ('model', 'truth_again', 'gaussian')
        for name in ('divergence', 'spectral_distance')
    ),
    'test/error',
    'test/regions',
)


def last(finished, metric):
    """The last value of a metric; `None` where there is none."""
    curve = finished.curve(metric)
    return curve[-1][1] if curve else None
