"""Parity of 2 to 39 bits, asked at 40 to 256, by eigenvalues down to -1 and down to 0"""

import pathlib

from attnlab.configuration import config_of
from attnlab.evals.measured import SHARE
from attnlab.experiment.experiment import Finished, Run
from attnlab.experiment.published import Published, measured_of

CONFIG = pathlib.Path(__file__).parents[3] / 'configs' / 'recall.py'

SCALES = {'delta_net_negative': 2.0, 'delta_net': 1.0}
"""What the sigmoid of the write strength is multiplied by: with 2 eigenvalues reach from -1 to 1."""

EIGENVALUES = {'mamba_negative': 'signed', 'mamba': 'positive'}
"""Those of Mamba: from -1 to 1, or from 0 to 1."""

NUMBERS = {
    'delta_net_negative': (0.999, 0.006, 5),
    'delta_net': (0.010, 0.005, 5),
    'mamba_negative': (1.0, 0.0, 3),
    'mamba': (0.0, 0.0, 5),
}
"""By table: of 5 the median of three seeds and the median absolute deviation; of 3 the best of three seeds."""

FULL = (
    'the mean over three seeds, not their median',
    'training as in the released config, not as in the appendix, which has 100,000 steps of 1,024, weight decay of 0.1 '
    'and the best of several learning rates',
    'float32, not mixed precision',
)
CPU = (
    *FULL,
    '3,000 steps of 32, not 20,000 of 256',
    'width 64 and two heads, not 128 and four',
    'a learning rate of 3e-3, not 1e-3',
    '1,024 test examples, not 8,192',
)


def runs(size):
    """One run a seed and range, the positive case first."""
    return [Run(f'{name}-seed{seed}', config(name, size, seed)) for seed in range(3) for name in NUMBERS]


def config(name, size, seed):
    """The protocol, at CPU size with what `published` says is changed."""
    found = config_of(CONFIG, f'task=parity,zoo={name.removesuffix("_negative")},size=paper')
    with found.unlocked():
        found.seed = seed
        found.optimizer.weight_decay = 0.0
        found.task.extra = found.task.extra[:1]
        found.task.held_out = 8192
        found.evals[0].multiples = (1,)
        found.evals[0].examples = 8192
        for block in found.model.stack.blocks:
            if name in SCALES:
                block.mixer.gates.scale = SCALES[name]
                block.mixer.heads = 4
            else:
                block.mixer.eigenvalues = EIGENVALUES[name]
        if size == 'cpu':
            shrink(found)
    return found


def shrink(found):
    """A smaller model and a tenth of the steps."""
    found.steps = 3000
    found.checkpoint.every = 3000
    found.batch_size = 32
    found.model.dim = 64
    found.optimizer.peak_lr = 3e-3
    found.evals[0].cadence.n = 3000
    found.evals[0].examples = 1024
    for block in found.model.stack.blocks:
        if 'heads' in block.mixer:
            block.mixer.heads = 2


def published(size):
    """The numbers, and what of their protocol is changed."""
    return {
        name: Published(
            value=value,
            metric='accuracy at 40 to 256 bits, chance 0',
            source=f'Grazzi et al. 2024, https://arxiv.org/abs/2411.12537, table {table}',
            bounds=SHARE,
            spread=spread,
            direction='equal',
            changed=FULL if size == 'full' else CPU,
            guess='',
        )
        for name, (value, spread, table) in NUMBERS.items()
    }


def measure(finished: Finished):
    """The number of one seed, and the accuracy at the lengths trained on."""
    trained, beyond = (measured_of(finished.workdir, f'test/{part}/accuracy') for part in ('1x', 'length=40-256'))
    return {'value': scaled(beyond['value']), 'noise': 2 * beyond['noise'], 'trained': scaled(trained['value'])}


def scaled(accuracy):
    """Accuracy with chance at 0."""
    return max(0.0, 2 * accuracy - 1)
