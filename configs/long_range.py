"""The Long Range Arena and other long sequences with one label each, with any mixer of the zoo.

    attnlab train --config=long_range:task=listops,zoo=mamba,size=smoke --workdir=runs/listops-mamba

- `task`: one of those of the size;
- `zoo`: a recipe (`attnlab zoo` lists them);
- `size=smoke`: minutes on 2 CPU cores, without preparation: short expressions, small images, and the data that are
  available offline, `digits` (extra `offline`) and `authorship`;
- `size=full`: the widths, depths and training of the recipe's own paper where `PUBLISHED` has them (s4, s4d, s5, lru,
  hgrn, mega, seqboat, mha); for other recipes those of S4, with a channel mixer in every layer. Its data are prepared
  once by `attnlab data prepare NAME`. Norms are the same for all recipes (root mean square, before the mixer), the
  schedule ends at a tenth of its peak unless it is linear, and clipping, betas and the weight decay of norms and biases
  are attnlab's;
- `protocol`: `scratch`; or `pretrain`, to predict the inputs themselves, followed by `finetune` from the pretrained
  run, `run=` (Amos et al. 2024, https://arxiv.org/abs/2310.02980). `config.start` says which parameters are copied:

      attnlab train --config=long_range:task=imdb,protocol=pretrain --workdir=runs/first
      attnlab train --config=long_range:task=imdb,protocol=finetune,run=runs/first --workdir=runs/then

- `head`: one of the classification heads that `attnlab zoo --heads` lists, or one for real numbers where pretraining
  predicts these. For every mixer it reads the mean over the tokens of a document;
- `fast`: another recipe, which reads windows of `rate` tokens, while `zoo` reads a summary of each
  (`fast=s4,zoo=mamba`, HiSS; Bhirangi et al. 2024, https://arxiv.org/abs/2402.10211). Positions are given where either
  needs them;
- `conv`, `optimizer`, `schedule` and `rounding` are as in `configs/language.py`.

Recipes with a bidirectional form are trained in it, and pretrained to predict hidden positions. The others read from
left to right and are pretrained to predict the next position, unless `zoo=bi_NAME` reads them both ways
(`zoo=bi_mamba`), with the published settings of NAME. The published scores of MEGA and SeqBoat are those of
bidirectional models, whose attention reads both ways and which have two moving averages; `zoo=mega` and `zoo=seqboat`
are causal, and `zoo=bi_mega` and `zoo=bi_seqboat` come closest: two whole mixers per layer, with twice the parameters.

Recipes whose bidirectional form cannot tell left from right (`mirrored` in the zoo) get sinusoidal positions at their
inputs, as the arena's own transformers do (Tay et al. 2021, https://arxiv.org/abs/2011.04006);
`--config.model.positions=None` removes them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from ml_collections import ConfigDict

from attnlab.config import arguments, check_not_given, choose, set_value, spec, takes, whole
from attnlab.data.long_range.authorship import Authorship
from attnlab.data.long_range.dataset import Dataset
from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.long_range.listops import ListOps
from attnlab.data.long_range.pathfinder import Pathfinder
from attnlab.data.long_range.prepared import Prepared
from attnlab.errors import UserError
from attnlab.evals.by_slice import WHOLE, BySlice
from attnlab.evals.cadence import EveryNSteps
from attnlab.mixers.combine import within
from attnlab.models.heads.language import LanguageHead
from attnlab.models.heads.pairs import PairHead
from attnlab.models.heads.registry import CLASSIFIERS, REGRESSORS
from attnlab.models.inputs.embedding import Embedding, Projection
from attnlab.models.model import Model
from attnlab.models.stack import stack_spec
from attnlab.models.two_rates import TwoRates
from attnlab.nn.mlps import MLP, GatedMLP
from attnlab.nn.pools import MeanPool
from attnlab.nn.positions import Sinusoidal
from attnlab.run_config import CHOICES, DYNAMICS_LR, EMBEDDING, run_config
from attnlab.tasks.long_range import Classification, Denoising
from attnlab.train.optimizer import AdamW, Group, Groups, Override
from attnlab.train.schedule import Cosine, LinearDecay, Schedule
from attnlab.train.start import FromRun
from attnlab.train.step import Precision
from attnlab.zoo import Recipe
from attnlab.zoo.chosen import BOTH, padded_sequence_recipe


@dataclasses.dataclass(frozen=True)
class Setting:
    """The data, the model for them, and its training.

    `window` is for mixers that have one; `hidden` is the fraction of positions hidden in pretraining. The learning rate
    of time scales is `dynamics_lr`, but at most that of other parameters, and with `None` the same; `overrides` replace
    the settings of a group for single parameters. `sizes` are arguments for the mixers that take them, by keys such as
    `system.low`; `mlp` returns the spec of the channel mixer, or `None`.
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
    examples: int = WHOLE
    hidden: float = 0.5
    activations: str = 'bfloat16'
    dynamics_lr: float | None = DYNAMICS_LR
    overrides: tuple[Override, ...] = ()
    schedule: type[Schedule] = Cosine
    sizes: Mapping[str, Any] = MappingProxyType({})
    mlp: Callable[[], ConfigDict | None] = partial(spec, GatedMLP)


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
    # As S4 is trained: Gu et al. 2023, https://arxiv.org/abs/2206.12037; 40, 32, 20, 200, 200 and 50 epochs. Warm-ups
    # are those of its released configs (`v3`): an epoch of images and pairs of documents, elsewhere 1,000 steps, their
    # default. For Path-X these have 1e-3 after five epochs, and the paper, followed here, 5e-4 after one. Later configs
    # warm up over a tenth of the run, and have other sizes for tokens.
    'listops': Setting(
        Prepared('listops'), length=2_000, steps=76_800, batch_size=50, peak_lr=1e-2, dim=128, depth=8, heads=4,
        warmup=1_000.0, hidden=0.1,
    ),
    'imdb': Setting(
        Prepared('imdb'), length=4_096, steps=50_000, batch_size=16, peak_lr=1e-2, dim=256, depth=6, heads=4,
        warmup=1_000.0, hidden=0.15,
    ),
    'aan': Setting(
        Prepared('aan'), length=8_000, steps=46_000, batch_size=64, peak_lr=1e-2, dim=256, depth=6, heads=4,
        warmup=2_500.0, hidden=0.15,
    ),
    'cifar10': Setting(
        Prepared('cifar10'), length=1_024, steps=180_000, batch_size=50, peak_lr=1e-2, dim=512, depth=6, heads=8,
        warmup=900.0, dropout=0.1,
    ),
    'pathfinder': Setting(
        Prepared('pathfinder'), length=1_024, steps=500_000, batch_size=64, peak_lr=4e-3, dim=256, depth=6, heads=4,
        warmup=2_500.0, weight_decay=0.03,
    ),
    'pathfinder128': Setting(
        Prepared('pathfinder128'), length=16_384, steps=500_000, batch_size=16, peak_lr=5e-4, dim=256, depth=6, heads=4,
        warmup=10_000.0,
    ),
    # As S4D trains it: Gu et al. 2022, https://arxiv.org/abs/2206.11893.
    'speech_commands': Setting(
        Prepared('speech_commands'), length=16_000, steps=212_000, batch_size=16, peak_lr=1e-2, dim=128, depth=6,
        heads=4, warmup=1_000.0,
    ),
}  # fmt: skip

