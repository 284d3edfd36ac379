"""Losses of classes on digits of which training has many zeros and few nines."""

import pathlib

import numpy as np
from scipy.special import softmax

from attnlab.analysis.calibration import calibration_error, cross_entropy
from attnlab.analysis.outputs import outputs
from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.data.long_range.long_tailed import LongTailed
from attnlab.experiment.experiment import Finished, Run, label_of
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
TAIL = 3
"""How many of the rarest classes are the tail."""


def runs(size):
    """A run a head, rate and seed; seeds choose the training examples and draw the model anew."""
    return [
        Run(label_of(head, rate, seed), config(head, RATES[rate], seed, size))
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
        found.evals = ()
        found.report.update(every=found.steps // 10, tensorboard=False)
    return found


def measure(finished: Finished):
    """Accuracies that count every class alike, whose held-out examples are 10 to 28; calibration and cross-entropy.

    The rate is chosen by the same mean on validation; everything else is of test, as it is.
    """
    found = predicted(finished.loaded, 'test')
    classes = by_class(found)
    sure = softmax(found.logits, axis=1).max(axis=1)
    return {
        'chosen_by': float(np.mean(by_class(predicted(finished.loaded, 'valid')))),
        'accuracy': float(np.mean(classes)),
        'tail': float(np.mean(classes[-TAIL:])),
        'common': float(np.mean(classes[:TAIL])),
        'calibration': calibration_error(sure, found.right),
        'loss': cross_entropy(found.logits, found.labels),
    }


def predicted(loaded, split):
    """What a run predicts of all examples of a split."""
    task = loaded.setup.task
    source = task.source(split, loaded.setup.length)
    rows = [source[index] for index in range(len(source))]
    return outputs(loaded, {name: np.stack([row[name] for row in rows]) for name in rows[0]})


def by_class(found):
    """The accuracy on the examples of each class."""
    return np.array([np.mean(found.right[found.labels == label]) for label in range(found.logits.shape[1])])
