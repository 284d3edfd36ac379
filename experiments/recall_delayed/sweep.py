"""Mixers of `conv_for_all_or_none` that stay at chance on recall behind convolutions, part by part, and for longer."""

import pathlib

from attnlab.config import spec
from attnlab.experiment.experiment import label_of, module_of
from attnlab.experiment.splits import of_splits
from attnlab.nn.feature_maps import EluPlusOne
from attnlab.sweep.sweep import rates_config

SHORTER = module_of(pathlib.Path(__file__).parents[1] / 'conv_for_all_or_none' / 'sweep.py')

ROWS = {'gla': 'gla', 'gla_elu': 'gla', 'gated_delta_net': 'gated_delta_net'}
"""The recipe of each row of studies; `gla_elu` has the positive features of `linear_transformer` besides."""

WITHOUT: dict[str, tuple[str, ...]] = {
    'whole': (),
    'no_gate': ('gate',),
    'no_decay': ('decay',),
    'neither': ('gate', 'decay'),
    'longer': (),
}
"""What is left out of every mixer."""

TIMES = {'longer': 3}
"""As many steps as there, where not one."""

RATES = {'cpu': (3e-3, 1e-2, 3e-2), 'full': SHORTER.TASKS['recall'].rates}
"""Learning rates, the same for all."""


def studies(size):
    """A study a row, and what is left out of it."""
    return {
        'recall': {label_of(row, change): study(config(row, change, size), size) for row in ROWS for change in WITHOUT}
    }


def study(base, size):
    """All learning rates with one seed, none given up early, then the best with fresh seeds: the same for all."""
    return rates_config(
        base,
        RATES[size],
        metric='valid/1x/accuracy',
        goal='max',
        confirm=SHORTER.SEEDS,
        reported='test/1x/accuracy',
    )


def config(row, change, size):
    """The config there with convolutions everywhere, which chooses on other examples than it reports."""
    found, times = SHORTER.config('recall', ROWS[row], 'all', size), TIMES.get(change, 1)
    with found.unlocked():
        found.steps *= times
        found.checkpoint.every = found.steps
        found.evals = of_splits(1024, every=found.steps)
        found.report.every *= times
        for block in found.model.stack.blocks:
            for part in WITHOUT[change]:
                block.mixer[part] = None
            if row == 'gla_elu':
                block.mixer.update(feature_map=spec(EluPlusOne), scale=1.0)
    return found
