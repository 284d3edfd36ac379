"""Language modelling with any mixer of the zoo, at any size, on any text.

    attnlab train --config=language:zoo=gla,size=tiny,data=stdlib --workdir=runs/gla

- `zoo`: a recipe (`attnlab zoo` lists them);
- `size`: one of `SIZES`;
- `data`: `stdlib`, the name of a prepared dataset (`tiny_shakespeare`, `lm1b`, `pg19`, `wiki40b/en` or another
  language), or the path of a text file or of a folder of them;
- `tokens`: `bytes` or `bpe`;
- `residual`: one of `RESIDUALS`;
- `conv`: short convolutions: `0`, those of the recipe; `none`; `1`, layers alternate between a gated short convolution
  and the recipe; `canon` or some of its points (`attnlab.zoo.chosen.convolved`);
- `head`: one of those that `attnlab zoo --heads` lists;
- `norm`: one of `NORMS`, for the blocks and the final norm;
- `mlp`: one of `MLPS`; `activation`: the name of another nonlinearity for it (`attnlab.nn.activations`);
- `init`: `framework`, or `paper`, the initialisation of the recipe's paper, including what it varies with depth;
- `rounding`: quantization during training (`attnlab.quantize.training`), such as `learned4`, `int4+affine8` (weights
  and inputs) or `quartet`;
- `alignment`: the weight of a penalty on how far layers turn the residual stream (`attnlab.blocks.alignment`);
- `run`: a run whose parameters training starts from, such as `run=runs/gla`;
- `optimizer`: `adamw`, `lion` or `muon`;
- `schedule`: `cosine`, `wsd`, `linear`, `constant` or `staircase`.

For example:

    attnlab train --config=language:zoo=gla,optimizer=lion,schedule=wsd --workdir=runs/gla-lion

Time scales have the same learning rate as all other parameters, as for Mamba, GLA and RG-LRU in language modelling;
`--config.optimizer.groups.dynamics.lr=0.1` gives them a tenth of it, as S4 and S5 do (decision 313).

Claim: with no arguments, on 2 CPU cores and within five minutes, the validation loss falls below 2.74 bits per byte,
that of an interpolated trigram model of the same text (`docs/benchmarks.md`).
"""

import dataclasses
import math
import pathlib

from ml_collections import ConfigDict

from attnlab.blocks.alignment import Alignment
from attnlab.blocks.hyper_connections import HyperConnections
from attnlab.blocks.residual import Plain
from attnlab.config import arguments, check_not_given, choose, spec, spec_of
from attnlab.data.text.stdlib import StdlibText
from attnlab.data.text.text import TextFiles
from attnlab.data.text.tfds import DATASETS, TfdsText
from attnlab.data.text.tokenizers import BytePairs, Bytes
from attnlab.errors import UserError, nearest
from attnlab.evals.cadence import EveryNSteps
from attnlab.evals.experts import ExpertLoads
from attnlab.evals.held_out import HeldOut
from attnlab.models.heads.registry import HEADS
from attnlab.models.model import Model
from attnlab.models.stack import stack_spec
from attnlab.nn.activations import ACTIVATIONS, LEARNED
from attnlab.nn.experts import (
    HierarchicalGate,
    LaplaceGate,
    MixtureOfExperts,
    NoisyGate,
    SigmoidGate,
    SmallTemperatureGate,
    TemperedGate,
)
from attnlab.nn.mlps import MLP, GatedMLP, NormedGatedMLP
from attnlab.nn.norms import NORMS
from attnlab.run_config import CHOICES, run_config
from attnlab.tasks.language import LanguageModelling, RunningText
from attnlab.train.optimizer import AdamW
from attnlab.train.schedule import Cosine
from attnlab.train.start import FromRun
from attnlab.train.step import Precision
from attnlab.zoo.chosen import convolved, initialized, next_token_recipe, set_norm


@dataclasses.dataclass(frozen=True)
class Size:
    """A model size and its training, which fits on one device of 80 GB; `window` is for mixers that have one."""

    dim: int
    depth: int
    heads: int
    window: int
    length: int
    batch_size: int
    steps: int
    peak_lr: float
    activations: str = 'bfloat16'
    rows_at_once: int | None = None
    remat: bool = False


SIZES = {
    'tiny': Size(128, 4, 4, 64, 256, 16, 600, 3e-3, 'float32'),
    '10m': Size(384, 6, 6, 256, 1024, 32, 10_000, 2e-3),
    '125m': Size(768, 12, 12, 1024, 2048, 256, 20_000, 6e-4, rows_at_once=16),
    '350m': Size(1024, 24, 16, 1024, 2048, 256, 50_000, 3e-4, rows_at_once=16, remat=True),
    '1b': Size(2048, 24, 16, 2048, 4096, 256, 100_000, 2e-4, rows_at_once=4, remat=True),
}
TOKENS = {'bytes': Bytes, 'bpe': BytePairs}
RESIDUALS = {
    'plain': spec(Plain),
    'hyper_connections': spec(HyperConnections),
    'static_hyper_connections': spec(HyperConnections, dynamic=False),
}

