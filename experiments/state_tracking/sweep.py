"""Nine mixers keep a state: parity and sums modulo five, and at full size the orders of three and of five things."""

import dataclasses
import pathlib

from attnlab.config import spec_of
from attnlab.configuration import config_of
from attnlab.data.synthetic.groups import WordProblem
from attnlab.experiment.splits import of_splits
from attnlab.sweep.sweep import rates_config

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'recall.py'
PROBLEMS = {
    'parity': WordProblem('Z2'),
    'addition': WordProblem('Z5'),
    's3': WordProblem('S3'),
    's5_swaps': WordProblem('S5', moved=2),
}
NEGATIVE = '_negative'
"""What ends the name of a recipe whose eigenvalues are from -1, which are from 0 without it."""

RECIPES = (
    *('mha', 'mamba', 'mamba_negative', 'mamba3', 'slstm'),
    *('delta_net', 'delta_net_negative', 'gated_delta_product', 'rwkv7'),
)
SEEDS = 3
"""Fresh seeds that the best learning rate of every study is run with."""

LONGEST = 6
"""The longest examples, in multiples of the length trained on."""


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the experiment is.

    Attributes:
      problems: the names of those that are tried.
      arg: of configs/recall.py, for width and depth.
      length: tokens trained on, start mark included.
      steps: of training.
      batch: examples a step.
      examples: of every length and split.
      rates: the learning rates, the same for all.
      left_out: problems and recipes that are not tried.
    """

    problems: tuple[str, ...]
    arg: str
    length: int
    steps: int
    batch: int
    examples: int
    rates: tuple[float, ...]
    left_out: tuple[tuple[str, str], ...] = ()


SIZES = {
    'cpu': Size(
        problems=('parity', 'addition'),
        arg='task=s5',
        length=25,
        steps=800,
        batch=32,
        examples=256,
        rates=(3e-3, 1e-2),
        left_out=(('addition', 'mamba_negative'),),
    ),
    'full': Size(
        problems=tuple(PROBLEMS),
        arg='task=s5,size=paper',
        length=41,
        steps=50_000,
        batch=64,
        examples=4096,
        rates=(1e-4, 3e-4, 1e-3),
    ),
}


def studies(size):
    """A study a problem and recipe."""
    chosen = SIZES[size]
    return {
        problem: {
            recipe: study(problem, recipe, chosen) for recipe in RECIPES if (problem, recipe) not in chosen.left_out
        }
        for problem in chosen.problems
    }


def study(problem, recipe, chosen):
    """All learning rates with one seed, none given up early, then the best with fresh seeds: the same for all."""
    base = config(problem, recipe, chosen)
    valid, test = (f'{split}/{LONGEST}x/accuracy' for split in ('valid', 'test'))
    return rates_config(base, chosen.rates, metric=valid, goal='max', confirm=SEEDS, reported=test)


def config(problem, recipe, chosen):
    """The run of a recipe: width and depth of configs/recall.py, eigenvalues from -1 where they are asked for."""
    found = config_of(CONFIG, f'{chosen.arg},zoo={recipe.removesuffix(NEGATIVE)}')
    with found.unlocked():
        found.task.problem = spec_of(PROBLEMS[problem])
        found.update(length=chosen.length, steps=chosen.steps, batch_size=chosen.batch)
        if recipe.endswith(NEGATIVE):
            reach_below_zero(found.model.stack.blocks[0].mixer)
        found.checkpoint.every = chosen.steps
        found.evals = of_splits(chosen.examples, every=chosen.steps, multiples=(1, LONGEST))
        found.report.update(every=chosen.steps // 20, tensorboard=False)
    return found


def reach_below_zero(mixer):
    """Gives a config of Mamba its signed decays, and one of the delta rule write strengths up to two."""
    if 'eigenvalues' in mixer:
        mixer.eigenvalues = 'signed'
    else:
        mixer.gates.scale = 2.0
