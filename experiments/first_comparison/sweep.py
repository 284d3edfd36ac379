"""Seven mixers on recall, parity and ListOps, each with a learning rate of its own; recall by the size of the state."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from attnlab.config import spec, spec_of
from attnlab.configuration import config_of
from attnlab.data.synthetic.arithmetic import Parity
from attnlab.data.synthetic.recall import mixed_recall
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import EveryNSteps
from attnlab.experiment.experiment import label_of
from attnlab.sweep.sweep import rates_config, with_settings
from attnlab.tasks.synthetic import Extra

CONFIGS = pathlib.Path(__file__).parents[2] / 'configs'
RECIPES = ('mha', 'sliding_window', 'linear_transformer', 'gla', 'mamba2', 'mamba', 'delta_net')
WINDOW = 8
"""Keys that a windowed layer sees at CPU size."""

LONG = Extra('length=30-39', 39, Parity(shortest=30))
"""Strings of parity so long that none of those asked was trained on: there are 2^30 of the shortest."""

SIZES = ((16, 2), (32, 4), (64, 4), (64, 8), (64, 16))
"""Tokens and pairs of the five kinds of examples of recall at CPU size."""

RECALL = mixed_recall(1024, SIZES)


@dataclasses.dataclass(frozen=True)
class Part:
    """A task of the comparison.

    Attributes:
      cpu, full: the file in `configs` and its argument, without the recipe, for each size.
      metric: the score, by which the learning rate is chosen and mixers are compared.
      rates: the learning rates that every mixer is tuned over.
      changes: keys that are set at CPU size.
      multiples: lengths to evaluate at, in training lengths.
      mlp: whether layers have channel mixers.
    """

    cpu: tuple[str, str]
    full: tuple[str, str]
    metric: str
    rates: tuple[float, ...]
    changes: Mapping[str, Any]
    multiples: tuple[int, ...] = (1,)
    mlp: bool = True


TASKS = {
    'recall': Part(
        ('recall', 'task=mqar_mixed,conv=1'),
        ('recall', 'task=mqar_mixed,conv=1,size=paper'),
        'test/1x/accuracy',
        (1e-3, 3e-3, 1e-2, 3e-2),
        {'task.problem': spec_of(RECALL), 'length': 64, 'batch_size': 32, 'steps': 2000},
        (1, 2),
        mlp=False,
    ),
    'parity': Part(
        ('recall', 'task=parity'),
        ('recall', 'task=parity,size=paper'),
        f'test/{LONG.name}/accuracy',
        (3e-4, 1e-3, 3e-3, 1e-2),
        {'task.problem': spec_of(Parity(shortest=2)), 'length': 39, 'batch_size': 48, 'steps': 600},
        (1, 2, 4),
    ),
    'listops': Part(
        ('long_range', 'task=listops,size=smoke'),
        ('long_range', 'task=listops'),
        'test/all/accuracy',
        (3e-4, 1e-3, 3e-3, 1e-2),
        {'batch_size': 16, 'steps': 160},
    ),
}

STATES = {
    'gla': ('key_ratio', {'k2': 1 / 16, 'k4': 1 / 8}),
    'mamba2': ('state', {'n4': 4, 'n16': 16}),
}
"""Mixers whose state is varied on recall: the argument, and its values by label. `gla` itself has 16 channels a key."""

SEEDS = 3
"""Fresh seeds that the best learning rate of every mixer is run with; the score is their mean."""


def studies(size):
    """A study a task and recipe; on recall one more for every smaller state."""
    found = {task: {recipe: study(task, config(task, recipe, size)) for recipe in RECIPES} for task in TASKS}
    for recipe, (argument, values) in STATES.items():
        for label, value in values.items():
            smaller = config('recall', recipe, size)
            with smaller.unlocked():
                smaller.model.stack.blocks[-1].mixer[argument] = value
            found['recall'][label_of(recipe, label)] = study('recall', smaller)
    return found


def study(task, base):
    """Four learning rates with one seed, none given up early, then the best with fresh seeds: the same for all."""
    part = TASKS[task]
    return rates_config(base, part.rates, metric=part.metric, goal='max', confirm=SEEDS)


def config(task, recipe, size):
    """The run of a recipe on a task: nothing differs between recipes but the mixers, and the depth of a hybrid."""
    part = TASKS[task]
    file, arg = part.cpu if size == 'cpu' else part.full
    found = config_of(CONFIGS / f'{file}.py', f'{arg},zoo={recipe}')
    with found.unlocked():
        if size == 'cpu':
            found = with_settings(found, part.changes)
            shrink(found, part)
        if task == 'parity':
            found.task.extra = (spec_of(LONG),)
        if recipe == 'delta_net':
            found.model.stack.blocks[-1].mixer.gates.scale = 2.0
        evaluated = spec(EveryNSteps, n=found.steps)
        found.evals = (spec(BySlice, cadence=evaluated, multiples=part.multiples, examples=1024),)
        found.report.update(every=found.steps // 20, tensorboard=False)
    return found


def shrink(found, part):
    """Two layers, or one period of a hybrid; windows shorter than most gaps; a checkpoint at the end."""
    stack = found.model.stack
    stack.depth = max(2, len(stack.blocks))
    found.checkpoint.every = found.steps
    for block in stack.blocks:
        if 'window' in block.mixer and block.mixer.window is not None:
            block.mixer.window = WINDOW
        if not part.mlp:
            block.mlp = None
