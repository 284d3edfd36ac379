"""Trained mixers with weights, inputs of linear maps or states of few bits, one of the three at a time."""

import pathlib

import numpy as np

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.evals.cadence import AtEnd
from attnlab.evals.held_out import HeldOut
from attnlab.experiment.experiment import Finished, Run, label_of
from attnlab.experiment.settings import small_text
from attnlab.quantize.formats import format_called, storage_called
from attnlab.quantize.layers import Quantization
from attnlab.train.cost import state_bytes

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'language.py'
# The eight of the first predictions, then eight other families.
RECIPES = (
    *('mha', 'gla', 'gated_delta_net', 'rwkv7', 'mamba', 'mamba2', 's4d', 'rg_lru'),
    *('retnet', 'mlstm', 'mamba3', 's5', 'lru', 'hgrn', 'slstm', 'mega'),
)
BITS = (8, 6, 4, 3, 2)
SEEDS = 3

QUANTIZED = {
    'weights': lambda bits: Quantization(weights=storage_called(f'int{bits}')),
    'inputs': lambda bits: Quantization(inputs=format_called(f'affine{bits}')),
    'state': lambda bits: Quantization(state=storage_called(f'int{bits}')),
}
"""What has few bits: weights, an output of a linear map a scale; what linear maps read, a token a scale; states between
tokens, a scale for what the last axis of an array holds."""


def runs(size):
    """A run a recipe and seed, trained as ever."""
    return [Run(label_of(recipe, seed), config(recipe, seed, size)) for recipe in RECIPES for seed in range(SEEDS)]


def config(recipe, seed, size):
    """A language model of bytes; seeds of a recipe differ in initial values and in the order of the data."""
    found = config_of(CONFIG, f'zoo={recipe},init=framework,size={"tiny" if size == "cpu" else "10m"}')
    with found.unlocked():
        found.seed = seed
        if size == 'cpu':
            small_text(found, steps=600, batch=8, length=128)
            found.checkpoint.every = found.steps
        found.evals = (spec(HeldOut, cadence=spec(AtEnd), tokens=16_384 if size == 'cpu' else 262_144),)
        found.report.update(every=found.steps // 10, tensorboard=False)
    return found


def measure(finished: Finished):
    """The loss as trained, and how much more there is with each number of bits; the same text every time.

    `late` is the additional loss of the last quarter of a window less that of its first: what rounding again and again
    has added up to.
    """
    loaded = finished.loaded
    whole = evaluated(loaded)
    found = {'loss': whole.numbers['loss'], 'more': {}, 'late': {}, 'state_bytes': {}}
    for what, quantized in QUANTIZED.items():
        changed = {bits: loaded.altered(quantized(bits)) for bits in BITS}
        results = {bits: evaluated(each) for bits, each in changed.items()}
        found['more'][what] = {bits: result.numbers['loss'] - found['loss'] for bits, result in results.items()}
        found['late'][what] = {bits: growth(result, whole) for bits, result in results.items()}
        if what == 'state':
            length = loaded.setup.length
            found['state_bytes'] = {bits: state_bytes(each.setup, length) for bits, each in changed.items()}
    return found


def evaluated(loaded):
    """The run's own evaluation."""
    return loaded.setup.evals[0].evaluate(loaded.setup, loaded.variables)


def growth(result, whole):
    """The additional loss of the last quarter of a window less that of the first."""
    more = result.curves['1x'] - whole.curves['1x']
    quarter = len(more) // 4
    return float(np.mean(more[-quarter:]) - np.mean(more[:quarter]))
