"""Learning rates for any model of `configs/images.py`, chosen on the validation split.

    attnlab sweep --config=sweeps/images:zoo=swin,data=same_different --study=studies/same-different-swin

All other arguments are those of `configs/images.py`. There are four rates from 3.2e-4 to 1e-2, two per decade; for
optimisers other than AdamW they are multiplied by the factor in `attnlab.run_config.OPTIMIZERS`. The study's metric is
the loss on the validation split, which is evaluated as often as the config evaluates. The test split is evaluated once,
at the end of every run; its loss is what is reported of the best rate, which is run again with fresh seeds.
"""

import pathlib

from ml_collections import ConfigDict

from attnlab.config import apart, whole
from attnlab.configuration import config_of
from attnlab.experiment.splits import chosen_on_valid
from attnlab.run_config import moved
from attnlab.sweep.sweep import rates_config

IMAGES = pathlib.Path(__file__).parents[1] / 'images.py'
RATES = (3.2e-4, 1e-3, 3.2e-3, 1e-2)


def get_config(arg: str = '') -> ConfigDict:
    """The config for `seeds=` and the arguments of `configs/images.py`."""
    given, rest = apart(arg, seeds='1')
    base = config_of(IMAGES, rest)
    with base.unlocked():
        base.evals = chosen_on_valid(base.evals)
    seeds = whole('seeds', given['seeds'])
    rates = moved(RATES, base.optimizer)
    return rates_config(base, rates, seeds=seeds, metric='valid/all/loss', reported='test/all/loss')
