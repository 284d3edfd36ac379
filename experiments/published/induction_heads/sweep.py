"""Induction heads: a Mamba trained at 2^8 tokens, asked at 2^14"""

import pathlib

from attnlab.configuration import config_of
from attnlab.evals.measured import SHARE
from attnlab.experiment.experiment import Finished, Run
from attnlab.experiment.published import Published, measured_of

CONFIG = pathlib.Path(__file__).parents[3] / 'configs' / 'recall.py'


FULL = ('the one learning rate of the better result, not the better of two',)
CPU = (*FULL, '20,480 steps, not 204,800')


def runs(size):
    """One run a seed."""
    return [Run(f'seed{seed}', config(size, seed)) for seed in range(3)]


def config(size, seed):
    """The protocol, at CPU size with what `published` says is changed."""
    found = config_of(CONFIG, 'task=induction,zoo=mamba,size=paper')
    with found.unlocked():
        found.seed = seed
        found.model.stack.depth = 2
        found.evals[0].multiples = (1, 4, 16, 64)
        found.evals[0].examples = 256
        found.evals[0].cadence.n = found.steps // 5
        if size == 'cpu':
            found.steps = 20_480
            found.checkpoint.every = 2048
            found.evals[0].cadence.n = found.steps
    return found


def published(size):
    """The number, and what of its protocol is changed."""
    return Published(
        value=1.0,
        metric='accuracy at 2^14 tokens',
        source='Gu and Dao 2023, https://arxiv.org/abs/2312.00752, table 11: 100 % at 2^6 to 2^20',
        bounds=SHARE,
        spread=0.005,
        direction='equal',
        changed=FULL if size == 'full' else CPU,
        guess='',
    )


def measure(finished: Finished):
    """The number of one seed, and the noise of its test set."""
    return measured_of(finished.workdir, 'test/64x/accuracy')
