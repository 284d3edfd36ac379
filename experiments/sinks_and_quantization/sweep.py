"""Language models of rising size: from which on heads have sinks, and what rounding then costs, by map."""

import dataclasses
import math
import pathlib

import jax
from rich.console import Console

from attnlab.analysis.examination import analyse_run
from attnlab.analysis.question import Question
from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.evals.cadence import AtEnd
from attnlab.evals.held_out import HeldOut
from attnlab.experiment.experiment import Finished, Run, label_of
from attnlab.tables import Printer

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'language.py'
LADDER_MAP = 'mha'
OTHERS = ('softpick', 'gated_attention', 'learned_sink')
BITS = (8, 6, 4)
SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Rung:
    """A model and its training.

    Attributes:
      arg: the size of configs/language.py that it starts from.
      dim: width; `None`: that of the size.
      depth: layers; `None`: those of the size.
      length: tokens of a window; `None`: as there.
      batch: windows a step; `None`: as there.
      steps: of training.
      rows: that are analysed.
    """

    arg: str
    dim: int | None
    depth: int | None
    length: int | None
    batch: int | None
    steps: int
    rows: int


LADDERS = {
    'cpu': {
        'narrow': Rung('tiny', 32, 2, 128, 8, 400, 32),
        'wide': Rung('tiny', 64, 4, 128, 8, 400, 32),
    },
    'full': {
        'tiny': Rung('tiny', None, None, None, 64, 10_000, 256),
        '10m': Rung('10m', None, None, None, None, 20_000, 256),
        '125m': Rung('125m', None, None, None, None, 20_000, 256),
        '350m': Rung('350m', None, None, None, None, 20_000, 256),
    },
}
"""By size of the experiment, models from small to large."""

ALL_MAPS = {'cpu': 'wide', 'full': '125m'}
"""The model that is trained with every map."""


def runs(size):
    """`mha` at every rung, the other maps at one; three seeds each."""
    rungs = LADDERS[size]
    pairs = [(LADDER_MAP, name) for name in rungs] + [(name, ALL_MAPS[size]) for name in OTHERS]
    return [
        Run(label_of(recipe, name, seed), config(recipe, rungs[name], seed))
        for recipe, name in pairs
        for seed in range(SEEDS)
    ]


def config(recipe, rung, seed):
    """The run of a map; none of these has a constant that depends on the length."""
    found = config_of(CONFIG, f'zoo={recipe},size={rung.arg}')
    with found.unlocked():
        found.seed, found.steps = seed, rung.steps
        for name, value in (('length', rung.length), ('batch_size', rung.batch)):
            if value is not None:
                found[name] = value
        if rung.dim is not None:
            found.model.dim, found.model.stack.depth = rung.dim, rung.depth
        found.evals = (spec(HeldOut, cadence=spec(AtEnd), tokens=65_536 if rung.arg != 'tiny' else 16_384),)
        found.checkpoint.every = rung.steps
        found.report.update(every=max(1, rung.steps // 20), tensorboard=False)
    return found


def measure(finished: Finished):
    """What `attnlab analyse` finds on the validation text, the largest activation over the median, and the loss."""
    _, rung, _ = finished.parts
    rows = LADDERS[finished.size][rung].rows
    with (finished.workdir / 'analysis.txt').open('a') as log:
        found = analyse_run(Question.of(finished.workdir, None, 'valid', rows), Printer(Console(file=log)), BITS)
    numbers = found.numbers()
    highest = max((layer['sink_rate'] for layer in numbers['layers'] if 'sink_rate' in layer), default=math.nan)
    return {
        'loss': finished.last('valid/loss'),
        'parameters': sum(leaf.size for leaf in jax.tree.leaves(finished.loaded.setup.abstract.params)),
        'highest_sink_rate': highest,
        **numbers,
    }
