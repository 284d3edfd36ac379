"""Diffusion models of small images with three mixers, judged by a classifier; and attention that reads few keys."""

import dataclasses
import io
import pathlib
import time
from types import MappingProxyType

import numpy as np
from rich.console import Console

from attnlab.analysis.judged import judge
from attnlab.config import spec, spec_of
from attnlab.configuration import config_of
from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.prepared import Prepared
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd
from attnlab.evals.drawn import Drawings
from attnlab.experiment.experiment import Finished, Run, label_of
from attnlab.mixers.softmax.reused import Reuse
from attnlab.runs.loading import load_run
from attnlab.tables import Printer

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'images.py'
RECIPES = ('mha', 'lamamba', 'gla')
JUDGED = label_of('judge', 'low', 0)
REUSED = 'mha'
"""The recipe whose attention is asked with few keys too."""

HIDDEN = MappingProxyType(
    {
        'cpu': {'mha': 320, 'lamamba': 147, 'gla': 312},
        'full': {'mha': 1024, 'lamamba': 402, 'gla': 1016},
    }
)
"""Hidden width of the channel mixers, by which all have the parameters of `mha` within 1 %."""

IMAGES = {'cpu': (Digits(), 8, 1), 'full': (Prepared('cifar10'), 32, 2)}
"""The images, the pixels on a side, and those of a patch."""

SIDES = {'cpu': 4, 'full': 8}
"""Tokens on a side of the windows of `lamamba`: of 8 x 8 tokens usual ones would see all."""

TRAINING = {'cpu': (500, 32), 'full': (100_000, 256)}
"""Steps, and images a step."""

RATES = {'low': 1e-3, 'high': 4e-3}
SEEDS = 3
STEPS = (10, 25, 50)
"""From noise to image."""

COUNT = {'cpu': 100, 'full': 1_000}
"""Images drawn for every number that is measured."""

SHARES = (0.5, 0.25, 0.125, 0.0625)
ALL = 'all_keys'
"""The name of what is drawn with all keys."""

KEPT = ('mass and residual', 'mass', 'nothing')


def runs(size):
    """The judge first, then a run a recipe, rate and seed."""
    return [
        Run(JUDGED, judging(size)),
        *(
            Run(label_of(recipe, rate, seed), drawing(recipe, rate, seed, size))
            for recipe in RECIPES
            for rate in RATES
            for seed in range(SEEDS)
        ),
    ]


def judging(size):
    """A classifier of the images, of attention, with positions."""
    found = config_of(CONFIG, f'zoo=mha,data=digits,size={"tiny" if size == "cpu" else "small"}')
    with found.unlocked():
        of_images(found, size)
        if size == 'cpu':
            found.steps = 600
        finish(found)
    return found


def drawing(recipe, rate, seed, size):
    """A diffusion model that is given labels and keeps an average of its parameters."""
    arguments = f'zoo={recipe},data=digits,predict=v,given=label,size={"tiny" if size == "cpu" else "small"}'
    found = config_of(CONFIG, arguments)
    with found.unlocked():
        found.seed = seed
        of_images(found, size)
        found.task.patch = IMAGES[size][2]
        found.steps, found.batch_size = TRAINING[size]
        found.optimizer.peak_lr = RATES[rate] / (1 if size == 'cpu' else 4)
        found.optimizer.ema = 0.99 if size == 'cpu' else 0.9995
        for block in found.model.stack.blocks:
            if block.mlp is not None:
                block.mlp.hidden = HIDDEN[size][recipe]
            if 'side' in block.mixer:
                block.mixer.side = SIDES[size]
        finish(found)
    return found


def of_images(found, size):
    """Has a config read the images of a size."""
    data, pixels, patch = IMAGES[size]
    found.task.data, found.length = spec_of(data), pixels**2
    found.model.inputs.update(size=(pixels, pixels), patch=patch)


def finish(found):
    """One evaluation on validation, at the end."""
    found.checkpoint.every = found.steps
    found.evals = (spec(BySlice, cadence=spec(AtEnd), split='valid', name='valid', multiples=(1,), examples=10_000),)
    found.report.update(every=found.steps // 10, tensorboard=False)


def measure(finished: Finished):
    """Of the judge its accuracy; of the others the loss on validation, and what the judge says by steps of drawing.

    Of attention what it says too where few keys are read in most steps, and how far those images are from those drawn
    with all keys from the same noise, the root of the mean square in standard deviations of pixels.
    """
    if finished.label == JUDGED:
        return {'accuracy': finished.last('valid/all/accuracy')}
    loaded = load_run(finished.workdir, ema=True)
    count = COUNT[finished.size]
    found = {'valid': finished.last('valid_ema/all/loss'), 'drawn': {}}
    for steps in STEPS:
        plain = Drawings(AtEnd(), count=count, steps=steps)
        found['drawn'][steps], whole = judged(finished, loaded, plain)
        keep(finished.workdir, loaded.setup, plain, whole, ALL)
    if finished.parts[0] == REUSED:
        found['reused'] = {kept: {} for kept in KEPT}
        for kept in KEPT:
            for share in SHARES:
                few = dataclasses.replace(plain, reuse=Reuse(share=share, kept=kept))
                said, images = judged(finished, loaded, few)
                keep(finished.workdir, loaded.setup, few, images, few_keys(share, kept))
                apart = float(np.sqrt(np.mean((images - whole) ** 2)))
                found['reused'][kept][share] = said | {'distance': apart}
    return found


def few_keys(share, kept):
    """The name of what is drawn with few keys."""
    return f'{share}-{kept.replace(" ", "_")}'


def keep(workdir, setup, drawings, images, name):
    """Writes drawn images side by side, `drawn/NAME/drawn.png`; with all keys those of most steps are left."""
    drawings.compared(setup, images).draw(workdir / 'drawn' / name)


def judged(finished, loaded, drawings):
    """What the judge says of images, the deviations of their pixels and the tokens computed a second; the images."""
    setup = dataclasses.replace(loaded.setup, evals=(drawings,))
    loaded = dataclasses.replace(loaded, setup=setup)
    printer = Printer(Console(file=io.StringIO(), width=120))
    said = judge(loaded, finished.workdir.parent / JUDGED, finished.workdir, printer)
    began = time.perf_counter()
    images = drawings.drawn(setup, loaded.variables)
    seconds = time.perf_counter() - began
    tokens = drawings.count * drawings.steps * setup.length // setup.task.patch**2
    names = ('accuracy', 'score', 'deviation_error')
    return {name: said[name] for name in names} | {'tokens_per_second': tokens / seconds}, images