ALONE: Mapping[str, Any] = MappingProxyType({'mlp': lambda: None})
"""Layers without a channel mixer."""


def _plain(hidden: int, activation: str) -> dict[str, Any]:
    """A channel mixer of one hidden layer."""
    return {'mlp': partial(spec, MLP, hidden=hidden, activation=activation)}


READS_DECAY = (Override('*/system/C*'), Override('*/D'))
"""The output maps of systems, and the skip connections around them, have the weight decay of matrices."""
STEPS_AT_PEAK = (*READS_DECAY, Override('*/log_step', weight_decay=0.0))
"""As `READS_DECAY`; step sizes have the learning rate of other parameters, other time scales `dynamics_lr`."""


def _s4(overrides: tuple[Override, ...] = READS_DECAY, **system: Any) -> dict[str, Any]:
    sizes = {f'system.{name}': value for name, value in system.items()}
    return {'sizes': sizes, 'overrides': overrides, **ALONE}


def _s5(
    state: int,
    blocks: int,
    overrides: tuple[Override, ...] = READS_DECAY,
    *,
    multiplied: str = 'activated',
    greatest: float | None = None,
    **system: Any,
) -> dict[str, Any]:
    found = _s4(overrides, blocks=blocks, greatest=greatest, **system)
    return {**found, 'sizes': {'state': state, 'readout.multiplied': multiplied, **found['sizes']}}


