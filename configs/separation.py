"""Separation of generated mixtures, by Conv-TasNet or by any mixer of the zoo in its place.

    attnlab train --config=separation:system=conv_tasnet --workdir=runs/separation-conv-tasnet
    attnlab train --config=separation:zoo=mamba --workdir=runs/separation-mamba

A mixture is the sum of two harmonic tones whose loudness is modulated by noise (`attnlab.data.series.mixtures`;
`--config.task.data.of.apart=1.5` sets their fundamentals further apart). A learned transform cuts it into frames, the
separator makes a mask for each source, and the transform back adds up the masked frames.

- `system`: a published separator; or `zoo`: a recipe (`attnlab zoo` lists them) whose layers take its place. Recipes
  that read both ways and cannot tell left from right get sinusoidal positions;
- `form`: `causal`, or `bidirectional`, the default where there is such a form; a causal Conv-TasNet has cumulative
  norms;
- `size`: `tiny`, minutes on 2 CPU cores, mixtures of 2,000 samples; or `full`, the sizes of the paper, whose published
  scores are for mixtures of speech and therefore not comparable;
- `conv` (with `zoo`), `optimizer`, `schedule` and `rounding` are as in `configs/language.py`.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ml_collections import ConfigDict

from attnlab.config import arguments, check_choice, check_not_given, choose, spec
from attnlab.data.series.mixtures import DrawnMixtures
from attnlab.errors import UserError
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd, EveryNSteps
from attnlab.models.separators import ConvTasNet, StackSeparator
from attnlab.models.stack import stack_spec
from attnlab.nn.mlps import GatedMLP
from attnlab.nn.norms import CumulativeLayerNorm, GlobalLayerNorm
from attnlab.nn.positions import Sinusoidal
from attnlab.run_config import CHOICES, run_config
from attnlab.tasks.separation import Separation
from attnlab.train.optimizer import AdamW
from attnlab.train.schedule import Cosine
from attnlab.train.step import Precision
from attnlab.zoo.chosen import convolved, sequence_recipe


@dataclasses.dataclass(frozen=True)
class Size:
    """The mixtures, the model and its training.

    `features` and `frame` are those of the transform; `dim`, `hidden`, `skip`, `blocks` and `repeats` those of
    Conv-TasNet; `width`, `depth`, `heads` and `window`, in frames, those of layers of the zoo.
    """

    length: int
    steps: int
    batch_size: int
    peak_lr: float
    features: int
    frame: int
    dim: int
    hidden: int
    skip: int
    blocks: int
    repeats: int
    width: int
    depth: int
    heads: int
    window: int
    examples: int
    activations: str = 'float32'


SIZES = {
    'tiny': Size(
        length=2_000, steps=1_000, batch_size=8, peak_lr=1e-3, features=64, frame=16, dim=32, hidden=64, skip=32,
        blocks=5, repeats=2, width=64, depth=2, heads=4, window=32, examples=100,
    ),
    # Those of the paper; the steps are ours, and 4 seconds at 8 kHz.
    'full': Size(
        length=32_000, steps=200_000, batch_size=8, peak_lr=1e-3, features=512, frame=16, dim=128, hidden=512, skip=128,
        blocks=8, repeats=3, width=256, depth=8, heads=8, window=256, examples=500, activations='bfloat16',
    ),
}  # fmt: skip

SYSTEMS: Mapping[str, str] = MappingProxyType(
    {'conv_tasnet': 'Luo and Mesgarani 2019, https://arxiv.org/abs/1809.07454'}
)
"""Published separators by the value of `system=`, with their papers."""

FORMS = ('causal', 'bidirectional')
CLIP = 5.0
"""The norm at which gradients are clipped, as in the paper."""


def get_config(arg: str = '') -> ConfigDict:
    """The config for `system=...` or `zoo=...`, `conv=...`, `form=...`, `size=...` and `CHOICES`."""
    chosen = arguments(arg, system='', zoo='', conv='', form='', size='tiny', **CHOICES)
    if chosen['system'] and chosen['zoo']:
        raise UserError(f'zoo={chosen["zoo"]} takes the place of system={chosen["system"]}; give one of them')
    if not chosen['zoo']:
        check_not_given(chosen, ('conv',), 'is of the layers of a recipe; give zoo=NAME too')
    size = choose(SIZES, 'size', chosen['size'])
    if chosen['form']:
        check_choice(FORMS, 'form', chosen['form'])
    if chosen['zoo']:
        model = _zoo(size, chosen['zoo'], chosen['conv'] or '0', chosen['form'])
    else:
        check_choice(SYSTEMS, 'system', chosen['system'] or 'conv_tasnet')
        model = _conv_tasnet(size, chosen['form'] == 'causal')
    evaluated = max(1, size.steps // 5)
    every: dict[str, Any] = {'multiples': (1,), 'examples': size.examples}
    return run_config(
        chosen,
        steps=size.steps,
        batch_size=size.batch_size,
        length=size.length,
        task=spec(Separation, data=DrawnMixtures()),
        model=model,
        optimizer=AdamW(peak_lr=size.peak_lr, schedule=Cosine(warmup=0.1), weight_decay=0.0, clip=CLIP),
        evals=(
            spec(BySlice, cadence=spec(AtEnd), split='test', **every),
            spec(BySlice, cadence=spec(EveryNSteps, n=evaluated), split='valid', name='valid', **every),
        ),
        save_every=evaluated,
        precision=Precision(activations=size.activations),
    )


def _conv_tasnet(size: Size, causal: bool) -> ConfigDict:
    sizes = {name: getattr(size, name) for name in ('features', 'frame', 'dim', 'hidden', 'skip', 'blocks', 'repeats')}
    return spec(ConvTasNet, causal=causal, norm=spec(CumulativeLayerNorm if causal else GlobalLayerNorm), **sizes)


def _zoo(size: Size, zoo: str, conv: str, form: str) -> ConfigDict:
    """The layers of a recipe. Raises `UserError` for a form that it does not have."""
    recipe = convolved(sequence_recipe(zoo), conv)
    causal = form == 'causal' if form else not recipe.bidirectional
    if not (recipe.causal if causal else recipe.bidirectional):
        raise UserError(f'form={form} is not one of zoo={zoo}; leave it out, or choose another recipe')
    # Half a frame of zeros before and after the mixture.
    frames = -(-size.length // (size.frame // 2)) + 1
    mixers = recipe.sized(heads=size.heads, window=size.window, length=frames, causal=causal)
    return spec(
        StackSeparator,
        # A mixer that cannot tell left from right is told.
        positions=Sinusoidal() if recipe.mirrored and not causal else None,
        dim=size.width,
        features=size.features,
        frame=size.frame,
        causal=causal,
        stack=stack_spec(mixers, layer=recipe.layer, depth=size.depth, mlp=spec(GatedMLP)),
    )
