"""Small and large classifiers of digits: what they say of shifted digits and of other shapes, and what they hand on."""

import pathlib

import numpy as np
from rich.console import Console

from attnlab.analysis import scores
from attnlab.analysis.outputs import outputs
from attnlab.analysis.uncertainty import Scores, UncertaintyRequest, analyse_uncertainty
from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.data.vision.shapes import Count
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd
from attnlab.experiment.experiment import Finished, Run, label_of
from attnlab.tables import Printer

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'images.py'
RECIPES = ('mha', 'gla', 'mamba')
MODELS = {'cpu': {'small': (16, 1), 'large': (64, 2)}, 'full': {'small': (64, 2), 'large': (256, 6)}}
"""Width and depth; the small one of a recipe is trained before the large one, to which it then hands on."""

STEPS = {'cpu': 400, 'full': 4_000}
SEEDS = 3
ALPHA = 0.1
"""The share of labels that conformal sets may miss."""

SIDE = 8


def runs(size):
    """A run a recipe, model and seed."""
    return [
        Run(label_of(recipe, model, seed), config(recipe, model, seed, size))
        for recipe in RECIPES
        for model in MODELS[size]
        for seed in range(SEEDS)
    ]


def config(recipe, model, seed, size):
    """A classifier of 8 x 8 digits, a pixel a token, trained without augmentation."""
    found = config_of(CONFIG, f'data=digits,zoo={recipe}')
    with found.unlocked():
        found.seed = seed
        found.model.dim, found.model.stack.depth = MODELS[size][model]
        found.steps = found.checkpoint.every = STEPS[size]
        found.evals = (spec(BySlice, cadence=spec(AtEnd), multiples=(1,), examples=180),)
        found.report.update(every=found.steps // 10, tensorboard=False)
    return found


def measure(finished: Finished):
    """Calibration and conformal sets on test; what other inputs get, by score; of a large model, what it takes over."""
    recipe, model, seed = finished.parts
    small = finished.workdir.parent / f'{recipe}-small-{seed}'
    with (finished.workdir / 'analysis.txt').open('w') as log:
        printer = Printer(Console(file=log, width=120))
        found = analyse_uncertainty(finished.workdir, printer, UncertaintyRequest(alpha=ALPHA))
        cascade = UncertaintyRequest(second=finished.workdir)
        both = analyse_uncertainty(small, printer, cascade).cascade if model == 'large' else None
    return {
        'accuracy': finished.last('test/all/accuracy'),
        'error': found.calibration['as it is']['error']['value'],
        'conformal': dict(found.conformal),
        'other': of_other(finished.loaded),
        'cascade': None
        if both is None
        else {'cost': both.cost, 'accuracy': both.accuracy, 'by_chance': both.by_chance},
    }


def of_other(loaded):
    """By kind of input: by score, the probability that a digit of the test split scores above one of them."""
    task = loaded.setup.task
    trained, tested = (stacked(task, loaded.setup.length, split) for split in ('train', 'test'))
    scored = Scores.fitted(outputs(loaded, trained), loaded.model().head)
    inside = scored.of(outputs(loaded, tested))
    found = {}
    for kind, rows in others(tested).items():
        made = outputs(loaded, rows)
        found[kind] = {name: scores.auroc(inside[name], outside) for name, outside in scored.of(made).items()}
        if kind != 'shapes':
            found[kind]['accuracy'] = float(np.mean(made.right))
    return found


def stacked(task, length, split):
    """A split as one batch."""
    source = task.source(split, length)
    rows = [source[index] for index in range(len(source))]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def others(rows):
    """The digits one and three pixels to the right, and as many drawn shapes, all with the digits' grey levels."""
    images = rows['tokens'].reshape(-1, SIDE, SIDE)
    low, high = images.min(), images.max()
    found = {}
    for pixels in (1, 3):
        moved = np.full_like(images, low)
        moved[:, :, pixels:] = images[:, :, :-pixels]
        found[f'shifted by {pixels}'] = moved
    drawn = [Count().draw(np.random.SeedSequence(index))['x'].reshape(SIDE, 4, SIDE, 4) for index in range(len(images))]
    pooled = np.stack([picture.mean((1, 3)) for picture in drawn])
    found['shapes'] = low + (high - low) * pooled / pooled.max((1, 2), keepdims=True)
    return {
        kind: {**rows, 'tokens': made.reshape(rows['tokens'].shape).astype(rows['tokens'].dtype)}
        for kind, made in found.items()
    }
