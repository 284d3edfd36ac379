"""Parity of 2 to 39 bits, asked at 40 to 256: a Mamba with positive eigenvalues"""

import pathlib

from attnlab.configuration import config_of
from attnlab.experiment.experiment import Finished, Run
from attnlab.experiment.published import Published
from attnlab.runs.record import read_record

CONFIG = pathlib.Path(__file__).parents[3] / 'configs' / 'recall.py'


FULL = ('the median of three seeds, not the best of them', 'cosine to 0, not 1e-6', '4,096 test examples, not 8,192')
CPU = (*FULL, '2,000 steps of 64, not 20,000 of 256')


def runs(size):
    """One run a seed."""
    return [Run(f'seed{seed}', config(size, seed)) for seed in range(3)]


def config(size, seed):
    """The protocol, at CPU size with what `published` says is changed."""
    found = config_of(CONFIG, 'task=parity,zoo=mamba,size=paper')
    with found.unlocked():
        found.seed = seed
        found.optimizer.weight_decay = 0.0
        found.model.stack.depth = 2
        found.evals[0].multiples = (1,)
        found.evals[0].examples = 4096
        if size == 'cpu':
            found.steps = 2000
            found.checkpoint.every = 2000
            found.evals[0].cadence.n = 2000
            found.batch_size = 64
    return found


def published(size):
    """The number, and what of its protocol is changed."""
    return Published(
        value=0.0,
        metric='accuracy at 40 to 256 bits, chance 0',
        source='Grazzi et al. 2024, https://arxiv.org/abs/2411.12537, table 3: .000 for Mamba in [0, 1]',
        spread=0.03,
        direction='equal',
        changed=FULL if size == 'full' else CPU,
        guess='',
    )


def measure(finished: Finished):
    """The number of one seed."""
    return {'value': max(0.0, 2 * read_record(finished.workdir).last['test/length=40-256/accuracy'] - 1)}
