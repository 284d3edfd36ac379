"""Modular addition with the gradient perpendicular to the weights, 300 epochs"""

import pathlib

from attnlab.configuration import config_of
from attnlab.evals.measured import SHARE
from attnlab.experiment.experiment import Finished, Run
from attnlab.experiment.published import Published
from attnlab.runs.record import read_record

CONFIG = pathlib.Path(__file__).parents[3] / 'configs' / 'grokking.py'


FULL = ('the paper has a curve and no number, for which 0.99 is a bound of ours',)


def runs(size):
    """One run a seed."""
    return [Run(f'seed{seed}', config(size, seed)) for seed in range(3)]


def config(size, seed):
    """The protocol, the same at both sizes."""
    found = config_of(CONFIG, 'method=perpendicular,size=paper')
    with found.unlocked():
        found.seed = seed
        found.steps = 300
        found.evals[0].cadence.n = 10
    return found


def published(size):
    """The number, and what of its protocol is changed."""
    return Published(
        value=0.99,
        metric='accuracy on the sums not shown',
        source='Prieto et al. 2025, https://arxiv.org/abs/2501.04697, figure 1, set up as the released script',
        bounds=SHARE,
        spread=0.0,
        direction='at least',
        changed=FULL,
        guess='',
    )


def measure(finished: Finished):
    """The number of one seed."""
    return {'value': read_record(finished.workdir).last['test/all/accuracy']}
