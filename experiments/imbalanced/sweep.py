"""Losses of classes on digits of which training has many zeros and few nines."""

import pathlib

import numpy as np
from scipy.special import softmax

from attnlab.analysis.calibration import calibration_error, cross_entropy
from attnlab.analysis.uncertainty import outputs
from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.data.long_range.long_tailed import LongTailed
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd
from attnlab.experiment.experiment import Finished, Run
from attnlab.models.heads.registry import CLASSIFIERS
from attnlab.tasks.images import ImageClassification

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'images.py'
LEFT_OUT = ('decoupled_softmax', 'fourier_head')
"""The first is `linear` where an example has one label; the classes of the second are bins of a number."""

HEADS = tuple(name for name in CLASSIFIERS if name not in LEFT_OUT)
RATES = {'low': 1e-3, 'middle': 3e-3, 'high': 1e-2}
SEEDS = {'cpu': 3, 'full': 10}
STEPS = {'cpu': 300, 'full': 3_000}
MODELS = {'cpu': (64, 2), 'full': (256, 4)}
"""Width and depth."""

RATIO = 50.0
TAIL, EXAMPLES = 3, 180
"""How many of the rarest classes are the tail, and the examples of a held-out split."""


def runs(size):
    """A run a head, rate and seed; seeds choose the training examples and draw the model anew."""
    return [
        Run(f'{head}-{rate}-{seed}', config(head, RATES[rate], seed, size))
        for head in HEADS
        for rate in RATES
        for seed in range(SEEDS[size])
    ]


def config(head, rate, seed, size):
    """A transformer of 4 x 4 patches of 2 x 2 pixels."""
    found = config_of(CONFIG, f'data=digits,zoo=mha,head={head}')
    with found.unlocked():
        found.seed = seed
        found.task = spec(ImageClassification, data=LongTailed(ratio=RATIO, seed=seed))
        found.model.inputs.patch = 2
        found.model.dim, found.model.stack.depth = MODELS[size]
        found.optimizer.peak_lr = rate
        found.steps = found.checkpoint.every = STEPS[size]
        found.evals = (
            spec(BySlice, cadence=spec(AtEnd), split='valid', name='valid', multiples=(1,), examples=EXAMPLES),
        )
        found.report.update(every=found.steps // 10, tensorboard=False)
    return found


def measure(finished: Finished):
    """Of the test split, which has as many examples of every class: accuracies, calibration and cross-entropy."""
    task, length = finished.loaded.setup.task, finished.loaded.setup.length
    source = task.source('test', length)
    rows = [source[index] for index in range(len(source))]
    found = outputs(finished.loaded, task, {name: np.stack([row[name] for row in rows]) for name in rows[0]})
    classes = task.data.kind.classes
    rare, common = found.labels >= classes - TAIL, found.labels < TAIL
    sure = softmax(found.logits, axis=1).max(axis=1)
    return {
        'chosen_by': finished.curve('valid/all/accuracy')[-1][1],
        'accuracy': float(np.mean(found.right)),
        'tail': float(np.mean(found.right[rare])),
        'common': float(np.mean(found.right[common])),
        'calibration': calibration_error(sure, found.right),
        'loss': cross_entropy(found.logits, found.labels),
    }
