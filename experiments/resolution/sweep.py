"""Classifiers of images of one size, asked at six; positions of several kinds, mixers of several reaches."""

import dataclasses
import pathlib
from types import MappingProxyType

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.prepared import Prepared
from attnlab.data.vision.resized import Resized
from attnlab.evals.cadence import AtEnd
from attnlab.evals.pictures import ReceptiveField
from attnlab.experiment.experiment import Finished, Run, label_of
from attnlab.experiment.splits import of_splits
from attnlab.mixers.spatial.reduced import EmbeddingFreeAttention
from attnlab.nn.positions import GridRope, GridSinusoids
from attnlab.tasks.images import ImageClassification

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'images.py'
ARGUMENTS = {
    'learned': 'zoo=mha,positions=learned',
    'sinusoidal': 'zoo=mha,positions=sinusoidal',
    'without': 'zoo=mha,positions=none',
    'axial_rope': 'zoo=axial_rope,positions=none',
    'pvt': 'zoo=pvt,positions=learned',
    'embedding_free': 'zoo=embedding_free,positions=learned',
    'fasa': 'zoo=fasa,positions=none',
    'swin': 'zoo=swin,positions=none',
    'neighbourhood': 'zoo=neighbourhood,positions=none',
    'vmamba': 'zoo=vmamba,positions=none',
}
"""Attention with positions of four kinds, then mixers, without positions where they tell places apart themselves."""

UNROTATED = ('learned', 'sinusoidal', 'without')
"""Whose attention lacks the rotations along the rows of patches that `mha` has elsewhere: positions are asked about."""

HIDDEN = MappingProxyType(
    {
        'cpu': {
            'learned': 320,
            'sinusoidal': 331,
            'without': 331,
            'axial_rope': 329,
            'pvt': 232,
            'embedding_free': 362,
            'fasa': 346,
            'swin': 328,
            'neighbourhood': 329,
            'vmamba': 125,
        },
        'full': {
            'learned': 704,
            'sinusoidal': 715,
            'without': 715,
            'axial_rope': 713,
            'pvt': 360,
            'embedding_free': 874,
            'fasa': 803,
            'swin': 712,
            'neighbourhood': 712,
            'vmamba': 317,
        },
    }
)
"""Hidden width of the channel mixers, by which all have the parameters of `learned` within 1 %."""

IMAGES = {'cpu': (Digits(), 16), 'full': (Prepared('cifar10'), 32)}
"""The images, and the pixels on a side that they are trained at."""

PATCH = 2
SIZES = {'cpu': (8, 12, 16, 24, 32, 48), 'full': (16, 24, 32, 48, 64, 96)}
"""Pixels on a side that all are asked at."""

PICTURED = {'cpu': (16, 48), 'full': (32, 96)}
"""Of them those of which it is drawn what a token in the middle has seen: that of training, and the largest."""

SIDES = MappingProxyType({'swin': 4, 'neighbourhood': 3, 'fasa': 3})
"""Tokens on a side of what is seen at CPU size, whose images have 8 x 8 patches in training and 4 x 4 at the least."""

RATES = {'low': 2e-3, 'high': 6e-3}
SEEDS = 3
STEPS = 250
"""At CPU size."""

FACTORS = (1, 2, 4)
"""By which the reduction of a trained `embedding_free` is multiplied; the last leaves one key of 8 x 8 patches."""


def runs(size):
    """A run a model, rate and seed."""
    return [
        Run(label_of(name, rate, seed), config(name, rate, seed, size))
        for name in ARGUMENTS
        for rate in RATES
        for seed in range(SEEDS)
    ]


