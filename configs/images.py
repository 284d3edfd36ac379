"""Images and point clouds with any mixer of the zoo; mixers of sequences read the patches row by row.

    attnlab train --config=images:zoo=swin,data=count --workdir=runs/count-swin

Data and size:

- `zoo`: a recipe (`attnlab zoo` lists them); those with the claim `grid` know where each patch lies. Recipes with a
  bidirectional form are trained in it; the others read from left to right.
- `size`: `tiny`, minutes on 2 CPU cores, or `small`, for an accelerator.
- `data`: one of
    - `digits`: 8 x 8 handwritten digits (extra `offline`);
    - `count`, `same_different`, `connected`: generated images of 32 x 32; the class is the number of shapes, whether
      two patterns are the same, or whether two marks are on one path;
    - `segments`: generated images with a class for every patch;
    - `surfaces`, `parts`: generated point clouds with a class for every point, the kind of surface or the part of a
      table, chair or lamp that it belongs to, predicted from its voxel (`attnlab.tasks.clouds`). The tokens are the
      `side=8` voxels along each axis, for mixers of volumes, such as `condaformer`, and of sequences. With
      `voxels=occupied` they are only the voxels that hold points, at most 512, for mixers of sequences that tell
      padding apart; `condaformer` reads the whole grid and leaves the empty voxels out;
    - `mnist`, `fashion_mnist` (28 x 28, grey), `cifar10`, `cifar100` (32 x 32, three colours), `imagenette` (64 x 64,
      three colours): prepared once by `attnlab data prepare` (extra `tfds`) from the published files, whose checksums
      are verified;
    - a path, recognised by a `/` or a `.` in it: your own image files in `PATH/CLASS/`, or in `PATH/train/CLASS/`,
      `PATH/test/CLASS/` and optionally `PATH/valid/CLASS/` (`attnlab.data.vision.folders`), read with
      `colors=rgb|grey` and resized to squares of `side=32` pixels.
- `augment=crop+flip+rand+mixup+cutmix`, or a subset: in training, a random crop of the zero-padded image, a mirror
  image, two of RandAugment's changes of shape or colour (only for images of bytes, so not `digits`), a mixture of two
  images, a patch pasted from another. Of `mixup` and `cutmix` one is drawn for each image.

Model:

- `layout`: `flat`; `pyramid`, resolutions that fall while widths rise: each stage has half the sides and twice the
  width of the one before, and the last has the width of `size`; or `paper`, the hierarchical model of the recipe's own
  paper with its widths, depths and heads, on the patches of `data` and with the training of `size` (`swin`: Swin-T,
  `pvt`: PVT-Tiny).
- `system=activator`: layers without a mixer in place of a recipe's (`attnlab.blocks.mixerless`): behind one norm, a
  gated network both of whose factors are normalised, and a plain network, each with twice the width of hidden channels;
  `system=activator_gates` has the gated network alone. No token meets another before patches are averaged, so their
  order makes no difference unless `positions` adds positions.
- `layers=linear`: the parameters of a layer are linear in its depth, a base plus a slope (`layout=flat`).
  `learngene=RUN` starts from such a run and builds ordinary layers from it, as many as `--config.model.stack.depth`
  says.
- `stem=linear|overlap|conv` maps patches to tokens, and `positions=learned|sinusoidal|none` are added to them. By
  default they are those of the paper with `layout=paper`, and `linear` and `learned` otherwise; a system has no
  positions.
- `token`: what the prediction for an image is read from: `mean` of the patches (the default), or a class token put
  `first` or in the `middle`, which recipes on grids and layouts of several resolutions have no place for.
- `head`: one of the classification heads that `attnlab zoo --heads` lists.
- `norm`: `rmsnorm`, `layernorm`, `dyt`, `evonorm_s0` or `none`, in the blocks and at the end; or `evonorm_b0`, whose
  variances are taken over the batch, in the blocks only. By default it is that of the paper or the system where these
  have one, and `rmsnorm` otherwise.
- `conv`: the short convolutions, along the rows of patches. `conv`, `init`, `optimizer`, `schedule` and `rounding` are
  as in `configs/language.py`.

What is predicted and evaluated:

- `predict`: `label`, the default; or `epsilon` or `v`, which train a diffusion model of the images
  (`attnlab.tasks.diffusion`) that draws some at the end. With `given=label` it is told the label of an image and draws
  images of every label. Time and label are given with the pixels or, with `told=norms`, to the norms of all branches,
  which then scale, shift and gate them (DiT; the blocks of LaMamba: `zoo=lamamba,told=norms`).
  `attnlab eval --judge=RUN` has a run with `predict=label` classify the drawn images.
- `pictures=1`: at the end, draws what a token in the middle of an image has seen (`figures/receptive_field.png`; not
  with a class token) and, for `segments`, images with their true and predicted classes (`figures/segmented.png`).

Every evaluation, the last included, reads 1,000 images spread over the test split (all 180 of `digits`; 200 images or
clouds where every patch or point has a class); `attnlab eval --examples=10000` reads that many.

`config.length` counts pixels, as do the reported tokens per second; `config.model.inputs.patch` joins pixels to patches
(and, for `segments`, `config.task.patch` to tokens of the last resolution). For clouds it counts points.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from flax import nnx
from ml_collections import ConfigDict

from attnlab.blocks.adaptive import AdaptiveBlock
from attnlab.blocks.block import Block
from attnlab.blocks.layer import MixerAndMLP, WholeLayers
from attnlab.blocks.mixerless import MixerlessBlock
from attnlab.config import arguments, build, check_not_given, choose, spec, takes, whole
from attnlab.data.long_range.dataset import Dataset
from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.long_range.prepared import Prepared
from attnlab.data.vision.augment import Augmentation, Crop, CutMix, Flip, Mixing, Mixup, Transform
from attnlab.data.vision.clouds import Parts, Surfaces
from attnlab.data.vision.folders import image_folder
from attnlab.data.vision.rand_augment import RandAugment
from attnlab.data.vision.shapes import Connected, Count, SameDifferent, Segments
from attnlab.errors import UserError
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd, EveryNSteps
from attnlab.evals.drawn import Drawings
from attnlab.evals.pictures import ReceptiveField, SegmentPictures
from attnlab.functional.grids import Grid
from attnlab.models.heads.registry import CLASSIFIERS
from attnlab.models.heads.regression import RegressionHead
from attnlab.models.inputs.patches import ConvStem, OverlappingMap, Patches, ToldPatches, class_place
from attnlab.models.inputs.voxels import SomeVoxels, Voxels
from attnlab.models.model import Model
from attnlab.models.pyramid import Pyramid, Resolution
from attnlab.models.stack import LinearStack, Stack, stack_spec
from attnlab.nn.convolutions import PatchMap, PatchMerging
from attnlab.nn.mlps import MLP, GatedMLP, NormedGatedMLP
from attnlab.nn.norms import NORMS, EvoNormB0, LayerNorm, RMSNorm
from attnlab.nn.pools import MeanPool, OneToken
from attnlab.nn.positions import GridSinusoids, LearnedPlaces
from attnlab.run_config import CHOICES, DYNAMICS_LR, run_config
from attnlab.tasks.clouds import FEATURES, OccupiedSegmentation, PointSegmentation, SparseSegmentation
from attnlab.tasks.diffusion import Diffusion
from attnlab.tasks.images import ImageClassification, Segmentation, side
from attnlab.train.optimizer import AdamW, Group, Groups
from attnlab.train.schedule import Cosine
from attnlab.train.start import FromLearngene
from attnlab.train.step import Precision
from attnlab.zoo import ZOO, Recipe
from attnlab.zoo.chosen import chosen_recipe, convolved, initialized, set_norm


@dataclasses.dataclass(frozen=True)
class Images:
    """A data set, with the patch size for its images, whose pixels have `levels` values, or the voxels of its clouds.

    `dense` data have a class for every patch or point; with `occupied` only voxels that hold points are tokens.
    """

    data: Dataset
    patch: int
    examples: int
    dense: bool = False
    levels: int = 256
    voxels: int | None = None
    occupied: bool = False


@dataclasses.dataclass(frozen=True)
class Size:
    """The model and its training.

    `window`, in patches, is for mixers of sequences that have one; `resolutions` is for `layout=pyramid`.
    """

    steps: int
    batch_size: int
    peak_lr: float
    dim: int
    depth: int
    heads: int
    window: int = 16
    resolutions: int = 2
    weight_decay: float = 0.05
    warmup: float = 0.1
    activations: str = 'float32'


DATA = {
    'digits': Images(Digits(), patch=1, examples=180, levels=17),
    'count': Images(Drawn(Count()), patch=2, examples=1_000),
    'same_different': Images(Drawn(SameDifferent()), patch=2, examples=1_000),
    'connected': Images(Drawn(Connected()), patch=2, examples=1_000),
    'mnist': Images(Prepared('mnist'), patch=4, examples=1_000),
    'fashion_mnist': Images(Prepared('fashion_mnist'), patch=4, examples=1_000),
    'cifar10': Images(Prepared('cifar10_colours'), patch=4, examples=1_000),
    'cifar100': Images(Prepared('cifar100'), patch=4, examples=1_000),
    'imagenette': Images(Prepared('imagenette'), patch=4, examples=1_000),
    'segments': Images(Drawn(Segments()), patch=2, examples=200, dense=True),
    'surfaces': Images(Drawn(Surfaces()), patch=1, examples=200, dense=True, voxels=8),
    'parts': Images(Drawn(Parts()), patch=1, examples=200, dense=True, voxels=8),
}

SIZES = {
    'tiny': Size(steps=1_000, batch_size=32, peak_lr=2e-3, dim=64, depth=2, heads=4),
    'small': Size(
        steps=20_000,
        batch_size=256,
        peak_lr=1e-3,
        dim=256,
        depth=8,
        heads=8,
        window=64,
        resolutions=4,
        activations='bfloat16',
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The layers of a model: its stack, the width and norm around it, and the inputs that go with it."""

    stack: ConfigDict
    dim: int
    norm: ConfigDict = dataclasses.field(default_factory=lambda: spec(RMSNorm))
    stem: ConfigDict = dataclasses.field(default_factory=lambda: spec(PatchMap))
    positions: str = 'learned'
    resolutions: int = 1


