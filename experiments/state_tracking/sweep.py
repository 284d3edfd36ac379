"""Eight mixers keep a state: parity, sums modulo five, three things in all orders, and swaps of five things."""

import dataclasses
import pathlib

from attnlab.config import spec, spec_of
from attnlab.configuration import config_of
from attnlab.data.synthetic.groups import WordProblem
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import EveryNSteps
from attnlab.sweep.sweep import rates_config

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'recall.py'
PROBLEMS = {
    'parity': WordProblem('Z2'),
    'addition': WordProblem('Z5'),
    's3': WordProblem('S3'),
    's5_swaps': WordProblem('S5', moved=2),
}
NEGATIVE = 'delta_net_negative'
RECIPES = ('mha', 'mamba', 'mamba3', 'slstm', 'delta_net', NEGATIVE, 'gated_delta_product', 'rwkv7')
SEEDS = 3
"""Fresh seeds that the best learning rate of every study is run with."""

LONGEST = 6
"""The longest slice, in multiples of the length trained on."""


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the experiment is.

    Attributes:
      arg: of configs/recall.py, for width and depth.
      length: tokens trained on, start mark included.
      steps: of training.
      batch: examples a step.
      examples: of every slice.
      rates: the learning rates, the same for all.
    """

    arg: str
    length: int
    steps: int
    batch: int
    examples: int
    rates: tuple[float, ...]


SIZES = {
    'cpu': Size(arg='task=s5', length=25, steps=800, batch=32, examples=256, rates=(1e-3, 3e-3, 1e-2)),
    'full': Size(arg='task=s5,size=paper', length=41, steps=50_000, batch=64, examples=4096, rates=(1e-4, 3e-4, 1e-3)),
}


def studies(size):
    """A study a problem and recipe."""
    return {problem: {recipe: study(problem, recipe, SIZES[size]) for recipe in RECIPES} for problem in PROBLEMS}


def study(problem, recipe, chosen):
    """Three learning rates with one seed, none given up early, then the best with fresh seeds: the same for all."""
    base = config(problem, recipe, chosen)
    return rates_config(base, chosen.rates, metric=f'test/{LONGEST}x/accuracy', goal='max', confirm=SEEDS)


def config(problem, recipe, chosen):
    """The run of a recipe: width and depth of configs/recall.py, write strengths up to two where they are asked for."""
    found = config_of(CONFIG, f'{chosen.arg},zoo={recipe.removesuffix("_negative")}')
    with found.unlocked():
        found.task.problem = spec_of(PROBLEMS[problem])
        found.update(length=chosen.length, steps=chosen.steps, batch_size=chosen.batch)
        if recipe == NEGATIVE:
            found.model.stack.blocks[0].mixer.gates.scale = 2.0
        found.checkpoint.every = chosen.steps
        evaluated = spec(EveryNSteps, n=chosen.steps)
        found.evals = (spec(BySlice, cadence=evaluated, multiples=(1, 2, 4, LONGEST), examples=chosen.examples),)
        found.report.update(every=chosen.steps // 20, tensorboard=False)
    return found
