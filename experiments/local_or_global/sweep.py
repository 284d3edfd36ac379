"""Mixers that see near tokens, all, or both, on three kinds of drawn images; each with a learning rate of its own."""

import dataclasses
import pathlib
from collections.abc import Mapping
from types import MappingProxyType

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.evals.cadence import EveryNSteps
from attnlab.evals.pictures import ReceptiveField
from attnlab.experiment.splits import of_splits
from attnlab.sweep.search import GridSearch
from attnlab.sweep.space import Grid
from attnlab.sweep.sweep import sweep_config

CONFIGS = pathlib.Path(__file__).parents[2] / 'configs'
TASKS = MappingProxyType({'cpu': ('count', 'same_different'), 'full': ('count', 'same_different', 'connected')})

PICTURED = 'count'
"""The task of which it is drawn what a token has seen, once trained: that which all mixers learn."""

HIDDEN = MappingProxyType(
    {
        'cpu': {'mha': 320, 'axial_rope': 319, 'pvt': 232, 'swin': 318, 'neighbourhood': 318, 'vmamba': 115},
        'full': {
            'mha': 704,
            'axial_rope': 704,
            'relu_vit': 704,
            'pvt': 360,
            'pvt_linear': 616,
            'embedding_free': 872,
            'polarized': 872,
            'polarized_sequential': 872,
            'swin': 704,
            'neighbourhood': 704,
            'condaformer': 496,
            'fasa': 792,
            'segman': 640,
            'vig': 688,
            'vmamba': 304,
            'agent_2d': 648,
            'inline_2d': 592,
            'soft_2d': 784,
            'nalaformer_2d': 608,
        },
    }
)
"""Hidden width of the channel mixers of every recipe, by which all have the parameters of `mha` within 1 %."""

EQUAL_FLOPS = MappingProxyType(
    {
        'cpu': {'mha': 320, 'axial_rope': 320, 'pvt': 363, 'swin': 352, 'neighbourhood': 357, 'vmamba': 60},
        'full': {
            'mha': 704,
            'axial_rope': 704,
            'relu_vit': 704,
            'pvt': 875,
            'pvt_linear': 961,
            'embedding_free': 1067,
            'polarized': 1087,
            'polarized_sequential': 1087,
            'swin': 818,
            'neighbourhood': 842,
            'fasa': 942,
            'segman': 790,
            'vig': 836,
            'vmamba': 380,
            'agent_2d': 807,
            'inline_2d': 853,
            'soft_2d': 725,
            'nalaformer_2d': 746,
        },
    }
)
"""That by which all have the operations of `mha` within 1 %; at full size `condaformer` has more without any."""

AT_EQUAL_FLOPS = MappingProxyType({'cpu': ('count',), 'full': TASKS['full']})
"""The tasks that are asked at equal operations too."""

SIDES = MappingProxyType({'swin': 4, 'neighbourhood': 3})
"""Tokens on a side of what is seen at CPU size: of 8 x 8 patches, windows as large as usual would see all."""

RATES = MappingProxyType({'cpu': (2e-3, 8e-3), 'full': (5e-4, 2e-3, 8e-3)})
SEEDS = 3
"""Fresh seeds that the best learning rate of every recipe is run with; the score is their mean."""


PATCH = 4
"""Pixels on a side of a patch at CPU size, where images have 8 x 8 of them."""


@dataclasses.dataclass(frozen=True)
class Small:
    """How a task is asked at CPU size: `drawn` is what differs of its images from those of full size."""

    steps: int = 400
    drawn: Mapping[str, int] = dataclasses.field(default_factory=dict)


SMALL = MappingProxyType(
    {
        'count': Small(),
        'same_different': Small(steps=300, drawn={'cells': 2, 'step': 4}),
    }
)
"""By task."""


def studies(size):
    """A study a task and recipe: at equal parameters, and of some tasks at equal operations too."""
    found = {task: studies_of(task, HIDDEN[size], size) for task in TASKS[size]}
    return found | {f'{task}_equal_flops': studies_of(task, EQUAL_FLOPS[size], size) for task in AT_EQUAL_FLOPS[size]}


def studies_of(task, widths, size):
    """A study a recipe, with these hidden widths."""
    return {recipe: study(task, recipe, hidden, size) for recipe, hidden in widths.items()}


def study(task, recipe, hidden, size):
    """Every learning rate with one seed, none given up early, then the best with fresh seeds: the same for all."""
    return sweep_config(
        config(task, recipe, hidden, size),
        {'rate': spec(Grid, key='optimizer.peak_lr', values=RATES[size])},
        sampler=spec(GridSearch),
        metric='valid/all/accuracy',
        goal='max',
        confirm=SEEDS,
        reported='test/all/accuracy',
    )


def config(task, recipe, hidden, size):
    """The run of a recipe: nothing differs between recipes but the mixers, and the width of what is between them."""
    found = config_of(CONFIGS / 'images.py', f'data={task},zoo={recipe},size={"tiny" if size == "cpu" else "small"}')
    with found.unlocked():
        for block in found.model.stack.blocks:
            block.mlp.hidden = hidden
            if size == 'cpu' and recipe in SIDES:
                block.mixer.side = SIDES[recipe]
        if size == 'cpu':
            small = SMALL[task]
            found.task.data.of.update(small.drawn)
            found.model.inputs.patch, found.steps = PATCH, small.steps
            found.checkpoint.every = small.steps
        found.evals = of_splits(2000, every=found.steps)
        if task == PICTURED:
            found.evals = (*found.evals, spec(ReceptiveField, cadence=spec(EveryNSteps, n=found.steps)))
        found.report.update(every=found.steps // 20, tensorboard=False)
    return found