MLPS = {
    'swiglu': spec(GatedMLP),
    'geglu': spec(GatedMLP, activation='gelu'),
    'reglu': spec(GatedMLP, activation='relu'),
    'glu': spec(GatedMLP, activation='sigmoid'),
    'bilinear': spec(GatedMLP, activation='identity'),
    'plain': spec(MLP),
    'activator': spec(NormedGatedMLP),
    'moe': spec(MixtureOfExperts),
    'moe_sigmoid': spec(MixtureOfExperts, gate=SigmoidGate()),
    'moe_laplace': spec(MixtureOfExperts, gate=LaplaceGate()),
    'moe_hierarchical': spec(MixtureOfExperts, gate=HierarchicalGate()),
    'moe_noisy': spec(MixtureOfExperts, gate=NoisyGate()),
    'moe_small_temperature': spec(MixtureOfExperts, gate=SmallTemperatureGate()),
    'moe_tempered': spec(MixtureOfExperts, gate=TemperedGate()),
}


def get_config(arg: str = '') -> ConfigDict:
    """The config for `zoo=...,size=...` and the other arguments named above."""
    chosen = arguments(
        arg,
        zoo='mha',
        size='tiny',
        data='stdlib',
        tokens='bytes',
        residual='plain',
        conv='0',
        head='softmax',
        norm='',
        mlp='',
        activation='',
        init='framework',
        alignment='0',
        run='',
        **CHOICES,
    )
    recipe, initialization = initialized(next_token_recipe(chosen['zoo']), chosen['init'])
    recipe = convolved(recipe, chosen['conv'])
    size = choose(SIZES, 'size', chosen['size'])
    stack = stack_spec(
        recipe.sized(heads=size.heads, window=size.window),
        layer=recipe.layer,
        depth=size.depth,
        mlp=_mlp(chosen),
        residual=choose(RESIDUALS, 'residual', chosen['residual']),
        initialization=initialization,
        by_layer=recipe.by_layer,
    )
    stack.remat = size.remat
    if (weight := _number('alignment', chosen['alignment'])) > 0:
        stack.alignment = spec_of(Alignment(weight))
    _check_blocks(stack, chosen)
    if chosen['norm']:
        set_norm(stack.blocks, _norm(chosen), chosen)
    head = choose(HEADS, 'head', chosen['head']).made()
    evaluated = max(1, size.steps // 10)
    return run_config(
        chosen,
        steps=size.steps,
        batch_size=size.batch_size,
        length=size.length,
        task=spec(
            LanguageModelling if recipe.packed else RunningText,
            text=_text(chosen['data']),
            tokenizer=spec(choose(TOKENS, 'tokens', chosen['tokens'])),
        ),
        model=spec(Model, dim=size.dim, stack=stack, norm=_norm(chosen), head=head),
        optimizer=AdamW(peak_lr=size.peak_lr, schedule=Cosine(warmup=0.05)),
        evals=_evals(stack, evaluated),
        save_every=evaluated,
        rows_at_once=size.rows_at_once,
        precision=Precision(activations=size.activations),
        start=spec(FromRun, run=chosen['run'], leave=()) if chosen['run'] else None,
    )


def _evals(stack: ConfigDict, every: int) -> tuple[ConfigDict, ...]:
    """The held-out loss and, for a model with experts, where tokens are sent."""
    held_out = spec(HeldOut, cadence=spec(EveryNSteps, n=every), tokens=65_536)
    experts = spec(MixtureOfExperts).target
    if not any('mlp' in block and block.mlp is not None and block.mlp.target == experts for block in stack.blocks):
        return (held_out,)
    return held_out, spec(ExpertLoads, cadence=spec(EveryNSteps, n=every))


def _number(name: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise UserError(f'{name} is {text!r}; it must be a number of at least 0')
    return found


def _norm(chosen: dict[str, str]) -> ConfigDict:
    return spec(choose(NORMS, 'norm', chosen['norm'] or 'rmsnorm'))


def _mlp(chosen: dict[str, str]) -> ConfigDict:
    """The channel mixer, with another nonlinearity if one is chosen."""
    mlp = choose(MLPS, 'mlp', chosen['mlp'] or 'swiglu').copy_and_resolve_references()
    if chosen['activation']:
        choose({**ACTIVATIONS, **LEARNED}, 'activation', chosen['activation'])
        mlp.activation = chosen['activation']
    return mlp


def _check_blocks(stack: ConfigDict, chosen: dict[str, str]) -> None:
    """Raises `UserError` for a channel mixer that blocks of this recipe have no place for."""
    if not any('mlp' in block and block.mlp is not None for block in stack.blocks):
        check_not_given(
            chosen, ('mlp', 'activation'), f'is for blocks with an MLP; those of zoo={chosen["zoo"]} have none'
        )


def _text(data: str) -> ConfigDict:
    if data == 'stdlib':
        return spec(StdlibText)
    if data in DATASETS or (data.split('/')[0] in DATASETS and not pathlib.Path(data).exists()):
        return spec(TfdsText, name=data)
    if '/' in data or '.' in data:
        return spec(TextFiles, path=data)
    raise UserError(
        f'there is no data {data!r}{nearest(data, ["stdlib", *DATASETS])}; a path must have a / or a . in it'
    )
