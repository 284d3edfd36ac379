"""In-context regression of dimension 5: attention against ridge regression"""

import pathlib

from attnlab.configuration import config_of
from attnlab.experiment.experiment import Finished, Run
from attnlab.experiment.published import Published
from attnlab.runs.record import read_record

CONFIG = pathlib.Path(__file__).parents[3] / 'configs' / 'recall.py'


GARG = 'Garg et al. 2022, https://arxiv.org/abs/2208.01066, figure 2: a Transformer is close to least squares'
MAHANKALI = 'Mahankali et al. 2024, https://arxiv.org/abs/2307.03576: one layer of linear attention learns one step'
CURVE = 'the paper has a curve and no number, for which 1.05 is a bound of ours'
ONE_LAYER = 'the paper says it of one layer of linear attention, for which ours has softmax, more layers and MLPs'
FULL = (
    '5 dimensions and 11 points, where the curriculum of the paper begins, not 20 and 41',
    'no curriculum',
    'rotary positions',
    'RMSNorm and gated MLPs without biases, not the layers of GPT-2',
    'a warm-up over a fiftieth of the steps, not none',
    '512 test prompts, not 1,280',
)
CPU = (
    *FULL,
    'two layers of 64 and 30,000 steps, not twelve of 256 and 500,000',
    'two heads, not eight',
    'a learning rate of 1e-3, not 1e-4',
)


def runs(size):
    """One run a seed."""
    return [Run(f'seed{seed}', config(size, seed)) for seed in range(3)]


def config(size, seed):
    """The protocol, at CPU size with what `published` says is changed."""
    found = config_of(CONFIG, 'task=regression,zoo=mha,size=paper')
    with found.unlocked():
        found.seed = seed
        found.length = 22
        found.task.problem.dim = found.model.inputs.features = 5
        found.evals[0].multiples = (1,)
        if size == 'cpu':
            found.steps = 30_000
            found.model.dim = 64
            found.model.stack.depth = 2
            found.optimizer.peak_lr = 1e-3
            found.checkpoint.every = 5000
            found.evals[0].cadence.n = 30_000
            for block in found.model.stack.blocks:
                block.mixer.heads = 2
    return found


def published(size):
    """The numbers, both of all runs, and what of their protocol is changed."""
    changed = FULL if size == 'full' else CPU
    return {
        '': Published(
            value=1.05,
            metric='squared error over that of ridge regression',
            source=GARG,
            spread=0.0,
            direction='at most',
            changed=(CURVE, *changed),
            guess='too few steps',
        ),
        'gradient step': Published(
            value=1.0,
            metric='squared error over that of the best step of gradient descent',
            source=MAHANKALI,
            spread=0.0,
            direction='at most',
            changed=(ONE_LAYER, *changed),
            guess='too few steps',
            key='over_gradient_step',
        ),
    }


def measure(finished: Finished):
    """The numbers of one seed: the error over that of ridge regression, and over that of one step."""
    last = read_record(finished.workdir).last
    loss, ridge, step = (last[f'test/1x/{name}'] for name in ('loss', 'ridge', 'gradient_step'))
    return {'value': loss / ridge, 'over_gradient_step': loss / step}
