"""Those of `conv_for_all_or_none` that decay, on its recall for three times as long, at a higher rate too."""

import pathlib

from attnlab.experiment.experiment import label_of, module_of
from attnlab.experiment.splits import of_splits
from attnlab.sweep.sweep import rates_config

SHORTER = module_of(pathlib.Path(__file__).parents[1] / 'conv_for_all_or_none' / 'sweep.py')

RECIPES = ('gla', 'gated_delta_net', 'mamba2')
TIMES = 3
"""As many steps as there."""

RATES = {'cpu': (3e-3, 1e-2, 3e-2, 1e-1), 'full': SHORTER.TASKS['recall'].rates}
"""Learning rates, the same for all: at the small size the highest of those there was the best of one study."""


def studies(size):
    """A study a recipe, and whether there are convolutions."""
    return {
        'recall': {
            label_of(recipe, name): study(longer(recipe, name, size), RATES[size])
            for recipe in RECIPES
            for name in SHORTER.CONVOLUTIONS
        }
    }


def study(base, rates):
    """All learning rates with one seed, none given up early, then the best with fresh seeds: the same for all."""
    return rates_config(
        base,
        rates,
        metric='valid/1x/accuracy',
        goal='max',
        confirm=SHORTER.SEEDS,
        reported='test/1x/accuracy',
    )


def longer(recipe, convolution, size):
    """The config there, with more steps, which chooses on other examples than it reports."""
    found = SHORTER.config('recall', recipe, convolution, size)
    with found.unlocked():
        found.steps *= TIMES
        found.checkpoint.every = found.steps
        found.evals = of_splits(1024, every=found.steps)
        found.report.every *= TIMES
    return found
