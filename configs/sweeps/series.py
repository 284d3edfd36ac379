"""Learning rates for any forecaster of `configs/series.py`, chosen on the validation split.

    attnlab sweep --config=sweeps/series:zoo=mha,data=seasonal,horizon=96 --study=studies/seasonal-mha

All other arguments are those of `configs/series.py`. There are five rates from 1e-4 to 1e-2, two per decade; for
optimisers other than AdamW they are multiplied by the factor in `attnlab.run_config.OPTIMIZERS`. The study's metric is
the mean squared error on the validation split, or the loss there for `task=classification`. The test split is evaluated
once, at the end of every run; the same metric on it is what is reported of the best rate, which is run again with fresh
seeds.
"""

import pathlib

from ml_collections import ConfigDict

from attnlab.config import apart, whole
from attnlab.configuration import config_of
from attnlab.run_config import moved
from attnlab.sweep.sweep import rates_config

SERIES = pathlib.Path(__file__).parents[1] / 'series.py'
RATES = (1e-4, 3.2e-4, 1e-3, 3.2e-3, 1e-2)


def get_config(arg: str = '') -> ConfigDict:
    """The config for `seeds=` and the arguments of `configs/series.py`."""
    given, rest = apart(arg, seeds='1')
    base = config_of(SERIES, rest)
    number = 'all/loss' if 'task=classification' in rest.split(',') else '1x/mse'
    seeds = whole('seeds', given['seeds'])
    rates = moved(RATES, base.optimizer)
    return rates_config(base, rates, seeds=seeds, metric=f'valid/{number}', reported=f'test/{number}')
