"""Linear, NLinear and DLinear on ETTh1, a day's horizon of 96 hours from 336, trained as their released script does"""

import pathlib

from attnlab.config import spec_of
from attnlab.configuration import config_of
from attnlab.experiment.experiment import Finished, Run
from attnlab.experiment.published import Published
from attnlab.experiment.splits import SPLITS, of_splits
from attnlab.train.optimizer import AdamW
from attnlab.train.schedule import Staircase

CONFIG = pathlib.Path(__file__).parents[3] / 'configs' / 'series.py'
VALUES = {'linear': 0.375, 'nlinear': 0.374, 'dlinear': 0.375}
CHANGED = {'dlinear': ('one intercept, in the place of two that are added up',)}
SEEDS = 5
EPOCH, EPOCHS, PATIENCE = 256, 10, 3
"""Steps of an epoch, 8209 windows in batches of 32; the most epochs; how many without a better one end it."""


def runs(size):
    """One run a system and seed."""
    return [Run(f'{system}-seed{seed}', config(size, system, seed)) for system in VALUES for seed in range(SEEDS)]


def config(size, system, seed):
    """The protocol, the same at both sizes: all epochs are run, of which `measure` takes what early stopping keeps."""
    found = config_of(CONFIG, f'system={system},data=etth1,lookback=336,horizon=96,size=small')
    with found.unlocked():
        found.seed = seed
        found.steps = EPOCH * EPOCHS
        found.batch_size = 32
        # Two epochs at the full rate: the script lowers it at the end of an epoch, by that epoch's number less one.
        stairs = Staircase(warmup=0.0, hold=float(EPOCH), every=float(EPOCH), factor=0.5)
        found.optimizer = spec_of(AdamW(peak_lr=5e-3, schedule=stairs, weight_decay=0.0, clip=None, b2=0.999))
        found.evals = of_splits(every=EPOCH)
        found.report.update(every=EPOCH, tensorboard=False)
        found.checkpoint.every = EPOCH
    return found


def published(size):
    """The numbers, and what of their protocol is changed."""
    return {
        system: Published(
            value=value,
            metric='mean squared error, look-back 336, horizon 96',
            source='Zeng et al. 2023, https://arxiv.org/abs/2205.13504, table 2, and the released script for ETTh1',
            spread=0.0005,
            changed=CHANGED.get(system, ()),
            guess='the paper has one seed',
        )
        for system, value in VALUES.items()
    }


def measure(finished: Finished):
    """The error on test after the epoch that early stopping keeps: the best on validation before patience ran out."""
    valid, test = (dict(finished.curve(f'{split}/1x/mse')) for split in SPLITS)
    return {'value': test[kept(valid)]}


def kept(valid):
    """The step that early stopping with `PATIENCE` keeps, of errors on validation by step."""
    best = None
    for step in sorted(valid):
        if best is None or valid[step] < valid[best]:
            best = step
        elif step - best >= PATIENCE * EPOCH:
            break
    return best
