"""Characters of Shakespeare: the CPU setting of nanoGPT"""

import pathlib

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.experiment.experiment import Finished, Run
from attnlab.experiment.published import Published
from attnlab.nn.initialization import Gaussian
from attnlab.nn.mlps import MLP

CONFIG = pathlib.Path(__file__).parents[3] / 'configs' / 'language.py'


FULL = (
    'rotary positions, not learned ones',
    'RMSNorm, not LayerNorm',
    '256 bytes, not 65 characters',
    'windows that tile the text, not random crops',
    'validation on the whole split every 500 steps, not on 20 random batches every 250',
    'three seeds, not one',
)


def runs(size):
    """One run a seed."""
    return [Run(f'seed{seed}', config(size, seed)) for seed in range(3)]


def config(size, seed):
    """The protocol, the same at both sizes."""
    found = config_of(CONFIG, 'zoo=mha,data=./shakespeare/train.txt')
    with found.unlocked():
        found.seed = seed
        found.task.text.valid_path = './shakespeare/valid.txt'
        found.length, found.batch_size, found.steps = 64, 12, 2000
        found.optimizer.update(peak_lr=1e-3, b2=0.99, weight_decay=0.1, clip=1.0)
        found.model.stack.initialization.linear = spec(Gaussian, deviation=0.02)
        found.model.stack.initialization.residual = 1.0
        for block in found.model.stack.blocks:
            block.mlp = spec(MLP)
        found.model.head = None
        found.evals[0].cadence.n = 500
        found.evals[0].tokens = None
        found.checkpoint.every = 1000
    return found


def published(size):
    """The number, and what of its protocol is changed."""
    return Published(
        value=1.88,
        metric='validation loss in nats a character',
        source='nanoGPT, https://github.com/karpathy/nanoGPT, README, CPU setting',
        spread=0.01,
        direction='equal',
        changed=FULL,
        guess='',
    )


def measure(finished: Finished):
    """The number of one seed."""
    return {'value': min(value for _, value in finished.curve('valid/loss'))}
