"""Multi-query recall of 8 pairs in 128 tokens by attention of width 64"""

import pathlib

from attnlab.configuration import config_of
from attnlab.experiment.experiment import Finished, Run
from attnlab.experiment.published import Published
from attnlab.runs.record import read_record

CONFIG = pathlib.Path(__file__).parents[3] / 'configs' / 'recall.py'


FULL = (
    'dropout of 0.1 left out',
    'rotary positions, not learned ones',
    'one cosine over the run, not one an epoch',
    'one learning rate, the third of four, not the best of them',
    'no stop at 99 %',
)
CPU = (*FULL, '1,000 steps of 64 examples, not 12,500 of 512')


def runs(size):
    """One run a seed."""
    return [Run(f'seed{seed}', config(size, seed)) for seed in range(3)]


def config(size, seed):
    """The protocol, at CPU size with what `published` says is changed."""
    found = config_of(CONFIG, 'task=mqar,zoo=mha,size=paper')
    with found.unlocked():
        found.seed = seed
        found.length = 128
        found.batch_size = 512
        found.steps = 64 * 100_000 // 512
        found.task.problem.pairs = (8,)
        found.model.dim = 64
        found.evals[0].cadence.n = found.steps // 10
        found.evals[0].multiples = (1,)
        if size == 'cpu':
            found.steps = 1000
            found.checkpoint.every = 1000
            found.evals[0].cadence.n = 500
            found.batch_size = 64
    return found


def published(size):
    """The number, and what of its protocol is changed."""
    return Published(
        value=0.99,
        metric='accuracy on queries',
        source='Arora et al. 2023, https://arxiv.org/abs/2312.04927, figure 2: attention is always at 100 %',
        spread=0.0,
        direction='at least',
        changed=FULL if size == 'full' else CPU,
        guess='',
    )


def measure(finished: Finished):
    """The number of one seed."""
    return {'value': read_record(finished.workdir).last['test/1x/accuracy']}
