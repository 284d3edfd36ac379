"""Separators that see near frames, far ones, or all that came before, with as many parameters as each other."""

import dataclasses
import pathlib

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.experiment.experiment import Finished, Run, label_of
from attnlab.experiment.splits import SPLITS, of_splits
from attnlab.models.separators import ConvTasNet
from attnlab.nn.norms import LayerNorm

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'separation.py'
CYCLES = (1, 2, 3, 4, 6, 12)
"""Blocks after which dilations begin with 1 again; the blocks of all are as many."""

RECIPES = ('mamba', 'gla')
RATES = {'low': 1e-3, 'high': 3e-3}
SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the experiment is.

    Attributes:
      named: the size of configs/separation.py.
      steps: of training.
      examples: mixtures of each of validation and test.
      layers: blocks of a convolutional separator.
      mamba: width and depth of its layers, which have no channel mixers.
      gla: width and hidden width of its channel mixers. By these all have the same parameters within 1 %.
    """

    named: str
    steps: int
    examples: int
    layers: int
    mamba: tuple[int, int]
    gla: tuple[int, int]


SIZES = {
    'cpu': Size('tiny', steps=1_000, examples=100, layers=12, mamba=(47, 4), gla=(48, 192)),
    'full': Size('full', steps=20_000, examples=500, layers=24, mamba=(292, 8), gla=(256, 394)),
}
SYSTEMS = (*(f'tcn{cycle}' for cycle in CYCLES), 'conv_tasnet', *RECIPES)


def runs(size):
    """A run a separator, rate and seed."""
    return [
        Run(label_of(system, rate, seed), config(size, system, rate, seed))
        for system in SYSTEMS
        for rate in RATES
        for seed in range(SEEDS)
    ]


def config(size, system, rate, seed):
    """The run of a separator, all of them causal, evaluated on validation and test at its end."""
    chosen = SIZES[size]
    named = f'zoo={system}' if system in RECIPES else 'system=conv_tasnet'
    found = config_of(CONFIG, f'{named},form=causal,size={chosen.named}')
    with found.unlocked():
        found.seed, found.steps = seed, chosen.steps
        found.checkpoint.every = found.steps
        if system == 'mamba':
            found.model.dim, found.model.stack.depth = chosen.mamba
        elif system == 'gla':
            found.model.dim, hidden = chosen.gla
            for block in found.model.stack.blocks:
                block.mlp.hidden = hidden
        elif system == 'conv_tasnet':
            # As published, with norms of all frames so far; of six dilations at the small size.
            found.model.blocks, found.model.repeats = (6, 2) if size == 'cpu' else (8, 3)
        else:
            cycle = int(system.removeprefix('tcn'))
            # Norms of a frame alone, so that convolutions are all that sees others.
            found.model.update(blocks=cycle, repeats=chosen.layers // cycle, norm=spec(LayerNorm))
        found.optimizer.peak_lr = RATES[rate]
        found.evals = of_splits(chosen.examples)
        found.report.update(every=found.steps // 10, tensorboard=False)
    return found


def frames_seen(model, frames):
    """How many of the frames of a mixture the last one sees, norms not counted: by its convolutions, or all."""
    if not isinstance(model, ConvTasNet):
        return frames
    return min(frames, 1 + sum(block.conv.before for block in model.blocks))


def measure(finished: Finished):
    """The improvement in dB on validation, by which rates are chosen, and on test, the baseline, and frames seen."""
    setup, model = finished.loaded.setup, finished.loaded.model()
    found = {f'{split}_gain': finished.last(f'{split}/1x/si_snr_improvement') for split in SPLITS}
    return found | {
        'ideal_mask': finished.last('test/ideal_mask/si_snr_improvement'),
        'frames': frames_seen(model, model.frames(setup.length)),
    }
