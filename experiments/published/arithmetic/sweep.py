"""Arithmetic modulo 5 of 1 to 19 numbers, asked at 19 to 127, by eigenvalues down to -1 and down to 0"""

import pathlib

from attnlab.configuration import config_of
from attnlab.evals.measured import SHARE
from attnlab.experiment.experiment import Finished, Run
from attnlab.experiment.published import Published, measured_of

CONFIG = pathlib.Path(__file__).parents[3] / 'configs' / 'recall.py'

SCALES = {'delta_net_negative': 2.0, 'delta_net': 1.0}
"""What the sigmoid of the write strength is multiplied by: with 2 eigenvalues reach from -1 to 1."""

EIGENVALUES = {'mamba_negative': 'signed', 'mamba': 'positive'}
"""Those of Mamba, from -1 to 1, or from 0 to 1: at full size alone, for time."""

NUMBERS = {'delta_net_negative': 0.971, 'delta_net': 0.314, 'mamba_negative': 0.241, 'mamba': 0.095}
"""Of table 3: the best of three seeds."""

TRAINED, ASKED = (1, 19), (19, 127)
"""Numbers of an expression, as the released generator draws what its config calls 3 to 40 and 40 to 256 tokens."""

FULL = ('the mean over three seeds, not the best of them', 'float32, not mixed precision')
CPU = (
    *FULL,
    '8,000 steps of 32, not 100,000 of 256',
    'width 64 and two heads, not 128 and four',
    'a learning rate of 3e-3, not 1e-3',
    '1,024 test examples, not 8,192',
)


def runs(size):
    """One run a seed and range, the positive case first."""
    return [Run(f'{name}-seed{seed}', config(name, size, seed)) for seed in range(3) for name in names(size)]


def names(size):
    """The models of a size."""
    return (*SCALES, *EIGENVALUES) if size == 'full' else tuple(SCALES)


def config(name, size, seed):
    """The protocol, at CPU size with what `published` says is changed."""
    found = config_of(CONFIG, f'task=arithmetic,zoo={name.removesuffix("_negative")},size=paper')
    with found.unlocked():
        found.seed = seed
        # The released script lets all parameters decay.
        found.optimizer.groups.vector.weight_decay = 1.0
        found.task.problem.shortest, found.length = TRAINED[0], 2 * TRAINED[1]
        found.task.extra = found.task.extra[:1]
        found.task.extra[0].problem.shortest, found.task.extra[0].length = ASKED[0], 2 * ASKED[1]
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
    """A smaller model and a hundredth of the examples."""
    found.steps = 8000
    found.checkpoint.every = 8000
    found.batch_size = 32
    found.model.dim = 64
    found.optimizer.peak_lr = 3e-3
    found.evals[0].cadence.n = 8000
    found.evals[0].examples = 1024
    for block in found.model.stack.blocks:
        block.mixer.heads = 2


def published(size):
    """The numbers, and what of their protocol is changed."""
    return {
        name: Published(
            value=NUMBERS[name],
            metric='accuracy at 19 to 127 numbers, chance 0',
            source='Grazzi et al. 2024, https://arxiv.org/abs/2411.12537, table 3',
            bounds=SHARE,
            direction='equal',
            changed=FULL if size == 'full' else CPU,
            guess='',
        )
        for name in names(size)
    }


def measure(finished: Finished):
    """The number of one seed, and the accuracy at the lengths trained on."""
    trained, beyond = (measured_of(finished.workdir, f'test/{part}/accuracy') for part in ('1x', 'length=40-256'))
    return {'value': scaled(beyond['value']), 'noise': 1.25 * beyond['noise'], 'trained': scaled(trained['value'])}


def scaled(accuracy):
    """Accuracy with chance, one of five, at 0."""
    return max(0.0, (accuracy - 0.2) / 0.8)
