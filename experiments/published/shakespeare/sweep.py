"""Characters of Shakespeare: the CPU setting of nanoGPT"""

import pathlib

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.experiment.experiment import Finished, Run
from attnlab.experiment.published import Published
from attnlab.nn.initialization import Gaussian

CONFIG = pathlib.Path(__file__).parents[3] / 'configs' / 'language.py'


FULL = (
    'rotary positions, not learned ones',
    'RMSNorm, not LayerNorm',
    'a gated MLP',
    'a head of its own over 256 bytes, not tied over 65 characters',
    'cosine to 0, not 1e-4',
    'windows that tile the text, not random crops',
    'validation on a sample of the whole split, not 20 random batches',
)


def runs(size):
    """One run a seed."""
    return [Run(f'seed{seed}', config(size, seed)) for seed in range(5)]


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
        found.evals[0].cadence.n = 250
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
