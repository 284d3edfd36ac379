"""Eight mixers on five tasks on which mixers are told apart, and recall by the size of the state."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from attnlab.compare.runs import run_result
from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd
from attnlab.experiment.experiment import Finished, Run
from attnlab.runs.record import read_record
from attnlab.sweep.sweep import with_settings

CONFIGS = pathlib.Path(__file__).parents[2] / 'configs'
RECIPES = ('mha', 'sliding_window', 'linear_transformer', 'gla', 'mamba2', 'mamba', 'rg_lru', 'griffin')
WINDOW = 8
"""Keys that a windowed layer sees at CPU size."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A task of the comparison.

    Attributes:
      cpu, full: the file in `configs` and its argument, without the recipe, for each size.
      changes: keys that are set at CPU size.
      multiples: lengths to evaluate at, in training lengths.
      mlp: whether layers have channel mixers.
    """

    cpu: tuple[str, str]
    full: tuple[str, str]
    changes: Mapping[str, Any]
    multiples: tuple[int, ...] = (1, 2, 4)
    mlp: bool = True


TASKS = {
    'mqar': Part(
        ('recall', 'task=mqar,conv=1'),
        ('recall', 'task=mqar,conv=1,size=paper'),
        {
            'task.problem.vocab': 32,
            'task.problem.pairs': (2, 4, 8),
            'length': 32,
            'batch_size': 64,
            'steps': 240,
            'optimizer.peak_lr': 1e-2,
        },
        mlp=False,
    ),
    'induction': Part(
        ('recall', 'task=induction,conv=1'),
        ('recall', 'task=induction,conv=1,size=paper'),
        {'length': 24, 'batch_size': 128, 'steps': 160, 'optimizer.peak_lr': 1e-2},
        (1, 2, 4, 8),
        mlp=False,
    ),
    'parity': Part(
        ('recall', 'task=parity'),
        ('recall', 'task=parity,size=paper'),
        {'length': 10, 'batch_size': 128, 'steps': 600, 'optimizer.peak_lr': 2e-3},
        (1, 2, 4, 8),
    ),
    'listops': Part(
        ('long_range', 'task=listops,size=smoke'),
        ('long_range', 'task=listops'),
        {'batch_size': 16, 'steps': 300},
        (1,),
    ),
    'digits': Part(
        ('long_range', 'task=digits,size=smoke'), ('long_range', 'task=digits,size=smoke'), {'steps': 300}, (1,)
    ),
}

STATES = {
    'gla': ('key_ratio', {'k2': 1 / 16, 'k4': 1 / 8, 'k8': 1 / 4}),
    'mamba2': ('state', {'n4': 4, 'n16': 16, 'n64': 64}),
}
"""Mixers whose state is varied on MQAR: the argument, and its values by label. `gla` itself has 16 channels a key."""


def runs(size):
    """A run a task and recipe, at one depth and width; then the smaller states."""
    found = [Run(f'{task}-{recipe}', config(task, recipe, size)) for task in TASKS for recipe in RECIPES]
    for recipe, (argument, values) in STATES.items():
        for label, value in values.items():
            smaller = config('mqar', recipe, size)
            with smaller.unlocked():
                smaller.model.stack.blocks[-1].mixer[argument] = value
            found.append(Run(f'mqar-{recipe}-{label}', smaller))
    return found


def config(task, recipe, size):
    """The run of a recipe on a task: nothing differs between recipes but the mixers, and the depth of a hybrid."""
    part = TASKS[task]
    file, arg = part.cpu if size == 'cpu' else part.full
    found = config_of(CONFIGS / f'{file}.py', f'{arg},zoo={recipe}')
    if size == 'cpu':
        found = with_settings(found, part.changes)
    with found.unlocked():
        if size == 'cpu':
            shrink(found, part)
        found.evals = (spec(BySlice, cadence=spec(AtEnd), multiples=part.multiples, examples=1024),)
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


def measure(finished: Finished):
    """The run's entry in the table of `attnlab compare`, and its accuracy by slice."""
    record = read_record(finished.workdir)
    accuracy = {
        name.split('/')[1]: value
        for name, value in record.last.items()
        if name.endswith('/accuracy') and 'test' in name
    }
    return {'entry': dataclasses.asdict(run_result(record)), 'accuracy': accuracy}
