"""The two delta rules of `recall_by_state` with small states, trained for longer, at one rate more."""

import dataclasses
import pathlib

from attnlab.experiment.experiment import label_of, module_of

SHORTER = module_of(pathlib.Path(__file__).parents[1] / 'recall_by_state' / 'sweep.py')

RECIPES = ('delta_net', 'gated_delta_net')
KEY_DIMS = (8, 16)
TIMES = 3
"""As many steps as there; at the CPU size as in its first run."""

SIZES = {
    'cpu': dataclasses.replace(SHORTER.SIZES['cpu'], steps=300, rates=(3e-3, 1e-2, 3e-2)),
    'full': SHORTER.SIZES['full'],
}


def studies(size):
    """A study a recipe and size of its state."""
    chosen = SIZES[size]
    return {
        'recall': {
            label_of(recipe, f'key_dim={key_dim}'): SHORTER.study(longer(recipe, key_dim, chosen), chosen)
            for recipe in RECIPES
            for key_dim in KEY_DIMS
        }
    }


def longer(recipe, key_dim, chosen):
    """The config there, with more steps; what is done every so many of them is done as often."""
    found = SHORTER.config(recipe, 'key_dim', key_dim, chosen)
    with found.unlocked():
        found.steps *= TIMES
        found.checkpoint.every = found.steps
        found.evals = SHORTER.of_splits(chosen.examples, every=found.steps)
        found.report.every *= TIMES
    return found
