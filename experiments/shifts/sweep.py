"""A linear map, attention and a state space under four kinds of change, with three normalisations of the window."""

import pathlib

from attnlab.configuration import config_of
from attnlab.data.series.baselines import baselines
from attnlab.data.series.gaps import FILLINGS
from attnlab.experiment.experiment import Finished, Run, label_of
from attnlab.experiment.splits import SPLITS, of_splits

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'series.py'
CHANGES = {
    'level': 'data=level_shift,horizon=96',
    'trend': 'data=trend,horizon=96',
    'regimes': 'data=regimes,horizon=24',
    'missing': 'task=imputation,data=level_shift',
}
MODELS = {'linear': 'system=linear', 'mha': 'zoo=mha', 'mamba': 'zoo=mamba'}
NORMS = ('none', 'last_value', 'instance')
RATES = {'low': 1e-3, 'high': 5e-3}
SEEDS = 3
LOOKBACK = {'cpu': 96, 'full': 336}
ROWS = 20_000
"""Of the series at full size."""

RISE = 4000 / 1200
"""Of the trend, from the first row to the last, at either size."""


def runs(size):
    """A run a change, model, norm, rate and seed."""
    return [
        Run(label_of(change, model, norm, rate, seed), config(size, change, model, norm, rate, seed))
        for change in CHANGES
        for model in MODELS
        for norm in NORMS
        for rate in RATES
        for seed in range(SEEDS)
    ]


def config(size, change, model, norm, rate, seed):
    """The run of a model, evaluated in whole on validation and test at its end."""
    sized = f'lookback={LOOKBACK[size]},norm={norm},size={"tiny" if size == "cpu" else "small"}'
    found = config_of(CONFIG, f'{CHANGES[change]},{MODELS[model]},{sized}')
    with found.unlocked():
        found.seed = seed
        if size == 'cpu':
            found.steps = found.checkpoint.every = 300
        else:
            found.task.data.rows = ROWS
            if change == 'trend':
                found.task.data.of.trend = RISE / ROWS
        found.optimizer.peak_lr = RATES[rate]
        found.evals = of_splits()
        found.report.update(every=found.steps // 10, tensorboard=False)
    return found


def measure(finished: Finished):
    """Mean squared errors on validation, by which rates are chosen, and on test; on test those of the baselines too."""
    found = {f'{split}_mse': finished.last(f'{split}/1x/mse') for split in SPLITS}
    task = finished.loaded.setup.task
    if finished.parts[0] == 'missing':
        names = list(FILLINGS)
    else:
        names = list(baselines(task.data, finished.loaded.setup.length, task.horizon))
    return found | {'baselines': {name: finished.last(f'test/{name}/mse') for name in names}}