def _lru(state: int, low: float, high: float, turn: float = 2 * math.pi) -> dict[str, Any]:
    return {'sizes': {'state': state, 'system.low': low, 'system.high': high, 'system.turn': turn}, **ALONE}


def _hgrn(hidden: int) -> dict[str, Any]:
    return {'dynamics_lr': None, 'sizes': {'bound': 'learned'}, 'mlp': partial(spec, GatedMLP, hidden=hidden)}


def _one_rate(channels: int, key_dim: int, **sizes: Any) -> dict[str, Any]:
    """A linear decay of one rate for all parameters, and the sizes that MEGA and SeqBoat share."""
    sizes = {'key_dim': key_dim, 'value_dim': 2 * channels, 'state': 16, **sizes}
    return {'dim': channels, 'sizes': sizes, 'dynamics_lr': None, 'schedule': LinearDecay}


def _mega(channels: int, key_dim: int) -> dict[str, Any]:
    return {**_one_rate(channels, key_dim), **_plain(2 * channels, 'silu')}


def _seqboat(channels: int, key_dim: int, temperature: float = 0.3) -> dict[str, Any]:
    return {**_one_rate(channels, key_dim, temperature=temperature), **ALONE}


PUBLISHED: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    # As `FULL` has it (Gu et al. 2023, https://arxiv.org/abs/2206.12037), with a state matrix a channel, or the two of
    # the released configs of images of CIFAR-10 and of speech. These train the steps of time of Path-X at 5e-4, as all
    # is trained here.
    's4': {
        **dict.fromkeys(('listops', 'imdb', 'aan'), _s4(STEPS_AT_PEAK, copies=None)),
        'cifar10': _s4(STEPS_AT_PEAK, copies=2),
        'pathfinder': _s4(copies=None),
        # The least step is that of the released code.
        'pathfinder128': _s4(copies=None, low=1e-4),
        'speech_commands': _s4(copies=2),
    },
    # The paper of S4D trains it as S4 (Gu et al. 2022, https://arxiv.org/abs/2206.11893); the row has a set of modes a
    # channel. It starts as Lin, but for Path-X, which Lin does not learn by the paper's table, where Inv has 92.80 %
    # and LegS 91.95 %; on the other tasks the three are within 2 points.
    's4d': {
        **dict.fromkeys(('listops', 'imdb', 'aan', 'cifar10'), _s4(STEPS_AT_PEAK)),
        **dict.fromkeys(('pathfinder', 'speech_commands'), _s4()),
        'pathfinder128': _s4(low=1e-4, starts=('inv',)),
    },
    # The released scripts (Smith et al. 2023, https://arxiv.org/abs/2208.04933), epochs as steps: what outputs C start
    # as, what the gate multiplies, whether eigenvalues are clipped, which of time scales, B and C are trained at which
    # rate, and which of them decay.
    's5': {
        'listops': dict(
            steps=76_800, batch_size=50, peak_lr=3e-3, weight_decay=0.04, warmup=1_920.0,
            **_s5(16, 8, (*READS_DECAY, Override('*/system/B')), outputs='map', multiplied='given'),
        ),
        'imdb': dict(
            steps=17_500, batch_size=50, peak_lr=4e-3, weight_decay=0.07, dropout=0.1, warmup=0.0,
            **_s5(192, 12, (*READS_DECAY, Override('*/log_step')), outputs='map', multiplied='given'),
        ),
        'aan': dict(
            steps=92_000, batch_size=32, peak_lr=2e-3, dim=128, weight_decay=0.05, warmup=0.05,
            **_s5(256, 16, (*READS_DECAY, Override('*/log_step'))),
        ),
        'cifar10': dict(
            steps=225_000, batch_size=50, peak_lr=4.5e-3, weight_decay=0.07, dropout=0.1, warmup=900.0,
            **_s5(384, 3, (*READS_DECAY, Override('*/system/B')), outputs='map', greatest=-1e-4),
        ),
        'pathfinder': dict(
            steps=500_000, batch_size=64, peak_lr=4.5e-3, dynamics_lr=9e-4, dim=192, weight_decay=0.03, dropout=0.05,
            warmup=2_500.0, **_s5(256, 8),
        ),
        'pathfinder128': dict(
            steps=375_000, batch_size=32, peak_lr=1.8e-3, dynamics_lr=6e-4, dim=128, weight_decay=0.06,
            warmup=5_000.0,
            **_s5(256, 16, (*READS_DECAY, Override('*/system/B', lr=1 / 3)), outputs='modes', low=1e-4),
        ),
        'speech_commands': dict(
            steps=212_000, batch_size=16, peak_lr=8e-3, dynamics_lr=2e-3, dim=96, weight_decay=0.04, dropout=0.1,
            warmup=5_303.0,
            **_s5(128, 16, tuple(Override(f'*/{n}', lr=1 / 4, weight_decay=0.0) for n in ('C*', 'D')), outputs='map'),
        ),
    },
    # The authors released no code (Orvieto et al. 2023, https://arxiv.org/abs/2303.06349). Widths, states, depths,
    # rings, angles and batches are from memory of the paper's table, and were found so in the configs of a public
    # reimplementation, but for three that follow memory alone, where it has a ring to 0.9 and 90,000 steps (listops)
    # and a batch of 64 (aan). Rates and warm-ups are those of that reimplementation.
    'lru': {
        'listops': dict(
            steps=80_000, batch_size=32, peak_lr=3e-3, dynamics_lr=1.5e-3, depth=6, warmup=0.13, **_lru(256, 0.0, 0.99)
        ),
        'imdb': dict(
            steps=50_000, batch_size=32, peak_lr=4e-3, dynamics_lr=4e-4, dropout=0.1, warmup=0.1, **_lru(192, 0.5, 0.9)
        ),
        'aan': dict(
            steps=100_000, batch_size=32, peak_lr=2e-3, dynamics_lr=1e-3, dim=128, dropout=0.1, warmup=0.05,
            **_lru(256, 0.5, 0.9),
        ),
        'cifar10': dict(peak_lr=5e-3, dynamics_lr=1.25e-3, warmup=0.1, **_lru(384, 0.9, 0.999)),
        'pathfinder': dict(
            peak_lr=4e-3, dynamics_lr=1e-3, dim=192, weight_decay=0.05, warmup=0.1, **_lru(256, 0.9, 0.999)
        ),
        'pathfinder128': dict(
            steps=250_000, batch_size=32, peak_lr=2e-3, dynamics_lr=5e-4, dim=128, warmup=0.1,
            **_lru(256, 0.999, 0.9999, math.pi / 10),
        ),
    },
    # The released script (Qin et al. 2023, https://arxiv.org/abs/2311.04823), one rate for all. Steps are those of its
    # schedule; by its epochs, runs of CIFAR-10 and Path-X are about twice as long, and those of text, Pathfinder and
    # ListOps end at a half to three quarters of it. Forget gates have the lower bounds that the paper's start at, there
    # learned. The script reads both ways, `zoo=bi_hgrn`, with one set of maps and two of angles; images along rows and
    # columns, those of CIFAR-10 in colour and augmented; and learns positions but of Pathfinder and Path-X.
    'hgrn': {
        'listops': dict(
            steps=50_000, batch_size=128, peak_lr=5e-4, dim=32, depth=6, weight_decay=0.01, warmup=5_000.0, **_hgrn(32)
        ),
        'imdb': dict(
            steps=50_000, batch_size=32, peak_lr=5e-3, dim=128, depth=4, weight_decay=0.0, dropout=0.1,
            warmup=10_000.0, **_hgrn(128),
        ),
        'aan': dict(
            steps=50_000, batch_size=64, peak_lr=5e-3, dim=64, depth=2, weight_decay=0.0, warmup=312.0, **_hgrn(128)
        ),
        'cifar10': dict(
            steps=50_000, batch_size=50, peak_lr=3e-3, dim=512, depth=6, weight_decay=0.0, dropout=0.0,
            warmup=30_000.0, **_hgrn(512),
        ),
        'pathfinder': dict(
            steps=500_000, batch_size=128, peak_lr=2e-3, dim=128, depth=6, weight_decay=0.0, warmup=50_000.0,
            **_hgrn(128),
        ),
        'pathfinder128': dict(
            steps=500_000, batch_size=16, peak_lr=7.5e-4, dim=64, depth=6, weight_decay=0.0, warmup=150_000.0,
            **_hgrn(64),
        ),
    },
    # The released commands (Ma et al. 2023, https://arxiv.org/abs/2209.10655), in chunks as the row has them and with
    # its softmax, where images have a Laplace function; theirs are of bidirectional models, see above. One rate trains
    # all; theirs has weight decay for every parameter, here for matrices alone. Path-X warms up linearly, there with
    # the square of the steps.
    'mega': {
        'listops': dict(
            steps=90_000, batch_size=64, peak_lr=1e-3, depth=6, weight_decay=0.01, dropout=0.1, warmup=3_000.0,
            **_mega(80, 64),
        ),
        'imdb': dict(
            steps=25_000, batch_size=50, peak_lr=4e-3, depth=4, weight_decay=0.01, dropout=0.1, warmup=0.4,
            **_mega(128, 64),
        ),
        'aan': dict(
            steps=91_960, batch_size=64, peak_lr=3e-3, depth=6, weight_decay=0.04, dropout=0.1, warmup=10_000.0,
            **_mega(128, 64),
        ),
        'cifar10': dict(
            steps=180_000, batch_size=50, peak_lr=1e-2, depth=8, weight_decay=0.02, dropout=0.0, warmup=0.05,
            **_mega(160, 96),
        ),
        'pathfinder': dict(
            steps=250_000, batch_size=128, peak_lr=1e-2, depth=6, weight_decay=0.01, warmup=0.2, **_mega(128, 64)
        ),
        'pathfinder128': dict(
            steps=125_000, batch_size=16, peak_lr=1e-2, depth=4, weight_decay=0.01, warmup=0.2, **_mega(64, 32)
        ),
    },
    # The released scripts (Ren et al. 2023, https://arxiv.org/abs/2306.11197), with the softmax of the row where images
    # have a squared ReLU, rotary positions, and a window of 128 (256 for Path-X) to the left, where theirs is to both
    # sides. Rates, weight decay and the warm-up of Path-X as in `mega`.
    'seqboat': {
        'listops': dict(
            steps=90_000, batch_size=64, peak_lr=4e-3, depth=6, weight_decay=1e-3, dropout=0.1, warmup=0.3,
            **_seqboat(80, 64),
        ),
        'imdb': dict(
            steps=25_000, batch_size=50, peak_lr=4e-3, depth=4, weight_decay=0.01, dropout=0.1, warmup=0.4,
            **_seqboat(128, 64),
        ),
        'aan': dict(
            steps=91_960, batch_size=64, peak_lr=3e-3, depth=6, weight_decay=0.04, dropout=0.1, warmup=10_000.0,
            **_seqboat(128, 64),
        ),
        'cifar10': dict(
            steps=180_000, batch_size=50, peak_lr=1e-2, depth=8, weight_decay=0.02, dropout=0.0, warmup=0.05,
            **_seqboat(160, 96, 0.4),
        ),
        'pathfinder': dict(
            steps=250_000, batch_size=128, peak_lr=1e-2, depth=6, weight_decay=0.01, warmup=0.2,
            **_seqboat(128, 64, 1.0),
        ),
        'pathfinder128': dict(
            steps=125_000, batch_size=16, peak_lr=1e-2, depth=4, weight_decay=0.01, warmup=0.2, window=256,
            **_seqboat(128, 64, 1.0),
        ),
    },
    # The arena's released configs (Tay et al. 2021, https://arxiv.org/abs/2011.04006; the paper's text has 6 layers of
    # 512 channels and 8 heads for ListOps and text), but for documents of text, of which 4,096 bytes are read, as the
    # paper says and `FULL` has, and there 1,000. Where these name no dropout, that of the model. Positions are rotary,
    # as in the row, where theirs are sinusoids, or on CIFAR-10 and Path-X learned. Assumed: a cosine in the place of an
    # inverse square root of steps on text, with its greatest rate, which pairs of documents reach in their last step;
    # one dropout where attention on CIFAR-10 and Pathfinder has another.
    'mha': {
        'listops': dict(
            steps=5_000, batch_size=32, peak_lr=1.6e-3, dim=512, depth=4, heads=8, weight_decay=0.1, dropout=0.1,
            warmup=0.2, **_plain(1_024, 'gelu'),
        ),
        'imdb': dict(
            steps=20_000, batch_size=32, peak_lr=5.6e-4, dim=256, depth=4, heads=4, weight_decay=0.1, dropout=0.1,
            warmup=0.4, **_plain(1_024, 'gelu'),
        ),
        'aan': dict(
            steps=5_000, batch_size=32, peak_lr=3.5e-4, dim=128, depth=4, heads=4, weight_decay=0.1, dropout=0.1,
            warmup=0.9, **_plain(512, 'gelu'),
        ),
        'cifar10': dict(
            steps=35_000, batch_size=256, peak_lr=5e-4, dim=128, depth=1, heads=8, weight_decay=0.0, dropout=0.3,
            warmup=175.0, sizes={'key_dim': 8}, **_plain(128, 'gelu'),
        ),
        'pathfinder': dict(
            steps=62_400, batch_size=512, peak_lr=1e-3, dim=32, depth=4, heads=4, weight_decay=0.0, dropout=0.2,
            warmup=312.0, sizes={'key_dim': 4}, **_plain(32, 'gelu'),
        ),
        'pathfinder128': dict(
            steps=500_000, batch_size=64, peak_lr=1e-3, dim=32, depth=1, heads=2, weight_decay=0.0, dropout=0.1,
            warmup=2_500.0, sizes={'key_dim': 8}, **_plain(32, 'gelu'),
        ),
    },
}  # fmt: skip
"""Settings of a recipe's own paper, or of its released code, that replace those of S4 for a task at `size=full`."""


