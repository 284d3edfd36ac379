"""Six mixers of half a million parameters, eight learning rates, two seeds; on recall and on text."""

import pathlib

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.sweep.search import Asha, GridSearch
from attnlab.sweep.space import Grid
from attnlab.sweep.sweep import sweep_config

MATCHED = pathlib.Path(__file__).parent / 'matched'
RECIPES = ('mha', 'linear_transformer', 'gla', 'mamba2', 'mamba', 'rg_lru')
RATES = (2e-3, 5e-3, 1e-3, 1e-2, 5e-4, 2e-2, 2e-4, 5e-2)
"""From the middle outwards: what comes late, and is likely to be worse, is what pruning gives up."""

METRICS = {'recall': ('test/1x/accuracy', 'max'), 'language': ('valid/loss', 'min')}
LONGER = {'cpu': 1, 'full': 50}
"""How many times the steps that `base.py` has."""


def studies(size):
    """A study a task and recipe."""
    return {task: {recipe: study(task, recipe, size) for recipe in RECIPES} for task in METRICS}


def study(task, recipe, size):
    """The sweep of a matched config."""
    metric, goal = METRICS[task]
    base = config_of(MATCHED / task / f'{recipe}.py')
    with base.unlocked():
        base.steps = base.checkpoint.every = LONGER[size] * base.steps
        base.evals[0].cadence.n *= LONGER[size]
    return sweep_config(
        base,
        {'rate': spec(Grid, key='optimizer.peak_lr', values=RATES)},
        sampler=spec(GridSearch),
        pruner=spec(Asha, first=base.steps // 4, reduction=2),
        seeds=(0, 1),
        metric=metric,
        goal=goal,
        confirm=2,
    )
