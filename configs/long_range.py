"""The Long Range Arena and other long sequences with one label, with any mixer of the zoo.

    attnlab train --config=long_range:task=listops,zoo=mamba,size=smoke --workdir=runs/listops-mamba

`task` is one of those of the size, `zoo` a recipe (`attnlab zoo` lists them). `size=smoke` takes minutes on 2 CPU cores
and needs no preparation: short expressions, small images, and the data available offline, `digits` (extra
`offline`) and `authorship`. `size=full` has lengths, widths, depths and training as published for S4 (Gu et al. 2023,
https://arxiv.org/abs/2206.12037); its data are prepared once by `attnlab data prepare NAME`.

`protocol` is `scratch`, or `pretrain`, to predict the inputs themselves, and then `finetune`, from the parameters of
the run that was pretrained, `run=` (Amos et al. 2024, https://arxiv.org/abs/2310.02980); `config.start` says
which parameters are copied:

    attnlab train --config=long_range:task=imdb,protocol=pretrain --workdir=runs/first
    attnlab train --config=long_range:task=imdb,protocol=finetune,run=runs/first --workdir=runs/then

Recipes with a bidirectional form are trained in it, and pretrained to predict hidden positions; others read from left
to right and are pretrained to predict the next one. Those whose bidirectional form cannot tell left from
right (`mirrored` in the zoo) are given sinusoidal positions at their inputs, as the arena's own transformers are (Tay
et al. 2021, https://arxiv.org/abs/2011.04006); `--config.model.positions=None` removes them. The head reads the
mean over time of a document, for every mixer; `head` is one of those of classes that `attnlab zoo --heads` lists, or
one of real numbers where these are predicted in pretraining.
`conv`, `optimizer` and `schedule` choose others, as in `configs/language.py`.
"""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from attnlab.config import arguments, choose, spec, takes
from attnlab.data.long_range.authorship import Authorship
from attnlab.data.long_range.dataset import Dataset
from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.long_range.listops import ListOps
from attnlab.data.long_range.pathfinder import Pathfinder
from attnlab.data.long_range.prepared import Prepared
from attnlab.errors import UserError
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import EveryNSteps
from attnlab.models.heads.language import LanguageHead
from attnlab.models.heads.pairs import PairHead
from attnlab.models.heads.registry import CLASSIFIERS, REGRESSORS
from attnlab.models.inputs.embedding import Embedding, Projection
from attnlab.models.model import Model
from attnlab.models.stack import stack_spec
from attnlab.nn.mlps import GatedMLP
from attnlab.nn.pools import MeanPool
from attnlab.nn.positions import Sinusoidal
from attnlab.tasks.long_range import Classification, Denoising
from attnlab.train.optimizer import AdamW, Group, Groups
from attnlab.train.run_config import CHOICES, run_config
from attnlab.train.schedule import Cosine
from attnlab.train.start import FromRun
from attnlab.train.step import Precision
from attnlab.zoo import Recipe
from attnlab.zoo.chosen import convolved, sequence_recipe


@dataclasses.dataclass(frozen=True)
class Setting:
    """Data, the model for them, and how it is trained.

    `window` is for the mixers that have one; `hidden` is the fraction of positions that are hidden in pretraining.
    """

    data: Dataset
    length: int
    steps: int
    batch_size: int
    peak_lr: float
    dim: int
    depth: int
    heads: int
    weight_decay: float = 0.05
    dropout: float = 0.0
    warmup: float = 0.02
    window: int = 128
    examples: int = 20_000
    hidden: float = 0.5
    activations: str = 'bfloat16'


DYNAMICS_LR = 1e-3
"""The maximum learning rate of the time scales of a recurrence, which have no weight decay."""

EMBEDDING = 0.5
"""Standard deviation of token vectors; see `configs/recall.py`."""

SMOKE = {
    'listops': Setting(
        Drawn(ListOps(shortest=40, longest=200, max_depth=5, max_arguments=5), train=20_000, held_out=1_000),
        length=200, steps=1_000, batch_size=32, peak_lr=2e-3, dim=64, depth=3, heads=4, warmup=0.1, window=32,
        examples=1_000, activations='float32', hidden=0.1,
    ),
    'pathfinder': Setting(
        Drawn(Pathfinder(size=16, contour=5, seed_distance=3, distractors=2, distractor_contour=2), train=20_000),
        length=256, steps=1_000, batch_size=32, peak_lr=2e-3, dim=64, depth=3, heads=4, warmup=0.1, window=32,
        examples=1_000, activations='float32',
    ),
    'digits': Setting(
        Digits(), length=64, steps=1_000, batch_size=32, peak_lr=3e-3, dim=64, depth=2, heads=4, warmup=0.1, window=16,
        examples=180, activations='float32',
    ),
    'authorship': Setting(
        Authorship(span=256), length=256, steps=600, batch_size=32, peak_lr=3e-3, dim=64, depth=2, heads=4, warmup=0.1,
        window=32, examples=1_000, activations='float32', hidden=0.15,
    ),
}  # fmt: skip

