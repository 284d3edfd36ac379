"""Characters of Shakespeare: the two settings of nanoGPT, for a CPU and for a GPU"""

import dataclasses
import hashlib
import pathlib

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.errors import UserError
from attnlab.experiment.experiment import Finished, Run
from attnlab.experiment.published import Published
from attnlab.nn.initialization import Gaussian
from attnlab.nn.mlps import MLP

CONFIG = pathlib.Path(__file__).parents[3] / 'configs' / 'language.py'


BOTH = (
    'rotary positions, not learned ones',
    'RMSNorm, not LayerNorm',
    '256 bytes, not 65 characters',
    'windows that tile the text, not random crops',
)
SEEDS = 'three seeds, not one'
CPU = (*BOTH, 'validation on the whole split every 500 steps, not on 20 random batches every 250', SEEDS)
FULL = (
    *BOTH,
    'validation on the whole split every 250 steps, not on 200 random batches',
    'dropout of what branches give alone, not of the embedding and of the weights of attention too',
    SEEDS,
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model and its run as nanoGPT has them, and how often it is evaluated here."""

    dim: int
    depth: int
    heads: int
    length: int
    batch_size: int
    steps: int
    dropout: float
    every: int
    activations: str


SETTINGS = {
    'cpu': Setting(128, 4, 4, 64, 12, 2000, 0.0, 500, 'float32'),
    'full': Setting(384, 6, 6, 256, 64, 5000, 0.2, 250, 'bfloat16'),
}
WARMUP = 100
"""Steps, of both."""


TEXTS = './shakespeare/train.txt', './shakespeare/valid.txt'
TRAIN = 1_003_854
"""Bytes of the first."""

SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'
"""Of both, one after the other."""


def runs(size):
    """One run a seed. Raises `UserError` where the text is here, and is another."""
    check_text()
    return [Run(f'seed{seed}', config(size, seed)) for seed in range(3)]


def check_text():
    """Raises `UserError` for files that are not the published text, cut where nanoGPT cuts it."""
    paths = [pathlib.Path(text) for text in TEXTS]
    # Where one is not there, training says so; results of runs elsewhere can be reported without.
    if not all(path.is_file() for path in paths):
        return
    train, valid = (path.read_bytes() for path in paths)
    if len(train) != TRAIN or hashlib.sha256(train + valid).hexdigest() != SHA256:
        raise UserError(f'{" and ".join(TEXTS)} are not the text of the published result; README.md says how to cut it')


def config(size, seed):
    """That of nanoGPT for a CPU, at full size that for a GPU, with what `published` says is changed."""
    found, setting = config_of(CONFIG, f'zoo=mha,data={TEXTS[0]}'), SETTINGS[size]
    with found.unlocked():
        found.seed = seed
        found.task.text.valid_path = TEXTS[1]
        found.length, found.batch_size, found.steps = setting.length, setting.batch_size, setting.steps
        found.precision.activations = setting.activations
        found.optimizer.update(peak_lr=1e-3, b2=0.99, weight_decay=0.1, clip=1.0)
        found.optimizer.schedule.update(warmup=WARMUP / setting.steps, final=0.1)
        found.model.dim, found.model.stack.depth = setting.dim, setting.depth
        found.model.stack.initialization.linear = spec(Gaussian, deviation=0.02)
        found.model.stack.initialization.residual = 1.0
        for block in found.model.stack.blocks:
            block.mixer.heads = setting.heads
            block.mlp = spec(MLP)
            block.dropout = setting.dropout
        found.model.head = None
        found.evals[0].cadence.n = setting.every
        found.evals[0].tokens = None
        found.checkpoint.every = 1000
    return found


def published(size):
    """The number of either setting, and what of its protocol is changed."""
    full = size == 'full'
    return Published(
        value=1.4697 if full else 1.88,
        metric='validation loss in nats a character',
        source=f'nanoGPT, https://github.com/karpathy/nanoGPT, README, {"GPU" if full else "CPU"} setting',
        # That of the smaller one is the more noisy, being of 20 batches.
        spread=0.0 if full else 0.01,
        direction='equal',
        changed=FULL if full else CPU,
        guess='',
    )


def measure(finished: Finished):
    """The number of one seed: the best of the run, as nanoGPT reports it."""
    return {'value': min(value for _, value in finished.curve('valid/loss'))}
