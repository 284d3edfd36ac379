"""Six mixers copy eight tokens over noise of growing length: at fixed places, and at places of their own."""

import dataclasses
import pathlib

from attnlab.config import spec, spec_of
from attnlab.configuration import config_of
from attnlab.data.synthetic.copying import DelayedCopying, SelectiveCopying
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import EveryNSteps
from attnlab.experiment.experiment import label_of
from attnlab.sweep.sweep import rates_config

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'recall.py'
RECIPES = ('mha', 's4', 's4d', 's6', 'mamba', 'mamba2')
PROBLEMS = {'delayed': DelayedCopying, 'selective': SelectiveCopying}
RATES = (1e-3, 3e-3, 1e-2)
SEEDS = 3
"""Fresh seeds that the best learning rate of every study is run with."""


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the experiment is.

    Attributes:
      short, long: tokens of an example, noise and markers included.
      data: tokens that are copied, of `vocab - 2` kinds.
      vocab: with noise and marker.
      steps: of training, with `batch` examples each.
      batch: examples.
    """

    short: int
    long: int
    data: int
    vocab: int
    steps: int
    batch: int


SIZES = {
    'cpu': Size(short=32, long=128, data=8, vocab=10, steps=500, batch=32),
    'full': Size(short=1024, long=4096, data=16, vocab=16, steps=100_000, batch=64),
}


def studies(size):
    """A study a problem, length and recipe."""
    lengths = {'short': SIZES[size].short, 'long': SIZES[size].long}
    return {
        label_of(problem, name): {recipe: study(problem, length, recipe, SIZES[size]) for recipe in RECIPES}
        for problem in PROBLEMS
        for name, length in lengths.items()
    }


def study(problem, length, recipe, chosen):
    """Three learning rates with one seed, none given up early, then the best with fresh seeds: the same for all."""
    base = config(problem, length, recipe, chosen)
    return rates_config(base, RATES, metric='test/1x/accuracy', goal='max', confirm=SEEDS)


def config(problem, length, recipe, chosen):
    """The run of a recipe: two layers of 64 channels, as they are in configs/recall.py, trained at the length asked."""
    found = config_of(CONFIG, f'task=selective_copying,zoo={recipe}')
    with found.unlocked():
        found.task.problem = spec_of(PROBLEMS[problem](vocab=chosen.vocab, data=chosen.data))
        found.update(length=length, steps=chosen.steps, batch_size=chosen.batch)
        found.checkpoint.every = chosen.steps
        evaluated = spec(EveryNSteps, n=chosen.steps)
        found.evals = (spec(BySlice, cadence=evaluated, multiples=(1, 2), examples=1024),)
        found.report.update(every=chosen.steps // 20, tensorboard=False)
    return found
