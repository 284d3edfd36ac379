"""One language model, one budget, one order of the data, and every map of the softmax family in the same place."""

import pathlib

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.evals.cadence import AtEnd
from attnlab.evals.held_out import HeldOut
from attnlab.experiment.experiment import Finished, Run, label_of
from attnlab.experiment.settings import for_length, small_text
from attnlab.zoo.softmax.maps import MAPS as WEIGHT_MAPS
from attnlab.zoo.softmax.parts import PARTS

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'language.py'
MAPS = ('mha', *(name for name in (*WEIGHT_MAPS, *PARTS) if name != 'window_sinks'))
"""Softmax and its family, but for the window with sinks, which takes no packed documents."""

SEEDS = 3


def runs(size):
    """A run a map and seed: two layers of 64 channels for 80 steps, or the 10m size of `configs/language.py`."""
    return [Run(label_of(name, seed), config(name, size, seed)) for name in MAPS for seed in range(SEEDS)]


def config(name, size, seed):
    """The run of a map: nothing differs between maps but the mixer and the constants that want the training length."""
    found = config_of(CONFIG, f'zoo={name},size={"tiny" if size == "cpu" else "10m"}')
    with found.unlocked():
        found.seed = seed
        if size == 'cpu':
            small_text(found, steps=80, batch=16, length=128)
        for_length(found, name)
        found.evals = (spec(HeldOut, cadence=spec(AtEnd), tokens=65_536 if size == 'cpu' else 1_048_576),)
        found.checkpoint.every = found.steps if size == 'cpu' else 1000
        found.report.update(every=found.steps // 10, tensorboard=False)
    return found


def measure(finished: Finished):
    """The loss on held-out text."""
    return {'loss': finished.last('valid/loss')}
