"""Recall, copying, state tracking and in-context learning on generated examples, with any mixer of the zoo.

    attnlab train --config=recall:task=mqar,zoo=gla --workdir=runs/mqar-gla

- `task`: one of `TASKS`;
- `zoo`: a recipe (`attnlab zoo` lists them);
- `size`: `tiny`, minutes on 2 CPU cores, or `paper`: lengths, vocabularies, widths and training as published, except as
  listed in `DEPARTURES`;
- `conv`: with `1`, layers alternate between a short gated convolution and the recipe. A convolution brings a key
  together with its value, which many mixers cannot do alone, so papers on recall put one into every model (Arora et al.
  2023). Other values are `none`, `canon` and some of its points (`attnlab.zoo.chosen.convolved`);
- `thoughts=continuous`: for `task=signed_sums`, the model thinks in mixtures of tokens before it answers
  (`attnlab.tasks.thoughts`);
- `optimizer`, `schedule`, `rounding` and `init` are as in `configs/language.py`.

Time scales have the same learning rate as all other parameters; `--config.optimizer.groups.dynamics.lr=0.1` gives them
a tenth of it (decision 313).

Every run is evaluated on named slices: 1, 2 and 4 times the training length, and difficulties of the task itself.
"""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from attnlab.config import arguments, choose, spec
from attnlab.data.synthetic.arithmetic import ModularArithmetic, Parity
from attnlab.data.synthetic.copying import Copying, DelayedCopying, SelectiveCopying
from attnlab.data.synthetic.facts import Facts
from attnlab.data.synthetic.families import FunctionDensity, FunctionMixture
from attnlab.data.synthetic.groups import WordProblem
from attnlab.data.synthetic.passkey import Passkey
from attnlab.data.synthetic.problem import Problem
from attnlab.data.synthetic.recall import (
    CompositionalRecall,
    InductionHeads,
    MultiQueryRecall,
    OverwrittenRecall,
    mixed_recall,
)
from attnlab.data.synthetic.regression import LinearRegression
from attnlab.data.synthetic.sets import MaxRetrieval
from attnlab.data.synthetic.sums import SignedSums
from attnlab.errors import UserError
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import EveryNSteps
from attnlab.models.heads.language import LanguageHead
from attnlab.models.heads.quantile import MixtureDensityHead
from attnlab.models.heads.regression import RegressionHead
from attnlab.models.inputs.embedding import Embedding, Projection
from attnlab.models.model import Model
from attnlab.models.stack import stack_spec
from attnlab.nn.mlps import GatedMLP
from attnlab.run_config import CHOICES, EMBEDDING, run_config
from attnlab.tasks.synthetic import Extra, InContextRegression, LabelPrediction
from attnlab.tasks.thoughts import ContinuousThought
from attnlab.train.optimizer import AdamW
from attnlab.train.schedule import Constant, Cosine, Schedule
from attnlab.zoo.chosen import convolved, initialized, next_token_recipe, padded_recipe


@dataclasses.dataclass(frozen=True)
class Setting:
    """A problem, the model for it, and its training; `window` is for mixers that have one.

    `b2` and `clip` are those of AdamW. Where a paper names neither and its code leaves PyTorch's defaults, they are
    those of `TORCH`.
    """

    problem: Problem
    length: int
    steps: int = 1000
    batch_size: int = 64
    peak_lr: float = 3e-3
    dim: int = 64
    depth: int = 2
    heads: int = 2
    window: int = 32
    mlp: bool = True
    examples: int | None = None
    extra: tuple[Extra, ...] = ()
    schedule: Schedule = Cosine(warmup=0.1)
    weight_decay: float = 0.1
    b2: float = 0.95
    clip: float | None = 1.0


TORCH: dict[str, Any] = {'b2': 0.999, 'clip': None}
"""PyTorch's defaults for Adam, without gradient clipping."""

REGRESSION = {
    'regression': LinearRegression(),
    'regression_noisy': LinearRegression(noise=1.0),
    'regression_anisotropic': LinearRegression(decay=1.0),
    'regression_sparse': LinearRegression(nonzero=3),
    'regression_multitask': LinearRegression(outputs=4),
    'regression_representation': LinearRegression(layers=3),
}
FAMILIES = {'regression_families': FunctionMixture(), 'regression_uncertain': FunctionDensity()}
GROUPS = {'z2': 'Z2', 'z60': 'Z60', 's3': 'S3', 'a5': 'A5', 's5': 'S5'}


