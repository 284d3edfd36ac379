"""The groups that `state_tracking` needs more steps for, and the mixer that it contradicts the literature on."""

import dataclasses
import pathlib

from attnlab.experiment.experiment import module_of

SHORTER = module_of(pathlib.Path(__file__).parents[1] / 'state_tracking' / 'sweep.py')

RECIPES = {
    's3': ('slstm', 'delta_net_negative', 'gated_delta_product'),
    's5_swaps': ('delta_net_negative', 'gated_delta_product'),
    'parity': ('mamba3',),
}
TIMES = 4
"""As many steps as there."""

SIZES = {name: dataclasses.replace(size, steps=TIMES * size.steps) for name, size in SHORTER.SIZES.items()}


def studies(size):
    """A study a problem and recipe."""
    return {
        problem: {recipe: SHORTER.study(problem, recipe, SIZES[size]) for recipe in recipes}
        for problem, recipes in RECIPES.items()
    }