def config(name, rate, seed, size):
    """A classifier of images of one size, asked at that size on validation and test at its end."""
    data, pixels = IMAGES[size]
    found = config_of(CONFIG, f'{ARGUMENTS[name]},data=digits,size={"tiny" if size == "cpu" else "small"}')
    with found.unlocked():
        found.seed, found.length = seed, pixels**2
        found.task = spec(ImageClassification, data=Resized(data, pixels))
        found.model.inputs.update(size=(pixels, pixels), patch=PATCH)
        for block in found.model.stack.blocks:
            block.mlp.hidden = HIDDEN[size][name]
            if name in UNROTATED:
                block.mixer.position = None
            if size == 'cpu' and name in SIDES:
                block.mixer.side = SIDES[name]
        if size == 'cpu':
            found.steps = STEPS
        found.checkpoint.every = found.steps
        found.optimizer.peak_lr = RATES[rate] / (1 if size == 'cpu' else 4)
        found.evals = of_splits(10_000)
        found.report.update(every=found.steps // 10, tensorboard=False)
    return found


def measure(finished: Finished):
    """Accuracy on validation, by which rates are chosen; on test by size, in every way of carrying the model over.

    What a token in the middle has seen is drawn of first seeds: `seen/PIXELS/receptive_field.png`.
    """
    if finished.parts[-1] == '0':
        for size in PICTURED[finished.size]:
            draw_seen(finished.loaded, size, finished.workdir / 'seen' / str(size))
    return {
        'valid': finished.last('valid/all/accuracy'),
        'accuracy': {
            way: by_size(finished.loaded, change, SIZES[finished.size]) for way, change in ways(finished.loaded).items()
        },
    }


def ways(loaded):
    """What is changed of a trained model besides its size, by name: nothing, the span of positions, or the reduction.

    Learned positions are always interpolated.
    """
    trained = loaded.model()
    side, found = trained.embedding.grid[0], {'as it is': lambda model: None}
    if isinstance(trained.embedding.positions, GridSinusoids):
        found['same span'] = lambda model: span_inputs(model, side)
    mixers = [block.mixer for block in trained.stack.blocks]
    if any(isinstance(getattr(mixer, 'position', None), GridRope) for mixer in mixers):
        found['same span'] = lambda model: span_mixers(model, side)
    if all(isinstance(mixer, EmbeddingFreeAttention) for mixer in mixers):
        found |= {f'factor {factor}': lambda model, factor=factor: reduce(model, factor) for factor in FACTORS[1:]}
    return found


def span_inputs(model, side):
    """Has sinusoids of the inputs span what they spanned in training."""
    model.embedding.positions = dataclasses.replace(model.embedding.positions, span=side)


def span_mixers(model, side):
    """Likewise rotations of queries and keys."""
    for block in model.stack.blocks:
        block.mixer.position = dataclasses.replace(block.mixer.position, span=side)


def reduce(model, factor):
    """Pools the keys of a smaller map still."""
    for block in model.stack.blocks:
        block.mixer.ratio *= factor


def by_size(loaded, change, sizes):
    """Accuracy on test by pixels on a side; `None` where a mixer does not take so small a grid."""
    data, patch = loaded.setup.task.data.of, loaded.model().embedding.patch
    mixers = [block.mixer for block in altered(loaded, change).model().stack.blocks]
    least = max([1, *(mixer.ratio for mixer in mixers if isinstance(mixer, EmbeddingFreeAttention))])
    return {
        size: accuracy(altered(loaded, change, size), Resized(data, size)) if size // patch >= least else None
        for size in sizes
    }


def altered(loaded, change, size=None):
    """The run with a changed model, for images of `size`."""

    def made(model):
        change(model)
        if size is not None:
            model.embedding.resize((size, size))
        return model

    return loaded.altered(made)


def draw_seen(loaded, size, folder):
    """Draws what the token in the middle of images of `size` has seen in the model as it is."""
    carried = altered(loaded, lambda model: None, size)
    setup = asked_about(carried.setup, Resized(loaded.setup.task.data.of, size))
    ReceptiveField(AtEnd()).evaluate(setup, carried.variables).draw(folder)


def asked_about(setup, data):
    """The setup with other images."""
    return dataclasses.replace(setup, task=dataclasses.replace(setup.task, data=data), length=data.kind.length)


def accuracy(loaded, data):
    """The share of the images of the test split that is told right."""
    setup = asked_about(loaded.setup, data)
    evaluator = next(each for each in setup.evals if each.split == 'test')
    return evaluator.evaluate(setup, loaded.variables).numbers['all/accuracy']
