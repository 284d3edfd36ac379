"""Linear systems that start from six bases, with three ranges of steps, remember a signal."""

import dataclasses
import pathlib

import numpy as np
from flax import nnx

from attnlab.analysis.recall import responses, unrecalled, unrecalled_throughout
from attnlab.config import spec, spec_of
from attnlab.configuration import config_of
from attnlab.data.synthetic.memory import Delay, Recollection, band_covariance
from attnlab.experiment.experiment import Finished, Run, label_of
from attnlab.experiment.splits import SPLITS, of_splits
from attnlab.functional import hippo
from attnlab.models.linear_memory import LinearMemory
from attnlab.nn.systems import DiagonalSystem, LowRankSystem
from attnlab.tasks.synthetic import InContextRegression
from attnlab.train.optimizer import Group, Groups

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'recall.py'
DENSE = ('legs', 'legt', 'fout')
DIAGONAL = ('lin', 'inv', 'random')
RATES = {'low': 3e-3, 'high': 3e-2}
SLOWER = 0.1
"""The rate of what sets the time scales, over that of the read."""

SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Size:
    """Tokens of a row, the signal's band, the lag of the delay, points that are recollected, channels and their states,
    steps of training, signals of each, and of an evaluation."""

    length: int
    band: float
    lag: int
    points: int
    dim: int
    state: int
    steps: int
    batch: int
    examples: int


SIZES = {
    'cpu': Size(length=256, band=0.1, lag=100, points=8, dim=8, state=16, steps=400, batch=8, examples=256),
    'full': Size(length=4096, band=0.03, lag=1000, points=64, dim=64, state=64, steps=20_000, batch=16, examples=1024),
}
STEPS = {'short': (25.0, 250.0), 'fit': (1.0, 4.0), 'long': (0.001, 0.01)}
"""Ranges of steps, over that with which LegS remembers the row: systems then remember a tenth of it or less, about all
of it, or begin with a state that a row hardly moves."""


def problems(size):
    """The two, which share their signals."""
    return {
        'delay': Delay(lag=size.lag, band=size.band),
        'recollection': Recollection(points=size.points, band=size.band),
    }


def runs(size):
    """A run a problem, start, range of steps, rate and seed."""
    return [
        Run(label_of(problem, start, steps, rate, seed), config(SIZES[size], problem, start, steps, rate, seed))
        for problem in problems(SIZES[size])
        for start in (*DENSE, *DIAGONAL)
        for steps in STEPS
        for rate in RATES
        for seed in range(SEEDS)
    ]


def config(size, problem, start, steps, rate, seed):
    """The run of a linear system, evaluated on validation and test at its end."""
    found = config_of(CONFIG, 'task=regression,zoo=s4d')
    low, high = (multiple * hippo.step_for('legs', size.length) for multiple in STEPS[steps])
    system = spec(LowRankSystem if start in DENSE else DiagonalSystem, starts=(start,), low=low, high=high)
    with found.unlocked():
        found.update(seed=seed, length=size.length, steps=size.steps, batch_size=size.batch)
        found.task = spec(InContextRegression, problem=problems(size)[problem], held_out=size.examples)
        found.model = spec(LinearMemory, dim=size.dim, state=size.state, system=system)
        found.optimizer.peak_lr, found.optimizer.weight_decay = RATES[rate], 0.0
        found.optimizer.groups = spec_of(Groups(dynamics=Group(lr=SLOWER, weight_decay=0.0)))
        found.precision.activations = 'float32'
        found.checkpoint.every = size.steps
        found.evals = of_splits(size.examples)
        found.report.update(every=size.steps // 10, tensorboard=False)
    return found


def measure(finished: Finished):
    """Errors on validation and test; and what the best linear read of all states would have, at the start and after."""
    setup, trained = finished.loaded.setup, finished.loaded.model()
    started = nnx.merge(setup.graphdef, setup.initialize().variables)
    found = {split: finished.last(f'{split}/1x/loss') for split in SPLITS}
    return found | {'best_at_start': best(setup, started), 'best_after': best(setup, trained)}


def best(setup, model):
    """The least error that a linear read of the states of a model has on the problem of its run."""
    problem, length = setup.task.problem, setup.length
    response, covariance = responses(model.system, model.dim, length), band_covariance(length, problem.band)
    if isinstance(problem, Delay):
        return unrecalled_throughout(response, covariance, problem.lag)
    return float(np.mean(unrecalled(response, covariance)[length - 1 - problem.places(length)]))
