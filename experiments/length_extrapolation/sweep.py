"""Language models trained on windows of 256 bytes, asked at up to 32 times that."""

import dataclasses
import pathlib
from itertools import pairwise

import numpy as np

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.evals.cadence import AtEnd
from attnlab.evals.held_out import HeldOut
from attnlab.experiment.experiment import Finished, Run
from attnlab.experiment.settings import for_length, small_text

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'language.py'
LENGTH = 256
MULTIPLES = (1, 2, 4, 8, 16, 32)
ENCODINGS = {
    'rope': 'mha',
    'nope': 'nope',
    'alibi': 'alibi',
    'forgetting': 'forgetting',
    'forgetting_pro': 'forgetting_pro',
    'ssmax': 'ssmax',
    'sliding_window': 'sliding_window',
}
"""Labels, and the recipes that they are."""

TOKENS = {'cpu': 32_768, 'full': 1_048_576}


def runs(size):
    """A run a recipe: two layers of 64 channels for 500 steps, or the 10m size of `configs/language.py`."""
    return [Run(label, config(label, size)) for label in ENCODINGS]


def config(label, size):
    """The run of a recipe."""
    found = config_of(CONFIG, f'zoo={ENCODINGS[label]},size={"tiny" if size == "cpu" else "10m"}')
    with found.unlocked():
        if size == 'cpu':
            small_text(found, steps=500, batch=8, length=LENGTH)
        else:
            found.update(batch_size=found.batch_size * found.length // LENGTH, length=LENGTH)
        for_length(found, ENCODINGS[label])
        if label == 'sliding_window':
            found.model.stack.blocks[0].mixer.window = LENGTH // 4
        found.evals = (spec(HeldOut, cadence=spec(AtEnd), tokens=TOKENS[size]),)
        found.checkpoint.every = found.steps // 2 if size == 'cpu' else 1000
        found.report.update(every=found.steps // 40, tensorboard=False)
    return found


def measure(finished: Finished):
    """Bits per byte by length of the window, on the same tokens, and nats per token by position in the longest."""
    setup = finished.loaded.setup
    (evaluator,) = setup.evals
    found = dataclasses.replace(evaluator, multiples=MULTIPLES).evaluate(setup, finished.loaded.variables)
    names = {f'{multiple * LENGTH}': '' if multiple == 1 else f'@{multiple}x' for multiple in MULTIPLES}
    return {
        'bits_per_byte': {length: found.numbers[f'bits_per_byte{suffix}'] for length, suffix in names.items()},
        'by_position': by_position(found.curves[f'{MULTIPLES[-1]}x']),
    }


def by_position(losses):
    """Means over the positions from each power of two up to the next."""
    bounds = [0, *(2**power for power in range(4, int(np.log2(len(losses))) + 1))]
    return {str(end): float(np.nanmean(losses[start:end])) for start, end in pairwise(bounds)}
