"""Three recipes on text from three starts: attnlab's, their papers', and attnlab's with residual scaling."""

import pathlib

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.evals.cadence import AtEnd
from attnlab.evals.held_out import HeldOut
from attnlab.experiment.experiment import Finished, Run, label_of

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'language.py'
RECIPES = ('gla', 'mamba', 'retnet')
STARTS = {'framework': ('framework', None), 'paper': ('paper', None), 'residual': ('framework', 1.0)}
"""The argument `init=`, and the residual factor of `attnlab.nn.initialization.Initialization` where it is set."""

SEEDS = 3


def runs(size):
    """A run a recipe, start and seed; the seeds of a recipe see the same data in the same order whatever the start."""
    return [
        Run(label_of(recipe, start, seed), config(recipe, start, seed, size))
        for recipe in RECIPES
        for start in STARTS
        for seed in range(SEEDS)
    ]


def config(recipe, start, seed, size):
    """The run of a recipe: nothing differs between starts but the initial values of linear maps."""
    init, residual = STARTS[start]
    found = config_of(CONFIG, f'zoo={recipe},init={init},size={"tiny" if size == "cpu" else "10m"}')
    with found.unlocked():
        found.seed = seed
        if residual is not None:
            found.model.stack.initialization.residual = residual
        if size == 'cpu':
            found.update(steps=200, batch_size=4, length=128)
            found.model.dim = 64
            found.checkpoint.every = found.steps
        found.evals = (spec(HeldOut, cadence=spec(AtEnd), tokens=16_384 if size == 'cpu' else 1_048_576),)
        found.report.update(every=found.steps // 10, tensorboard=False)
    return found


def measure(finished: Finished):
    """The loss on held-out text, and that of training over steps."""
    return {'loss': finished.last('valid/loss'), 'training': finished.curve('train/loss')}
