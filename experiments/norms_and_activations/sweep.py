"""Four norms by eight activations in one language model of bytes, each pair at three learning rates."""

import pathlib

from rich.console import Console

from attnlab.analysis.examination import analyse_run
from attnlab.analysis.question import Question
from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.evals.cadence import AtEnd
from attnlab.evals.held_out import HeldOut
from attnlab.experiment.experiment import Finished, Run, label_of
from attnlab.experiment.settings import small_text
from attnlab.tables import Printer

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'language.py'
NORMS = ('rmsnorm', 'layernorm', 'evonorm_s0', 'dyt')
ACTIVATIONS = ('silu', 'gelu', 'relu', 'relu_squared', 'mish', 'swish', 'prelu', 'elliott')
RATES = {'low': 1e-3, 'middle': 4e-3, 'high': 1.6e-2}
"""Learning rates by the name of the place: whether the last is stable is part of the question."""

ROWS = 16
"""Windows of held-out text that are looked into."""


def runs(size):
    """A run a norm, activation and rate; one seed."""
    return [
        Run(label_of(norm, activation, name), config(norm, activation, rate, size))
        for norm in NORMS
        for activation in ACTIVATIONS
        for name, rate in RATES.items()
    ]


def config(norm, activation, rate, size):
    """A transformer with ungated channel mixers, so that the activation is all there is between their two maps."""
    sized = 'tiny' if size == 'cpu' else '10m'
    found = config_of(CONFIG, f'zoo=mha,size={sized},norm={norm},mlp=plain,activation={activation}')
    with found.unlocked():
        if size == 'cpu':
            small_text(found, steps=300, batch=8, length=128)
            found.checkpoint.every = found.steps
        found.optimizer.peak_lr = rate
        found.evals = (spec(HeldOut, cadence=spec(AtEnd), tokens=16_384 if size == 'cpu' else 262_144),)
        found.report.update(every=found.steps // 10, tensorboard=False)
    return found


def measure(finished: Finished):
    """Loss on held-out text, the largest number of the residual stream, and what eight bits add to the loss."""
    with (finished.workdir / 'analysis.txt').open('w') as log:
        found = analyse_run(
            Question.of(finished.workdir, None, None, ROWS), Printer(Console(file=log, width=120)), (8,)
        )
    return {
        'loss': finished.last('valid/loss'),
        'largest': max(layer['max_abs'] for layer in found.layers),
        'kurtosis': max(layer['kurtosis'] for layer in found.layers),
        'more_with_8_bits': found.losses[8] - found.losses[32],
    }
