"""Images with any mixer of the zoo: those on grids, and those of sequences, which read patches row by row.

    attnlab train --config=images:zoo=swin,data=count --workdir=runs/count-swin

`zoo` is a recipe (`attnlab zoo` lists them; those with the claim `grid` know where patches lie), `data` one of

- `digits`: 8 x 8 handwritten digits (extra `offline`);
- `count`, `same_different`, `connected`: drawn images of 32 x 32, told apart by how many shapes there are, whether two
  patterns are the same, and whether two marks are on one path;
- `segments`: drawn images again, and the class of every patch.

`size` is `tiny`, minutes on 2 CPU cores, or `small`, for an accelerator. Recipes with a bidirectional form are trained
in it; others read from left to right.

`stem=linear|overlap|conv` maps patches, `positions=learned|sinusoidal|none` are added to them, and
`token=mean|first|middle` says what a prediction about an image is read from: the mean of the patches, the default,
or a class token, which recipes on grids cannot place. `head` is one of those of classes that `attnlab zoo --heads`
lists; `optimizer` and `schedule` choose others, as in `configs/language.py`. `config.length` counts pixels, and so do
tokens a second; `config.model.inputs.patch` joins them to patches (and `config.task.patch`, for `segments`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx
from ml_collections import ConfigDict

from attnlab.config import arguments, choose, spec, takes
from attnlab.data.long_range.dataset import Dataset
from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.vision.shapes import Connected, Count, SameDifferent, Segments
from attnlab.errors import UserError
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import EveryNSteps
from attnlab.models.heads.registry import CLASSIFIERS
from attnlab.models.inputs.patches import ConvStem, OverlappingMap, Patches, class_place
from attnlab.models.model import Model
from attnlab.models.stack import stack_spec
from attnlab.nn.convolutions import PatchMap
from attnlab.nn.mlps import GatedMLP
from attnlab.nn.pools import MeanPool, OneToken
from attnlab.nn.positions import GridSinusoids, LearnedPlaces
from attnlab.tasks.images import ImageClassification, Segmentation, side
from attnlab.train.optimizer import AdamW, Group, Groups
from attnlab.train.run_config import CHOICES, run_config
from attnlab.train.schedule import Cosine
from attnlab.train.step import Precision
from attnlab.zoo import Recipe
from attnlab.zoo.chosen import chosen_recipe


@dataclasses.dataclass(frozen=True)
class Images:
    """A data set, and the patches that suit its images."""

    data: Dataset
    patch: int
    examples: int
    dense: bool = False


@dataclasses.dataclass(frozen=True)
class Size:
    """The model, and how it is trained; `window` is for mixers of sequences that have one, in patches."""

    steps: int
    batch_size: int
    peak_lr: float
    dim: int
    depth: int
    heads: int
    window: int = 16
    weight_decay: float = 0.05
    warmup: float = 0.1
    activations: str = 'float32'


DATA = {
    'digits': Images(Digits(), patch=1, examples=180),
    'count': Images(Drawn(Count()), patch=2, examples=1_000),
    'same_different': Images(Drawn(SameDifferent()), patch=2, examples=1_000),
    'connected': Images(Drawn(Connected()), patch=2, examples=1_000),
    'segments': Images(Drawn(Segments()), patch=2, examples=200, dense=True),
}

SIZES = {
    'tiny': Size(steps=1_000, batch_size=32, peak_lr=2e-3, dim=64, depth=2, heads=4),
    'small': Size(
        steps=20_000, batch_size=256, peak_lr=1e-3, dim=256, depth=8, heads=8, window=64, activations='bfloat16'
    ),
}

STEMS: dict[str, type[nnx.Module]] = {'linear': PatchMap, 'overlap': OverlappingMap, 'conv': ConvStem}
POSITIONS: dict[str, Callable[[], Any]] = {
    'learned': lambda: spec(LearnedPlaces),
    'sinusoidal': GridSinusoids,
    'none': lambda: None,
}
TOKENS = {'mean': None, 'first': 'first', 'middle': 'middle'}
DYNAMICS_LR = 1e-3
"""The highest learning rate of the time scales of a recurrence, which have no weight decay."""


def get_config(arg: str = '') -> ConfigDict:
    """The config of `zoo=...,data=...,size=...,stem=...,positions=...,token=...,head=...` and `CHOICES`."""
    chosen = arguments(
        arg,
        zoo='mha',
        data='digits',
        size='tiny',
        stem='linear',
        positions='learned',
        token='mean',
        head='linear',
        **CHOICES,
    )
    recipe = chosen_recipe(chosen['zoo'])
    images, size = choose(DATA, 'data', chosen['data']), choose(SIZES, 'size', chosen['size'])
    evaluated = max(1, size.steps // 10)
    return run_config(
        chosen,
        steps=size.steps,
        batch_size=size.batch_size,
        length=images.data.kind.length,
        task=_task(images),
        model=_model(recipe, images, size, chosen),
        optimizer=AdamW(
            peak_lr=size.peak_lr,
            schedule=Cosine(warmup=size.warmup),
            weight_decay=size.weight_decay,
            groups=Groups(dynamics=Group(lr=min(1.0, DYNAMICS_LR / size.peak_lr), weight_decay=0.0)),
        ),
        evals=(spec(BySlice, cadence=spec(EveryNSteps, n=evaluated), multiples=(1,), examples=images.examples),),
        save_every=evaluated,
        precision=Precision(activations=size.activations),
    )


def _task(images: Images) -> ConfigDict:
    if images.dense:
        return spec(Segmentation, data=images.data, patch=images.patch)
    return spec(ImageClassification, data=images.data)


def _model(recipe: Recipe, images: Images, size: Size, chosen: dict[str, str]) -> ConfigDict:
    where = choose(TOKENS, 'token', chosen['token'])
    if where is not None and (recipe.grid or images.dense):
        raise UserError(
            f'token={where} adds a token that lies on no grid; zoo={chosen["zoo"]} with data={chosen["data"]} needs '
            'token=mean'
        )
    pixels = side(images.data)
    grid = (pixels // images.patch,) * 2
    inputs = spec(
        Patches,
        size=(pixels, pixels),
        channels=1,
        patch=images.patch,
        stem=spec(choose(STEMS, 'stem', chosen['stem'])),
        positions=choose(POSITIONS, 'positions', chosen['positions'])(),
        class_token=where,
    )
    head = choose(CLASSIFIERS, 'head', chosen['head']).spec.copy_and_resolve_references()
    head.classes = images.data.kind.classes
    pool = MeanPool() if where is None else OneToken(class_place(grid, where))
    stack = _stack(recipe, size, grid[0] * grid[1] + (where is not None))
    return spec(Model, dim=size.dim, stack=stack, inputs=inputs, head=head, pool=pool, streaming=False)


def _stack(recipe: Recipe, size: Size, length: int) -> ConfigDict:
    """The recipe's mixers in the one block, in their bidirectional form where they have one."""
    mixers = recipe.sized(heads=size.heads, window=size.window, length=length)
    for mixer in mixers if recipe.bidirectional else ():
        if 'causal' in takes(mixer):
            mixer.causal = False
    return stack_spec(mixers, layer=recipe.layer, depth=size.depth, mlp=spec(GatedMLP))