FULL = {
    # 40, 32, 20, 200, 200 and 50 epochs.
    'listops': Setting(
        Prepared('listops'), length=2_000, steps=76_800, batch_size=50, peak_lr=1e-2, dim=128, depth=8, heads=4,
        hidden=0.1,
    ),
    'imdb': Setting(
        Prepared('imdb'), length=4_096, steps=50_000, batch_size=16, peak_lr=1e-2, dim=256, depth=6, heads=4,
        hidden=0.15,
    ),
    'aan': Setting(
        Prepared('aan'), length=8_000, steps=46_000, batch_size=64, peak_lr=1e-2, dim=256, depth=6, heads=4, hidden=0.15
    ),
    'cifar10': Setting(
        Prepared('cifar10'), length=1_024, steps=180_000, batch_size=50, peak_lr=1e-2, dim=512, depth=6, heads=8,
        dropout=0.1,
    ),
    'pathfinder': Setting(
        Prepared('pathfinder'), length=1_024, steps=500_000, batch_size=64, peak_lr=4e-3, dim=256, depth=6, heads=4,
        weight_decay=0.03,
    ),
    'pathfinder128': Setting(
        Prepared('pathfinder128'), length=16_384, steps=500_000, batch_size=16, peak_lr=5e-4, dim=256, depth=6, heads=4
    ),
    # As S4D trains it: Gu et al. 2022, https://arxiv.org/abs/2206.11893.
    'speech_commands': Setting(
        Prepared('speech_commands'), length=16_000, steps=212_000, batch_size=16, peak_lr=1e-2, dim=128, depth=6,
        heads=4,
    ),
}  # fmt: skip

SIZES = {'smoke': SMOKE, 'full': FULL}
DEFAULT = 'linear'
"""The head of labels."""


def get_config(arg: str = '') -> ConfigDict:
    """The config of `task=...,zoo=...,size=...,protocol=...,run=...,conv=...,head=...` and `CHOICES`."""
    chosen = arguments(
        arg, task='listops', zoo='mha', size='full', protocol='scratch', run='', conv='0', head=DEFAULT, **CHOICES
    )
    if (chosen['protocol'] == 'finetune') != bool(chosen['run']):
        raise UserError(
            'protocol=finetune needs run=WORKDIR, that of a run with protocol=pretrain; other protocols take no run'
        )
    protocol = choose(PROTOCOLS, 'protocol', chosen['protocol'])
    run = choose(choose(SIZES, 'size', chosen['size']), 'task', chosen['task'])
    recipe = convolved(sequence_recipe(chosen['zoo']), chosen['conv'])
    evaluated = max(1, run.steps // 10)
    return run_config(
        chosen,
        steps=run.steps,
        batch_size=run.batch_size,
        length=run.length,
        **protocol(recipe, run, chosen['head']),
        optimizer=AdamW(
            peak_lr=run.peak_lr,
            schedule=Cosine(warmup=run.warmup),
            weight_decay=run.weight_decay,
            groups=Groups(dynamics=Group(lr=min(1.0, DYNAMICS_LR / run.peak_lr), weight_decay=0.0)),
        ),
        evals=(spec(BySlice, cadence=spec(EveryNSteps, n=evaluated), multiples=(1,), examples=run.examples),),
        save_every=evaluated,
        precision=Precision(activations=run.activations),
        start=spec(FromRun, run=chosen['run']) if chosen['run'] else None,
    )


def _classification(recipe: Recipe, run: Setting, head: str) -> dict[str, ConfigDict]:
    """Classification, with a head for labels."""
    kind = run.data.kind
    made = spec(PairHead) if kind.documents > 1 else _chosen(head)
    if kind.documents > 1 and head != DEFAULT:
        raise UserError(f'head={head} is for one document; this task has {kind.documents}, and a head of its own')
    made.classes = kind.classes
    model = spec(Model, head=made, pool=MeanPool(), streaming=False, **_trunk(recipe, run))
    return {'task': spec(Classification, data=run.data), 'model': model}


def _chosen(head: str) -> ConfigDict:
    return choose(CLASSIFIERS, 'head', head).spec.copy_and_resolve_references()


def _denoising(recipe: Recipe, run: Setting, head: str) -> dict[str, ConfigDict]:
    """Prediction of the inputs: hidden ones with a bidirectional mixer, otherwise the next one."""
    if head != DEFAULT and run.data.kind.vocab is not None:
        raise UserError(f'head={head} is not for protocol=pretrain of tokens, which has a head of its own')
    task = spec(Denoising, data=run.data, hidden=run.hidden if recipe.bidirectional else None)
    if run.data.kind.vocab is None:
        name = 'absolute_error' if head == DEFAULT else head
        made = choose(REGRESSORS, 'head', name).spec.copy_and_resolve_references()
    else:
        made = spec(LanguageHead)
    return {'task': task, 'model': spec(Model, head=made, streaming=not recipe.bidirectional, **_trunk(recipe, run))}


PROTOCOLS = {'scratch': _classification, 'pretrain': _denoising, 'finetune': _classification}


def _trunk(recipe: Recipe, run: Setting) -> dict[str, Any]:
    real = run.data.kind.vocab is None
    inputs = spec(Projection, features=1) if real else spec(Embedding, scale=EMBEDDING)
    trunk = {'dim': run.dim, 'stack': _stack(recipe, run), 'inputs': inputs}
    return {**trunk, 'positions': Sinusoidal()} if recipe.mirrored else trunk


def _stack(recipe: Recipe, run: Setting) -> ConfigDict:
    """The recipe's mixers in the one block, in their bidirectional form where they have one."""
    mixers = recipe.sized(heads=run.heads, window=run.window, length=run.length)
    for mixer in mixers if recipe.bidirectional else ():
        if 'causal' in takes(mixer):
            mixer.causal = False
    stack = stack_spec(mixers, layer=recipe.layer, depth=run.depth, mlp=spec(GatedMLP))
    for block in stack.blocks:
        if 'dropout' in block:
            block.dropout = run.dropout
    return stack
