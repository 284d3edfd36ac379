"""Retrieval of the largest of 16 items by softmax attention"""

import pathlib

from attnlab.configuration import config_of
from attnlab.evals.measured import SHARE
from attnlab.experiment.experiment import Finished, Run
from attnlab.experiment.published import Published, measured_of

CONFIG = pathlib.Path(__file__).parents[3] / 'configs' / 'recall.py'


FULL = (
    'the published number is quoted from secondary sources, not checked against the paper',
    'a stack of one pre-norm block with rotary positions in place of attention pooling between MLPs',
)
CPU = (*FULL, '2,000 steps, not 100,000')


def runs(size):
    """One run a seed."""
    return [Run(f'seed{seed}', config(size, seed)) for seed in range(3)]


def config(size, seed):
    """The protocol, at CPU size with what `published` says is changed."""
    found = config_of(CONFIG, 'task=max_retrieval,zoo=mha,size=paper')
    with found.unlocked():
        found.seed = seed
        found.evals[0].multiples = (1,)
        if size == 'cpu':
            found.steps = 2000
            found.checkpoint.every = 2000
            found.evals[0].cadence.n = 2000
    return found


def published(size):
    """The number, and what of its protocol is changed."""
    return Published(
        value=0.98,
        metric='accuracy at 16 items',
        source='Velickovic et al. 2024, https://arxiv.org/abs/2410.01104, table 1: 98 to 99 % for softmax',
        bounds=SHARE,
        spread=0.005,
        direction='at least',
        changed=FULL if size == 'full' else CPU,
        guess='',
    )


def measure(finished: Finished):
    """The number of one seed, and the noise of its test set."""
    return measured_of(finished.workdir, 'test/1x/accuracy')