SYSTEMS = {
    'activator': (spec(NormedGatedMLP), spec(MLP, activation='gelu_exact')),
    'activator_gates': (spec(NormedGatedMLP),),
}
"""The networks of layers without a mixer, by the value of `system=`."""

STEMS: dict[str, type[nnx.Module]] = {'linear': PatchMap, 'overlap': OverlappingMap, 'conv': ConvStem}
POSITIONS: dict[str, Callable[[], Any]] = {
    'learned': lambda: spec(LearnedPlaces),
    'sinusoidal': GridSinusoids,
    'none': lambda: None,
}
TOKENS = {'mean': None, 'first': 'first', 'middle': 'middle'}
COLORS = {'rgb': 3, 'grey': 1}
GIVEN = {'nothing': 'nothing', 'label': 'label'}
TOLD = {'pixels': False, 'norms': True}
LAYERS: dict[str, type[Stack]] = {'apart': Stack, 'linear': LinearStack}
PICTURES = {'0': False, '1': True}
VOXELS = {'all': False, 'occupied': True}
PREDICTED = {'label': None, 'epsilon': 'epsilon', 'v': 'v'}
AUGMENTATIONS: dict[str, Transform | Mixing] = {
    'crop': Crop(),
    'flip': Flip(),
    'rand': RandAugment(),
    'mixup': Mixup(),
    'cutmix': CutMix(),
}