TINY = {
    # With some easy examples, a large step and no MLP recall is learned within 200 steps, not 1000.
    'mqar': Setting(MultiQueryRecall(vocab=32, pairs=(2, 4, 8)), length=32, steps=400, peak_lr=1e-2, mlp=False),
    'mqar_mixed': Setting(
        mixed_recall(32, ((16, 2), (16, 4), (32, 4), (32, 8))), length=32, steps=400, peak_lr=1e-2, mlp=False
    ),
    'overwritten': Setting(OverwrittenRecall(vocab=64, pairs=4, rewrites=4), length=32),
    'compositional': Setting(
        CompositionalRecall(vocab=64, chains=3, links=3, hops=(1, 2)), length=32, steps=2000, depth=4
    ),
    'selective_copying': Setting(SelectiveCopying(vocab=10, data=8), length=64),
    'delayed_copying': Setting(DelayedCopying(vocab=10, data=8), length=64),
    'induction': Setting(InductionHeads(vocab=16), length=64),
    'copying': Setting(Copying(letters=26, shortest=5), length=42),
    'passkey': Setting(Passkey(), length=384, batch_size=16, window=64),
    'facts': Setting(Facts(), length=4, steps=2000, batch_size=128, depth=4, weight_decay=0.0),
    'parity': Setting(Parity(shortest=1), length=16),
    'arithmetic': Setting(ModularArithmetic(modulus=5, shortest=1), length=16),
    'signed_sums': Setting(SignedSums(), length=5, steps=3000, batch_size=128, peak_lr=1e-3, dim=32),
    'max_retrieval': Setting(MaxRetrieval(classes=10, fewest=1), length=17),
    **{name: Setting(WordProblem(group), length=17) for name, group in GROUPS.items()},
    **{
        name: Setting(
            dataclasses.replace(problem, dim=5, nonzero=problem.nonzero and 2), length=44, steps=3000, peak_lr=1e-3
        )
        for name, problem in REGRESSION.items()
    },
    **{name: Setting(problem, length=44, steps=3000, peak_lr=1e-3) for name, problem in FAMILIES.items()},
}

MQAR = Setting(
    # The hardest of the four sizes of the paper's figure 2, whose models have no MLP; the third of its learning rates.
    MultiQueryRecall(vocab=8192, pairs=(64,)),
    length=512,
    steps=64 * 100_000 // 128,
    batch_size=128,
    peak_lr=2.2e-3,
    dim=128,
    heads=1,
    window=64,
    mlp=False,
    examples=100_000,
    **TORCH,
)
MIXED = dataclasses.replace(
    # The five kinds of examples, 180,000 in all and 32 epochs of them; the second of four learning rates to 3e-2.
    MQAR,
    problem=mixed_recall(
        8192,
        ((64, 4), (128, 8), (256, 16), (256, 32), (256, 64)),
        (100.0, 20.0, 20.0, 20.0, 20.0),
        # Its config leaves the released generator's default, where that of figure 2 has zeros.
        random_fillers=True,
    ),
    length=256,
    steps=32 * 180_000 // 256,
    batch_size=256,
    peak_lr=3.2e-3,
    examples=180_000,
)
MAMBA = Setting(
    SelectiveCopying(vocab=16, data=16),
    length=4096,
    steps=400_000,
    peak_lr=1e-4,
    window=64,
    schedule=Constant(warmup=0.0),
    weight_decay=0.0,
    **TORCH,
)


