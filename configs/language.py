"""Language modelling with any mixer of the zoo, at any size, on any text.

    attnlab train --config=language:zoo=gla,size=tiny,data=stdlib --workdir=runs/gla

`zoo` is a recipe (`attnlab zoo` lists them), `size` one of SIZES, `data` is `stdlib`, the name of a prepared dataset
(`tiny_shakespeare`, `lm1b`, `pg19`), or the path of a text file or a folder of them; `tokens` is `bytes` or `bpe`.
`residual` is one of RESIDUALS, `head` one of what `attnlab zoo --heads` lists, `init` is `framework` or `paper`, the
initial values of the recipe's paper, `optimizer` is `adamw`, `lion` or `muon`, `schedule` is `cosine`, `wsd`, `linear`
or `constant`:

    attnlab train --config=language:zoo=gla,optimizer=lion,schedule=wsd --workdir=runs/gla-lion

Claim: with no arguments, 2 CPU cores and five minutes, validation loss falls below 2.74 bits per byte, that of an
interpolated trigram model of the same text (`docs/benchmarks.md`).
"""

import dataclasses

from ml_collections import ConfigDict

from attnlab.blocks.hyper_connections import HyperConnections
from attnlab.blocks.residual import Plain
from attnlab.config import arguments, choose, spec
from attnlab.data.text.stdlib import StdlibText
from attnlab.data.text.text import TextFiles
from attnlab.data.text.tfds import DATASETS, TfdsText
from attnlab.data.text.tokenizers import BytePairs, Bytes
from attnlab.errors import UserError, nearest
from attnlab.evals.cadence import EveryNSteps
from attnlab.evals.held_out import HeldOut
from attnlab.models.heads.registry import HEADS
from attnlab.models.model import Model
from attnlab.models.stack import stack_spec
from attnlab.nn.mlps import GatedMLP
from attnlab.tasks.language import LanguageModelling, RunningText
from attnlab.train.optimizer import AdamW
from attnlab.train.run_config import CHOICES, run_config
from attnlab.train.schedule import Cosine
from attnlab.train.step import Precision
from attnlab.zoo.chosen import chosen_recipe, initialized


@dataclasses.dataclass(frozen=True)
class Size:
    """A model size and its run, fitting one device of 80 GB; `window` is for mixers that have one."""

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


def get_config(arg: str = '') -> ConfigDict:
    """The config of `zoo=...,size=...,data=...,tokens=...,residual=...,head=...,init=...` and `CHOICES`."""
    chosen = arguments(
        arg,
        zoo='mha',
        size='tiny',
        data='stdlib',
        tokens='bytes',
        residual='plain',
        head='softmax',
        init='framework',
        **CHOICES,
    )
    recipe, initialization = initialized(chosen_recipe(chosen['zoo']), chosen['init'])
    size = choose(SIZES, 'size', chosen['size'])
    stack = stack_spec(
        recipe.sized(heads=size.heads, window=size.window),
        layer=recipe.layer,
        depth=size.depth,
        mlp=spec(GatedMLP),
        residual=choose(RESIDUALS, 'residual', chosen['residual']),
        initialization=initialization,
    )
    stack.remat = size.remat
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
        model=spec(Model, dim=size.dim, stack=stack, head=choose(HEADS, 'head', chosen['head']).spec),
        optimizer=AdamW(peak_lr=size.peak_lr, schedule=Cosine(warmup=0.05)),
        evals=(spec(HeldOut, cadence=spec(EveryNSteps, n=evaluated), tokens=65_536),),
        save_every=evaluated,
        rows_at_once=size.rows_at_once,
        precision=Precision(activations=size.activations),
    )


def _text(data: str) -> ConfigDict:
    if data == 'stdlib':
        return spec(StdlibText)
    if data in DATASETS:
        return spec(TfdsText, name=data)
    if '/' in data or '.' in data:
        return spec(TextFiles, path=data)
    raise UserError(
        f'there is no data {data!r}{nearest(data, ["stdlib", *DATASETS])}; a path must have a / or a . in it'
    )
