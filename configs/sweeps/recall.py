"""The learning rates among which papers on recall choose the best, for any task and mixer of `configs/recall.py`.

    attnlab sweep --config=sweeps/recall:task=mqar,zoo=gla,size=paper --study=studies/mqar-gla

All other arguments are those of `configs/recall.py`. `mqar` has the four rates of Arora et al. 2023,
https://arxiv.org/abs/2312.04927, from 1e-4 to 1e-2; `mqar_mixed` the four of Arora et al. 2024,
https://arxiv.org/abs/2402.18668, from 1e-3 to 10^-1.5; other tasks have those of `mqar`. For optimisers other than
AdamW they are multiplied by the factor in `attnlab.run_config.OPTIMIZERS`. Each rate is run with `seeds=` seeds, by
default one, as in the papers; report the best and the median. The best rate is chosen by the accuracy on validation
examples, or by the loss for tasks whose answers are real numbers, and run again with fresh seeds, which are scored in
the same way on test examples.
"""

import pathlib

import numpy as np
from ml_collections import ConfigDict

from attnlab.config import arguments, spec, whole
from attnlab.configuration import config_of
from attnlab.experiment.splits import chosen_on_valid
from attnlab.run_config import CHOICES, moved
from attnlab.sweep.sweep import rates_config
from attnlab.tasks.synthetic import InContextRegression

RECALL = pathlib.Path(__file__).parents[1] / 'recall.py'
RATES = tuple(float(f'{rate:.2g}') for rate in np.logspace(-4, -2, 4))
MIXED = tuple(float(f'{rate:.2g}') for rate in np.logspace(-3, -1.5, 4))


def get_config(arg: str = '') -> ConfigDict:
    """The config for `seeds=` and the arguments of `configs/recall.py`."""
    defaults = {'task': 'mqar', 'zoo': 'mha', 'size': 'tiny', 'conv': '0', 'init': 'framework', 'thoughts': 'none'}
    defaults |= CHOICES
    chosen = arguments(arg, seeds='1', **defaults)
    base = config_of(RECALL, ','.join(f'{name}={chosen[name]}' for name in defaults))
    with base.unlocked():
        base.evals = chosen_on_valid(base.evals)
    metric, goal = ('loss', 'min') if base.task.target == spec(InContextRegression).target else ('accuracy', 'max')
    return rates_config(
        base,
        moved(MIXED if chosen['task'] == 'mqar_mixed' else RATES, base.optimizer),
        seeds=whole('seeds', chosen['seeds']),
        metric=f'valid/1x/{metric}',
        goal=goal,
        reported=f'test/1x/{metric}',
    )
