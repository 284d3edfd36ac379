"""Multi-query recall of 4 pairs in 64 tokens and of 8 in 128 by attention of width 64"""

import pathlib

from attnlab.configuration import config_of
from attnlab.evals.measured import SHARE
from attnlab.experiment.experiment import Finished, Run
from attnlab.experiment.published import Published, measured_of

CONFIG = pathlib.Path(__file__).parents[3] / 'configs' / 'recall.py'

SETTINGS = {'64_4': (64, 4), '128_8': (128, 8)}
"""Tokens and pairs."""

FULL = (
    'dropout of 0.1 left out',
    'rotary positions, not learned ones',
    'one cosine to a tenth over the run, not one to 0 an epoch',
    'one learning rate, the third of four, not the best of them',
    'no stop at 99 %',
    'RMSNorm, no biases and a head of its own, not LayerNorm, biases and a head tied to the embedding',
    'a warm-up over a tenth of the steps, not none',
    '512 test examples, not 3,000',
    'the paper has a curve and no number, for which 0.99, where its training stops, is a bound of ours',
)
CPU = (*FULL, '2,000 steps of 64 examples, not 12,500 of 512')


def runs(size):
    """One run a setting and seed, the shorter problem first."""
    return [Run(f'{name}-seed{seed}', config(name, size, seed)) for name in SETTINGS for seed in range(3)]


def config(name, size, seed):
    """The protocol, at CPU size with what `published` says is changed."""
    found = config_of(CONFIG, 'task=mqar,zoo=mha,size=paper')
    length, pairs = SETTINGS[name]
    with found.unlocked():
        found.seed = seed
        found.length = length
        found.batch_size = 512
        found.steps = 64 * 100_000 // 512
        found.task.problem.pairs = (pairs,)
        found.model.dim = 64
        found.evals[0].cadence.n = found.steps // 10
        found.evals[0].multiples = (1,)
        if size == 'cpu':
            found.steps = 2000
            found.checkpoint.every = 2000
            found.evals[0].cadence.n = 2000
            found.batch_size = 64
    return found


def published(size):
    """The numbers, and what of their protocol is changed."""
    claim = Published(
        value=0.99,
        metric='accuracy on queries',
        source='Arora et al. 2023, https://arxiv.org/abs/2312.04927, figure 2: attention is always at 100 %',
        bounds=SHARE,
        spread=0.0,
        direction='at least',
        changed=FULL if size == 'full' else CPU,
        guess='',
    )
    return dict.fromkeys(SETTINGS, claim)


def measure(finished: Finished):
    """The number of one seed, and the noise of its test set."""
    return measured_of(finished.workdir, 'test/1x/accuracy')