def get_config(arg: str = '') -> ConfigDict:
    """The config for the arguments named above and `CHOICES`; an empty stem or positions are the layout's own."""
    chosen = arguments(
        arg,
        zoo='',
        system='',
        conv='0',
        data='digits',
        size='tiny',
        layout='flat',
        layers='apart',
        learngene='',
        predict='label',
        given='',
        told='',
        augment='',
        pictures='0',
        colors='',
        side='',
        voxels='',
        stem='',
        positions='',
        token='mean',
        head='linear',
        init='framework',
        norm='',
        **CHOICES,
    )
    images, size = _images(chosen), choose(SIZES, 'size', chosen['size'])
    if chosen['system']:
        row = _system(size, chosen)
    else:
        chosen['zoo'] = chosen['zoo'] or 'mha'
        row = chosen_recipe(chosen['zoo'])
    recipe, initialization = initialized(row, chosen['init'])
    recipe = convolved(recipe, chosen['conv'])
    layout = _normed(_layout(recipe, images, size, chosen, initialization), chosen)
    evaluated = max(1, size.steps // 10)
    evals = (spec(BySlice, cadence=spec(EveryNSteps, n=evaluated), multiples=(1,), examples=images.examples),)
    task = _task(images, recipe.grid, layout, _augmentation(chosen, images), chosen)
    evals = (*evals, *_pictures(images, chosen))
    model = _model(recipe, images, layout, chosen)
    if chosen['predict'] != 'label':
        model, evals = _denoising(model, task, layout, chosen), (*evals, _drawings(images, task))
    return run_config(
        chosen,
        steps=size.steps,
        batch_size=size.batch_size,
        length=images.data.kind.length,
        task=task,
        model=model,
        optimizer=AdamW(
            peak_lr=size.peak_lr,
            schedule=Cosine(warmup=size.warmup),
            weight_decay=size.weight_decay,
            groups=Groups(dynamics=Group(weight_decay=0.0, most=DYNAMICS_LR)),
        ),
        evals=evals,
        save_every=evaluated,
        precision=Precision(activations=size.activations),
        start=spec(FromLearngene, run=chosen['learngene']) if chosen['learngene'] else None,
    )


def _system(size: Size, chosen: dict[str, str]) -> Recipe:
    """The layers of a system. Raises `UserError` for arguments that are of recipes, and what mixes tokens besides."""
    networks = tuple(each.copy_and_resolve_references() for each in choose(SYSTEMS, 'system', chosen['system']))
    check_not_given(chosen, ('zoo', 'norm', 'told'), f'is of recipes; system={chosen["system"]} has layers of its own')
    usual = {'conv': '0', 'layout': 'flat', 'token': 'mean'}
    given = [f'{name}={chosen[name]}' for name, value in usual.items() if chosen[name] != value]
    if given:
        raise UserError(f'system={chosen["system"]} mixes no tokens and has one width; it takes no {", ".join(given)}')
    for network in networks:
        network.hidden = 2 * size.dim
    return Recipe(spec=spec(MixerlessBlock, networks=networks), cite='', packed=True, layer=WholeLayers())


def _images(chosen: dict[str, str]) -> Images:
    name, length = chosen['data'], whole('side', chosen['side']) if chosen['side'] else None
    if name in DATA or not ('/' in name or '.' in name):
        images = choose(DATA, 'data', name)
        check_not_given(chosen, ('colors',), f'is for images of your own; data={name} has its own')
        if images.voxels is not None:
            return _clouds(images, chosen)
        _check_voxels(chosen)
        check_not_given(chosen, ('side',), f'is for images of your own and clouds of points; data={name} has its own')
        return images
    _check_voxels(chosen)
    channels = choose(COLORS, 'colors', chosen['colors'] or 'rgb')
    data = image_folder(name, size=length or 32, channels=channels)
    return Images(data, patch=next(patch for patch in (4, 2, 1) if data.size % patch == 0), examples=1_000)


def _pictures(images: Images, chosen: dict[str, str]) -> tuple[ConfigDict, ...]:
    """What draws pictures at the end, where they are asked for."""
    if not choose(PICTURES, 'pictures', chosen['pictures']):
        return ()
    if chosen['token'] != 'mean':
        raise UserError(f'pictures=1 shows what a token on a grid has seen; it needs token=mean, not {chosen["token"]}')
    segments = images.dense and chosen['predict'] == 'label'
    kinds = (ReceptiveField, SegmentPictures) if segments else (ReceptiveField,)
    return tuple(spec(kind, cadence=spec(AtEnd)) for kind in kinds)


def _check_voxels(chosen: dict[str, str]) -> None:
    check_not_given(chosen, ('voxels',), f'is for clouds of points; data={chosen["data"]} holds images')


def _clouds(images: Images, chosen: dict[str, str]) -> Images:
    """Clouds in the voxels asked for. Raises `UserError` for arguments of images."""
    usual = {'layout': 'flat', 'predict': 'label', 'augment': '', 'stem': '', 'pictures': '0'}
    given = [f'{name}={chosen[name]}' for name, value in usual.items() if chosen[name] != value]
    if given:
        raise UserError(f'data={chosen["data"]} holds clouds of points, not images, and takes no {", ".join(given)}')
    occupied = choose(VOXELS, 'voxels', chosen['voxels'] or 'all')
    return dataclasses.replace(images, voxels=int(chosen['side'] or images.voxels or 0), occupied=occupied)


def _augmentation(chosen: dict[str, str], images: Images) -> Augmentation | None:
    if not chosen['augment']:
        return None
    names = chosen['augment'].split('+')
    parts = [choose(AUGMENTATIONS, 'augment', name) for name in names]
    if len(set(names)) < len(names):
        raise UserError(f'augment={chosen["augment"]} names one change twice; once is enough')
    if images.levels != 256 and any(isinstance(part, RandAugment) for part in parts):
        raise UserError(
            f'augment=rand changes pixels of 256 levels; those of data={chosen["data"]} have {images.levels}: '
            'use crop, flip, mixup or cutmix'
        )
    return Augmentation(
        transforms=tuple(part for part in parts if isinstance(part, Transform)),
        mixing=tuple(part for part in parts if isinstance(part, Mixing)),
    )


def _task(
    images: Images, on_grid: bool, layout: Layout, augmentation: Augmentation | None, chosen: dict[str, str]
) -> ConfigDict:
    predicts = choose(PREDICTED, 'predict', chosen['predict'])
    if predicts is not None:
        given = choose(GIVEN, 'given', chosen['given'] or 'nothing')
        if given == 'label' and images.dense:
            raise UserError(
                f'given=label tells the label of an image; data={chosen["data"]} has a class for every patch and none '
                'for an image: leave it out'
            )
        part = {'patch': images.patch, 'augmentation': augmentation, 'predicts': predicts, 'given': given}
        return spec(Diffusion, data=images.data, **part)
    check_not_given(chosen, ('given',), 'is for predict=epsilon and predict=v, which draw images of a label')
    check_not_given(chosen, ('told',), 'is for predict=epsilon and predict=v, which tell the time')
    if images.voxels is not None:
        kind = PointSegmentation if not images.occupied else SparseSegmentation if on_grid else OccupiedSegmentation
        return spec(kind, data=images.data, side=images.voxels)
    if images.dense:
        patch = images.patch * 2 ** (layout.resolutions - 1)
        return spec(Segmentation, data=images.data, patch=patch, augmentation=augmentation)
    return spec(ImageClassification, data=images.data, augmentation=augmentation)


def _model(recipe: Recipe, images: Images, layout: Layout, chosen: dict[str, str]) -> ConfigDict:
    where = choose(TOKENS, 'token', chosen['token'])
    if where is not None and (recipe.grid or images.dense or layout.resolutions > 1):
        raise UserError(
            f'token={where} adds a token that lies on no grid; zoo={chosen["zoo"]} with data={chosen["data"]} and '
            f'layout={chosen["layout"]} needs token=mean'
        )
    head = choose(CLASSIFIERS, 'head', chosen['head']).made(classes=images.data.kind.classes)
    pool = MeanPool() if where is None else OneToken(class_place(_grid(images), where))
    return spec(
        Model,
        dim=layout.dim,
        stack=layout.stack,
        norm=layout.norm,
        inputs=_inputs(images, recipe.grid, layout, chosen, where),
        head=head,
        pool=pool,
        streaming=False,
    )


def _inputs(images: Images, on_grid: bool, layout: Layout, chosen: dict[str, str], where: str | None) -> ConfigDict:
    """What makes tokens of patches, or of voxels."""
    positions = choose(POSITIONS, 'positions', chosen['positions'] or layout.positions)()
    if images.voxels is not None:
        kind = SomeVoxels if images.occupied and not on_grid else Voxels
        return spec(kind, side=images.voxels, features=FEATURES, positions=positions)
    pixels = side(images.data)
    return spec(
        Patches,
        size=(pixels, pixels),
        channels=images.data.kind.channels,
        patch=images.patch,
        stem=spec(choose(STEMS, 'stem', chosen['stem'])) if chosen['stem'] else layout.stem,
        positions=positions,
        class_token=where,
    )


def _denoising(model: ConfigDict, task: ConfigDict, layout: Layout, chosen: dict[str, str]) -> ConfigDict:
    """The model with what tells the time among its inputs, and a prediction for every patch."""
    if layout.resolutions > 1 or (chosen['token'], chosen['head']) != ('mean', 'linear'):
        raise UserError(
            f'predict={chosen["predict"]} predicts numbers for every patch; it needs layout=flat, token=mean and '
            f'head=linear, not {chosen["layout"]}, {chosen["token"]} and {chosen["head"]}'
        )
    told = build(task).told
    if choose(TOLD, 'told', chosen['told'] or 'pixels'):
        own = {name: value for name, value in model.inputs.items() if name != 'target'}
        model.inputs = spec(ToldPatches, told=told, **own)
        model.stack.blocks = tuple(_told(block, chosen['zoo']) for block in model.stack.blocks)
    else:
        model.inputs.channels = model.inputs.channels + told
    model.head, model.pool = spec(RegressionHead), None
    return model


def _drawings(images: Images, task: ConfigDict) -> ConfigDict:
    """What draws at the end: of images that are given a label as many as there are labels, or more."""
    if task.given == 'nothing':
        return spec(Drawings, cadence=spec(AtEnd))
    return spec(Drawings, cadence=spec(AtEnd), count=max(Drawings.count, images.data.kind.classes))


def _told(block: ConfigDict, name: str) -> ConfigDict:
    """The block with branches that are told. Raises `UserError` for one that wires its own."""
    if block.target != f'{Block.__module__}.{Block.__qualname__}':
        raise UserError(f'told=norms is for blocks of a mixer and a channel mixer; those of zoo={name} have their own')
    return spec(AdaptiveBlock, **{name: value for name, value in block.items() if name != 'target'})


def _grid(images: Images) -> Grid:
    if images.voxels is not None:
        return (images.voxels,) * 3
    return (side(images.data) // images.patch,) * 2


def _layout(recipe: Recipe, images: Images, size: Size, chosen: dict[str, str], initialization: ConfigDict) -> Layout:
    if chosen['layout'] != 'flat' and (chosen['layers'] != 'apart' or chosen['learngene']):
        given = f'layers={chosen["layers"]}' if chosen['layers'] != 'apart' else f'learngene={chosen["learngene"]}'
        raise UserError(f'{given} is of layers of one width; it needs layout=flat, not {chosen["layout"]}')
    if chosen['layers'] == 'linear' and chosen['learngene']:
        raise UserError(f'learngene={chosen["learngene"]} makes layers of a base and a slope; it needs layers=apart')
    layouts = {
        'flat': lambda: _flat(recipe, images, size, chosen, initialization),
        'pyramid': lambda: _pyramid(recipe, images, size, initialization),
        'paper': lambda: _paper(recipe, images, chosen['zoo'], initialization),
    }
    return choose(layouts, 'layout', chosen['layout'])()


def _normed(layout: Layout, chosen: dict[str, str]) -> Layout:
    """The layout with the norm that is chosen. Raises `UserError` where blocks have their own, or the paper one."""
    if not chosen['norm']:
        return layout
    norm = spec(choose({**NORMS, 'evonorm_b0': EvoNormB0}, 'norm', chosen['norm']))
    if norm.target == spec(EvoNormB0).target and chosen['voxels'] == 'occupied':
        raise UserError(
            'voxels=occupied has padding, which norm=evonorm_b0 would count in its variances; choose voxels=all, or '
            'another norm, such as evonorm_s0'
        )
    if chosen['layout'] == 'paper':
        raise UserError(f'norm={chosen["norm"]} is for layout=flat and layout=pyramid; that of a paper has its own')
    stacks = [layout.stack] if layout.resolutions == 1 else [each.stack for each in layout.stack.resolutions]
    set_norm([block for stack in stacks for block in stack.blocks], norm, chosen)
    return layout if norm.target == spec(EvoNormB0).target else dataclasses.replace(layout, norm=norm)


def _flat(recipe: Recipe, images: Images, size: Size, chosen: dict[str, str], initialization: ConfigDict) -> Layout:
    """Layers of one width."""
    if images.occupied and not (recipe.sparse if recipe.grid else recipe.packed):
        lacks = 'a grid, which some of the voxels are not' if recipe.grid else 'no padding among its tokens'
        raise UserError(f'zoo={chosen["zoo"]} needs {lacks}; with voxels=all it is trained on all of them')
    tokens = images.data.kind.length if images.occupied and not recipe.grid else math.prod(_grid(images))
    length = tokens + (chosen['token'] != 'mean')
    mixers = _mixers(recipe, size.heads, size.window, length)
    kind = choose(LAYERS, 'layers', chosen['layers'])
    if recipe.by_layer and kind is not Stack:
        raise UserError(
            f'init=paper of zoo={chosen["zoo"]} makes layers by their place ({", ".join(recipe.by_layer)}); it needs '
            f'layers=apart, not {chosen["layers"]}'
        )
    stack = stack_spec(
        mixers,
        kind=kind,
        layer=recipe.layer,
        depth=size.depth,
        mlp=spec(GatedMLP),
        initialization=initialization,
        by_layer=recipe.by_layer,
    )
    own = {'norm': spec(LayerNorm), 'positions': 'none'} if chosen['system'] else {}
    return Layout(stack=stack, dim=size.dim, **own)


def _pyramid(recipe: Recipe, images: Images, size: Size, initialization: ConfigDict) -> Layout:
    """Resolutions of twice the width each, with equal parts of the depth; what a paper has by stage is of its last."""
    count, paper = size.resolutions, recipe.hierarchy
    arguments = paper.arguments[-count:] if paper and paper.arguments else ({},) * count
    merge = paper.merge if paper else spec(PatchMerging)
    depth = max(recipe.layer.period(recipe.pattern), size.depth // count)
    made = []
    for index in range(count):
        heads, length = max(1, size.heads >> count - 1 - index), _tokens(images, index)
        stack = stack_spec(
            _mixers(recipe, heads, size.window, length, **arguments[index]),
            layer=recipe.layer,
            depth=depth,
            mlp=spec(GatedMLP),
            initialization=initialization,
            by_layer=recipe.by_layer,
            below=index * depth,
            layers=count * depth,
        )
        made.append(spec(Resolution, width=2**index, stack=stack, merge=merge if index else None))
    return Layout(stack=_stacked(made), dim=size.dim >> count - 1, resolutions=count)


def _paper(recipe: Recipe, images: Images, name: str, initialization: ConfigDict) -> Layout:
    """The stages of the recipe's paper."""
    paper = recipe.hierarchy
    if paper is None:
        having = ', '.join(each for each, other in ZOO.items() if other.hierarchy)
        raise UserError(
            f'layout=paper is for recipes whose paper has a hierarchical model, {having}; zoo={name} has none'
        )
    assert isinstance(recipe.layer, MixerAndMLP)
    made = []
    for index, (width, heads) in enumerate(zip(paper.widths, paper.heads, strict=True)):
        arguments = paper.arguments[index] if paper.arguments else {}
        mixers = _mixers(recipe, heads, None, _tokens(images, index), **arguments)
        stack = stack_spec(
            mixers,
            layer=dataclasses.replace(recipe.layer, norm=paper.norm),
            depth=paper.depths[index],
            mlp=spec(MLP, hidden=paper.mlp[index] * width * paper.dim, activation='gelu_exact'),
            initialization=initialization,
        )
        here = {'merge': paper.merge} if index else {}
        if paper.positions and index:
            here['positions'] = spec(LearnedPlaces, grid=tuple(size >> index for size in _grid(images)))
        made.append(spec(Resolution, width=width, stack=stack, **here))
    return Layout(
        stack=_stacked(made),
        dim=paper.dim,
        norm=paper.norm,
        stem=paper.stem,
        positions='learned' if paper.positions else 'none',
        resolutions=len(made),
    )


def _stacked(resolutions: list[ConfigDict]) -> ConfigDict:
    return spec(Pyramid, resolutions=tuple(resolutions))


def _mixers(recipe: Recipe, heads: int, window: int | None, length: int, **arguments: Any) -> tuple[ConfigDict, ...]:
    """The recipe's mixers, bidirectional where they have that form, with these arguments."""
    mixers = recipe.sized(heads=heads, window=window, length=length, causal=not recipe.bidirectional)
    for mixer in mixers:
        # Convolutions between them (conv=1) take none of what a paper has by stage.
        if arguments.keys() <= takes(mixer):
            mixer.update(arguments)
    return mixers


def _tokens(images: Images, index: int) -> int:
    """Tokens of a resolution: each halves the sides of that before, rounded up."""
    return math.prod(-(-size // 2**index) for size in _grid(images))
