"""Five mixers without any short convolution, and with one at every point of every layer; on recall and on text."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from attnlab.config import spec, spec_of
from attnlab.configuration import config_of
from attnlab.data.synthetic.recall import mixed_recall
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import EveryNSteps
from attnlab.evals.held_out import HeldOut
from attnlab.experiment.experiment import label_of
from attnlab.sweep.sweep import rates_config, with_settings

CONFIGS = pathlib.Path(__file__).parents[2] / 'configs'
RECIPES = ('mha', 'linear_transformer', 'gla', 'gated_delta_net', 'mamba2')
CONVOLUTIONS = {'none': 'none', 'all': 'canon'}
"""The argument `conv=` by what a study is called: none, not even a recipe's own; residual ones at points A to D."""

SIZES = ((16, 2), (32, 4), (64, 4), (64, 8), (64, 16))
RECALL = mixed_recall(1024, SIZES)
"""Recall at CPU size: five kinds of examples, tokens and pairs, in one stream."""

SEEDS = 3
"""Fresh seeds that the best learning rate of every study is run with."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A task of the experiment.

    Attributes:
      file: in `configs`.
      cpu, full: its argument, without recipe and convolution, for each size.
      metric, goal: by which the learning rate is chosen and studies are compared.
      rates: the learning rates, the same for all.
      changes: keys that are set at CPU size.
    """

    file: str
    cpu: str
    full: str
    metric: str
    goal: str
    rates: tuple[float, ...]
    changes: Mapping[str, Any]


TASKS = {
    'recall': Part(
        'recall',
        'task=mqar_mixed',
        'task=mqar_mixed,size=paper',
        'test/1x/accuracy',
        'max',
        (1e-3, 3e-3, 1e-2, 3e-2),
        {'task.problem': spec_of(RECALL), 'length': 64, 'batch_size': 32, 'steps': 400, 'model.stack.depth': 2},
    ),
    'text': Part(
        'language',
        'size=tiny',
        'size=10m',
        'valid/loss',
        'min',
        (1e-3, 3e-3, 1e-2),
        {'length': 128, 'batch_size': 8, 'steps': 300, 'model.dim': 64, 'model.stack.depth': 2},
    ),
}


def studies(size):
    """A study a task, recipe, and whether there are convolutions."""
    return {
        task: {label_of(recipe, name): study(task, recipe, name, size) for recipe in RECIPES for name in CONVOLUTIONS}
        for task in TASKS
    }


def study(task, recipe, convolution, size):
    """Every learning rate with one seed, none given up early, then the best with fresh seeds: the same for all."""
    part, base = TASKS[task], config(task, recipe, convolution, size)
    return rates_config(base, part.rates, metric=part.metric, goal=part.goal, confirm=SEEDS)


def config(task, recipe, convolution, size):
    """The run of a recipe: nothing differs between its two studies but the convolutions."""
    part = TASKS[task]
    arg = part.cpu if size == 'cpu' else part.full
    found = config_of(CONFIGS / f'{part.file}.py', f'{arg},zoo={recipe},conv={CONVOLUTIONS[convolution]}')
    with found.unlocked():
        if size == 'cpu':
            found = with_settings(found, part.changes)
            found.checkpoint.every = found.steps
        evaluated = spec(EveryNSteps, n=found.steps)
        found.evals = (
            (spec(BySlice, cadence=evaluated, multiples=(1, 2), examples=1024),)
            if task == 'recall'
            else (spec(HeldOut, cadence=evaluated, tokens=32_768 if size == 'cpu' else 1_048_576),)
        )
        found.report.update(every=found.steps // 20, tensorboard=False)
    return found
