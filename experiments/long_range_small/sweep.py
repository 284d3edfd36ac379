"""Eight mixers classify long sequences: digits as they are and as 1,024 pixels, ListOps, the authors of code."""

import dataclasses
import pathlib

from attnlab.config import spec_of
from attnlab.configuration import config_of
from attnlab.data.long_range.authorship import Authorship
from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.long_range.listops import ListOps
from attnlab.experiment.splits import of_splits
from attnlab.sweep.sweep import rates_config

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'long_range.py'
RECIPES = ('s4', 's4d', 's5', 'lru', 'mega', 'mamba', 'gla', 'mha')
EXPRESSIONS = ListOps(shortest=200, longest=512, max_depth=8, max_arguments=8)
DATA = {
    'digits': Digits(),
    'digits32': Digits(side=32),
    'listops': Drawn(EXPRESSIONS, train=96_000, held_out=2_000),
    'authorship': Authorship(span=2_048),
}
LENGTHS = {'digits': 64, 'digits32': 1_024, 'listops': 512, 'authorship': 2_048}
SEEDS = 3
"""Fresh seeds that the best learning rate of every study is run with."""


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the experiment is.

    Attributes:
      dim, depth, state: of the models; `state` of those that have `state=`.
      batches: steps of training and examples of each, by task.
      examples: of the test split.
      rates: the learning rates, the same for all.
    """

    dim: int
    depth: int
    state: int
    batches: dict[str, tuple[int, int]]
    examples: int
    rates: tuple[float, ...]


SIZES = {
    'cpu': Size(
        dim=32,
        depth=2,
        state=32,
        batches={'digits': (300, 32), 'digits32': (120, 8), 'listops': (120, 8), 'authorship': (60, 4)},
        examples=1_000,
        rates=(3e-3, 1e-2),
    ),
    'full': Size(
        dim=128,
        depth=4,
        state=64,
        batches=dict.fromkeys(DATA, (10_000, 32)) | {'listops': (50_000, 32)},
        examples=2_000,
        rates=(1e-3, 3e-3, 1e-2),
    ),
}


def studies(size):
    """A study a task and recipe."""
    return {task: {recipe: study(task, recipe, SIZES[size]) for recipe in RECIPES} for task in DATA}


def study(task, recipe, chosen):
    """Every learning rate with one seed, none given up early, then the best with fresh seeds: the same for all."""
    base, reported = config(task, recipe, chosen), 'test/all/accuracy'
    return rates_config(base, chosen.rates, metric='valid/all/accuracy', goal='max', confirm=SEEDS, reported=reported)


def config(task, recipe, chosen):
    """The run of a recipe: layers of configs/long_range.py, with a channel mixer, in the form that it has there."""
    found = config_of(CONFIG, f'task={"digits" if task == "digits32" else task},zoo={recipe},size=smoke')
    steps, batch = chosen.batches[task]
    with found.unlocked():
        found.task.data = spec_of(DATA[task])
        found.update(length=LENGTHS[task], steps=steps, batch_size=batch)
        found.model.dim, found.model.stack.depth = chosen.dim, chosen.depth
        for block in found.model.stack.blocks:
            if 'state' in block.mixer:
                block.mixer.state = chosen.state
        found.checkpoint.every = steps
        found.evals = of_splits(chosen.examples, every=steps)
        found.report.update(every=max(1, steps // 10), tensorboard=False)
    return found