def setting(size: str, task: str, zoo: str) -> Setting:
    """The data, sizes and training of a task for a recipe; `bi_NAME` has those of NAME.

    Raises `UserError` for an unknown size or task.
    """
    of_size = choose(choose(SIZES, 'size', size), 'task', task)
    published = PUBLISHED.get(zoo.removeprefix(BOTH), {}).get(task, {})
    return dataclasses.replace(of_size, **published) if size == 'full' else of_size


SIZES = {'smoke': SMOKE, 'full': FULL}


def get_config(arg: str = '') -> ConfigDict:
    """The config for `task=...,zoo=...,size=...`, the other arguments named above, and `CHOICES`."""
    chosen = arguments(
        arg,
        task='listops',
        zoo='mha',
        size='full',
        protocol='scratch',
        run='',
        conv='0',
        head='',
        fast='',
        rate='',
        **CHOICES,
    )
    if (chosen['protocol'] == 'finetune') != bool(chosen['run']):
        raise UserError(
            'protocol=finetune needs run=WORKDIR, that of a run with protocol=pretrain; other protocols take no run'
        )
    if not chosen['fast']:
        check_not_given(chosen, ('rate',), 'is of fast=RECIPE, which is not given')
    protocol = choose(PROTOCOLS, 'protocol', chosen['protocol'])
    run = setting(chosen['size'], chosen['task'], chosen['zoo'])
    recipe = padded_sequence_recipe(chosen['zoo'], chosen['conv'])
    evaluated = max(1, run.steps // 10)
    parts = protocol(recipe, run, chosen['head'])
    if chosen['fast']:
        below = padded_sequence_recipe(chosen['fast'], chosen['conv'])
        parts['model'].stack = _two_rates(below, recipe, run, chosen)
        # Windows are told the order of their tokens as summaries are told theirs.
        parts['model'].positions = _positions(below) or _positions(recipe)
    return run_config(
        chosen,
        steps=run.steps,
        batch_size=run.batch_size,
        length=run.length,
        **parts,
        optimizer=AdamW(
            peak_lr=run.peak_lr,
            schedule=run.schedule(warmup=run.warmup),
            weight_decay=run.weight_decay,
            groups=Groups(dynamics=Group(weight_decay=0.0, most=run.dynamics_lr)),
            overrides=_of_slow(run.overrides) if chosen['fast'] else run.overrides,
        ),
        evals=(spec(BySlice, cadence=spec(EveryNSteps, n=evaluated), multiples=(1,), examples=run.examples),),
        save_every=evaluated,
        precision=Precision(activations=run.activations),
        start=spec(FromRun, run=chosen['run']) if chosen['run'] else None,
    )


def _classification(recipe: Recipe, run: Setting, head: str) -> dict[str, ConfigDict]:
    """Classification, with a head for labels, linear where none is given."""
    kind = run.data.kind
    if kind.documents > 1 and head:
        raise UserError(f'head={head} is for one document; this task has {kind.documents}, and a head of its own')
    sizes = {'classes': kind.classes}
    made = (
        spec(PairHead, **sizes) if kind.documents > 1 else choose(CLASSIFIERS, 'head', head or 'linear').made(**sizes)
    )
    model = spec(Model, head=made, pool=MeanPool(), streaming=False, **_trunk(recipe, run))
    return {'task': spec(Classification, data=run.data), 'model': model}


def _denoising(recipe: Recipe, run: Setting, head: str) -> dict[str, ConfigDict]:
    """Prediction of the inputs: hidden ones with a bidirectional mixer, otherwise the next one."""
    if head and run.data.kind.vocab is not None:
        raise UserError(f'head={head} is not for protocol=pretrain of tokens, which has a head of its own')
    task = spec(Denoising, data=run.data, hidden=run.hidden if recipe.bidirectional else None)
    if run.data.kind.vocab is None:
        made = choose(REGRESSORS, 'head', head or 'absolute_error').made()
    else:
        made = spec(LanguageHead)
    return {'task': task, 'model': spec(Model, head=made, streaming=not recipe.bidirectional, **_trunk(recipe, run))}


PROTOCOLS = {'scratch': _classification, 'pretrain': _denoising, 'finetune': _classification}


def _trunk(recipe: Recipe, run: Setting) -> dict[str, Any]:
    real = run.data.kind.vocab is None
    inputs = spec(Projection, features=run.data.kind.channels) if real else spec(Embedding, scale=EMBEDDING)
    stack = _stack(recipe, run, _document_length(run))
    return {'dim': run.dim, 'stack': stack, 'inputs': inputs, 'positions': _positions(recipe)}


def _positions(recipe: Recipe) -> ConfigDict | None:
    """What a recipe is told that cannot tell left from right."""
    return spec(Sinusoidal) if recipe.mirrored else None


def _document_length(run: Setting) -> int:
    """Tokens of a row as mixers see it: each document of a pair is one."""
    return run.length // run.data.kind.documents


def _two_rates(below: Recipe, recipe: Recipe, run: Setting, chosen: Mapping[str, str]) -> ConfigDict:
    """A stack of `below` on windows, and one of the recipe on their summaries. Raises `UserError` in pretraining."""
    if chosen['protocol'] != 'scratch':
        raise UserError(f'fast={chosen["fast"]} summarises windows, and goes with protocol=scratch; leave it out')
    rate = whole('rate', chosen['rate'] or '10')
    return spec(
        TwoRates,
        fast=_stack(below, dataclasses.replace(run, sizes={}), rate),
        slow=_stack(recipe, run, -(-_document_length(run) // rate)),
        window=rate,
    )


def _of_slow(overrides: tuple[Override, ...]) -> tuple[Override, ...]:
    """Overrides of a recipe's parameters, for its stack of summaries alone."""
    return tuple(dataclasses.replace(each, pattern=f'stack/slow/{each.pattern}') for each in overrides)


def _stack(recipe: Recipe, run: Setting, length: int) -> ConfigDict:
    """The recipe's mixers in the one block, in their bidirectional form where they have one, for rows of `length`."""
    mixers = recipe.sized(heads=run.heads, window=run.window, length=length, causal=not recipe.bidirectional)
    for mixer in mixers:
        # Of layers that read both ways the mixers inside take them; the convolutions of conv=1 take none.
        for each in within(mixer):
            for key, value in run.sizes.items():
                if key.partition('.')[0] in takes(each):
                    set_value(each, key, value)
    stack = stack_spec(mixers, layer=recipe.layer, depth=run.depth, mlp=run.mlp())
    for block in stack.blocks:
        if 'dropout' in block:
            block.dropout = run.dropout
    return stack