def lengths_beyond(problem: Parity | ModularArithmetic, tokens: int) -> tuple[Extra, ...]:
    """Lengths from beyond the training lengths to 256, drawn uniformly as the papers test, then fixed ones."""
    return (
        Extra('length=40-256', 256, dataclasses.replace(problem, shortest=40 // tokens)),
        *(Extra(f'length={length}', length, problem.stretched()) for length in (64, 128, 256)),
    )


XLSTM = Setting(
    Parity(shortest=2),
    length=39,
    steps=20_000,
    batch_size=256,
    peak_lr=1e-3,
    dim=128,
    extra=lengths_beyond(Parity(), 1),
    schedule=Cosine(warmup=0.1, final=1e-3),
    **TORCH,
)
MERRILL = Setting(
    WordProblem('S5'),
    length=19,
    steps=50_000,
    batch_size=32,
    peak_lr=1e-4,
    dim=512,
    depth=4,
    heads=8,
    weight_decay=0.01,
    **TORCH,
)
GARG = Setting(
    LinearRegression(),
    length=82,
    steps=500_000,
    peak_lr=1e-4,
    dim=256,
    depth=12,
    heads=8,
    schedule=Constant(),
    weight_decay=0.0,
    **TORCH,
)

PAPER = {
    'mqar': MQAR,
    'mqar_mixed': MIXED,
    # No paper trains exactly these two: layout and training are those of multi-query recall.
    'overwritten': dataclasses.replace(MQAR, problem=OverwrittenRecall(vocab=8192, pairs=64, rewrites=64)),
    'compositional': dataclasses.replace(
        MQAR, problem=CompositionalRecall(chains=32, links=4, hops=(1, 2, 3)), depth=4
    ),
    'selective_copying': MAMBA,
    'delayed_copying': dataclasses.replace(MAMBA, problem=DelayedCopying(vocab=16, data=16)),
    'induction': dataclasses.replace(
        MAMBA, problem=InductionHeads(vocab=16), length=256, steps=25 * 8192, batch_size=8, peak_lr=1e-3, heads=8
    ),
    # Strings of up to 50 letters; the width is that of the paper's smaller models.
    'copying': Setting(Copying(), length=102, steps=50_000, peak_lr=1e-3, dim=1024, depth=12, heads=16, window=64),
    # The paper tunes a language model of billions of parameters; this is what a small one can be trained on.
    'passkey': Setting(
        Passkey(), length=4096, steps=50_000, batch_size=16, peak_lr=1e-3, dim=512, depth=8, heads=8, window=512
    ),
    'facts': Setting(
        Facts(subjects=16_384, names=256, relations=8, objects=256),
        length=4,
        steps=50_000,
        batch_size=512,
        peak_lr=1e-3,
        dim=256,
        depth=8,
        heads=4,
        weight_decay=0.0,
    ),
    'parity': XLSTM,
    'arithmetic': dataclasses.replace(
        XLSTM,
        problem=ModularArithmetic(modulus=5, shortest=2),
        length=40,
        steps=100_000,
        extra=lengths_beyond(ModularArithmetic(modulus=5), 2),
    ),
    # The paper's widths are 16, 24 and 32.
    'signed_sums': Setting(SignedSums(), length=5, steps=50_000, batch_size=256, peak_lr=1e-3, dim=32, heads=2),
    'max_retrieval': Setting(
        MaxRetrieval(), length=17, steps=100_000, batch_size=128, peak_lr=1e-3, dim=128, depth=1, heads=1
    ),
    **{name: dataclasses.replace(MERRILL, problem=WordProblem(group)) for name, group in GROUPS.items()},
    **{name: dataclasses.replace(GARG, problem=problem) for name, problem in REGRESSION.items()},
    **{
        name: dataclasses.replace(GARG, problem=dataclasses.replace(problem, dim=20))
        for name, problem in FAMILIES.items()
    },
}
SIZES = {'tiny': TINY, 'paper': PAPER}
THOUGHTS = {'none': False, 'continuous': True}

ZOOLOGY = (
    'one of four learning rates (all in sweeps/recall.py); no dropout; one cosine to a tenth, not one to 0 an epoch; '
    'a warm-up over a tenth of the steps, not none; no stop at 99 %; norms are RMSNorm, not LayerNorm; attention has '
    'no biases, where the released one has; the head is its own, not tied to the embedding; initial values are ours'
)
LANGUAGES = (
    'evaluated at fixed lengths too; accuracy is not scaled to chance; training as in the released configs of xLSTM, '
    'with weight decay 0.1 (0 for Mamba and DeltaNet); the appendix of Grazzi et al. 2024 has 100,000 steps of 1,024 '
    'and the best of several learning rates'
)
OURS = 'no paper trains this just so'
ICL = (
    'no curriculum: the paper begins with 5 dimensions and 11 points and adds one and two every 2,000 steps; here all '
    'are there from the first step; one label more than its 40 points; rotary positions; RMSNorm and gated MLPs '
    'without biases, not the layers of GPT-2; a warm-up over a fiftieth of the steps, not none; 512 test prompts, not '
    '1,280'
)
WORDS = (
    'one length, not all up to it; every element a generator, not swaps alone; one width; 50,000 steps, not up to 500 '
    'epochs; a warm-up over a tenth of the steps, then a cosine to a tenth of the rate, where the released defaults '
    'name one rate; gated MLPs of 1,408 channels, not MLPs of 2,048; words are drawn, where released ones differ and '
    'four fifths of them are for training: of z2 there are so few that test words of 1x are trained on'
)
DEPARTURES = {
    'mqar': f'{ZOOLOGY}; positions are rotary, not learned; 512 test examples a slice, not 3,000; fillers are 0, as '
    'published',
    'mqar_mixed': f'{ZOOLOGY}; learning rates to 3e-2; positions are rotary, where the released config has none; '
    'tested by 512 examples of each of the five sizes trained on, not by 1,000 up to (1024, 256); fillers are random '
    'tokens, as published; batches have examples of every size, whose labels weigh alike, so that those of 4 pairs are '
    '0.56 of the examples and 0.14 of the loss, of 64 pairs 0.11 and 0.46, where published batches are of one size, '
    'from easy to hard in every epoch, and weigh alike: 0.56 and 0.11 of them',
    'overwritten': OURS,
    'compositional': OURS,
    'selective_copying': 'one width for all mixers; constants of Adam as in PyTorch, the paper names none; fillers are '
    'one token, as published',
    'delayed_copying': 'training as for selective copying; the paper of 2016 trained recurrent networks otherwise',
    'induction': 'one width and learning rate for all mixers: the paper has 128 and 2e-4 for attention and the better '
    'of two rates; constants of Adam as in PyTorch, the paper names none',
    'copying': 'width 1024 for all mixers; rotary positions where the recipe has them; AdamW (0.9, 0.95), clipped at 1',
    'passkey': 'a small model trained for it, not a language model fine-tuned on long documents',
    'facts': OURS,
    'parity': f'lengths 2 to 39, as the released generator draws what its config calls 3 to 40; {LANGUAGES}',
    'arithmetic': f'up to 40 tokens, the sign = among them, the answer asked there; {LANGUAGES}',
    'max_retrieval': 'a stack of one block with attention and an MLP in place of the pooling model of the paper; AdamW '
    '(0.9, 0.95), clipped at 1',
    'signed_sums': 'thoughts are supervised by all partial sums; no second stage by rewards; AdamW (0.9, 0.95); 50,000 '
    'steps of 256 with rates to 1e-3, where the released code has 1,000 epochs of batches of 16 at 1e-4; a tenth of '
    'the numbers for testing and one for validation, where it has a fifth for validation',
    **dict.fromkeys(GROUPS, WORDS),
    **dict.fromkeys(REGRESSION, ICL),
    **dict.fromkeys(FAMILIES, OURS),
}
"""How `size=paper` departs from what was published, by task."""


def head_of(problem: Problem) -> ConfigDict:
    """The head of a problem: a mixture density with one component per family, real numbers, or tokens."""
    if isinstance(problem, FunctionDensity):
        return spec(MixtureDensityHead, components=len(problem.families))
    return spec(RegressionHead if isinstance(problem, LinearRegression | FunctionMixture) else LanguageHead)


def task_of(problem: Problem, chosen: dict[str, str]) -> type:
    """The task of a problem: numbers, tokens, or tokens after thoughts.

    Raises `UserError` for thoughts with any problem but `signed_sums`.
    """
    if choose(THOUGHTS, 'thoughts', chosen['thoughts']):
        if not isinstance(problem, SignedSums):
            raise UserError(f'thoughts={chosen["thoughts"]} is for task=signed_sums; the task is {chosen["task"]}')
        return ContinuousThought
    return InContextRegression if isinstance(problem, LinearRegression | FunctionMixture) else LabelPrediction


def get_config(arg: str = '') -> ConfigDict:
    """The config for `task=...,zoo=...,size=...,conv=...,init=...,thoughts=...` and `CHOICES`."""
    chosen = arguments(arg, task='mqar', zoo='mha', size='tiny', conv='0', init='framework', thoughts='none', **CHOICES)
    run = choose(choose(SIZES, 'size', chosen['size']), 'task', chosen['task'])
    recipe, initialization = initialized(next_token_recipe(chosen['zoo']), chosen['init'])
    recipe = convolved(padded_recipe(recipe, chosen['zoo']), chosen['conv'])
    real = run.problem.features is not None
    task = task_of(run.problem, chosen)
    stack = stack_spec(
        recipe.sized(heads=run.heads, window=run.window),
        layer=recipe.layer,
        depth=run.depth,
        mlp=spec(GatedMLP) if run.mlp else None,
        initialization=initialization,
        by_layer=recipe.by_layer,
    )
    evaluated = max(1, run.steps // 5)
    return run_config(
        chosen,
        steps=run.steps,
        batch_size=run.batch_size,
        length=run.length,
        task=spec(
            task,
            problem=run.problem,
            examples=run.examples,
            extra=run.extra,
        ),
        model=spec(
            Model,
            dim=run.dim,
            stack=stack,
            head=head_of(run.problem),
            inputs=spec(Projection, features=run.problem.features) if real else spec(Embedding, scale=EMBEDDING),
        ),
        optimizer=AdamW(
            peak_lr=run.peak_lr, schedule=run.schedule, weight_decay=run.weight_decay, b2=run.b2, clip=run.clip
        ),
        evals=(spec(BySlice, cadence=spec(EveryNSteps, n=evaluated)),),
        save_every=evaluated,
    )
