"""Forecasters of series: linear maps, transformers and a state space, over two look-backs and two horizons."""

import pathlib

from attnlab.configuration import config_of
from attnlab.experiment.experiment import Finished, Run, label_of
from attnlab.experiment.splits import SPLITS, of_splits

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'series.py'
SYSTEMS = {
    'linear': 'system=linear',
    'nlinear': 'system=nlinear',
    'patch_tst': 'system=patch_tst',
    'itransformer': 'system=itransformer',
    'mamba': 'zoo=mamba',
}
SERIES = {
    'cpu': {'steady': 'seasonal', 'shifted': 'level_shift', 'recorded': 'membrane'},
    'full': {'steady': 'etth1', 'shifted': 'ettm1', 'recorded': 'membrane'},
}
"""The data by what a run is called; at full size published series stand in the place of drawn ones."""

STEPS = {'cpu': {'short': 96, 'long': 192}, 'full': {'short': 96, 'long': 336}}
"""Rows of a look-back, and rows of a horizon."""

RATES = {'low': 1e-3, 'high': 5e-3}
SEEDS = 3
BASELINES = ('repeat_last', 'ridge', 'ridge_last_value')


def runs(size):
    """A run a series, horizon, look-back, system, rate and seed."""
    return [
        Run(
            label_of(series, horizon, lookback, system, rate, seed),
            config(size, series, horizon, lookback, system, rate, seed),
        )
        for series in SERIES[size]
        for horizon in STEPS[size]
        for lookback in STEPS[size]
        for system in SYSTEMS
        for rate in RATES
        for seed in range(SEEDS)
    ]


def config(size, series, horizon, lookback, system, rate, seed):
    """The run of a system, evaluated in whole on validation and test at its end."""
    steps = STEPS[size]
    arguments = f'data={SERIES[size][series]},lookback={steps[lookback]},horizon={steps[horizon]},{SYSTEMS[system]}'
    found = config_of(CONFIG, f'{arguments},size={"tiny" if size == "cpu" else "small"}')
    with found.unlocked():
        found.seed = seed
        if size == 'cpu':
            found.steps = found.checkpoint.every = 300
        found.optimizer.peak_lr = RATES[rate]
        found.evals = of_splits()
        found.report.update(every=found.steps // 10, tensorboard=False)
    return found


def measure(finished: Finished):
    """Mean squared errors on validation, by which rates are chosen, and on test; on test those of the baselines too."""
    found = {f'{split}_mse': finished.last(f'{split}/1x/mse') for split in SPLITS}
    return found | {name: finished.last(f'test/{name}/mse') for name in BASELINES}
