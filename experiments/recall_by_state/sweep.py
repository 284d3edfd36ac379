"""Fixed-state mixers at four sizes of the state recall values by keys: what a byte of memory holds of them."""

import dataclasses
import pathlib

from attnlab.config import spec_of, takes
from attnlab.configuration import config_of
from attnlab.data.synthetic.recall import mixed_recall
from attnlab.experiment.experiment import label_of
from attnlab.experiment.splits import of_splits
from attnlab.sweep.sweep import rates_config

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'recall.py'
VOCAB = 8192
SEEDS = 3
"""Fresh seeds that the best learning rate of every study is run with."""

BY_KEYS = ('linear_transformer', 'delta_net', 'gated_delta_net')
"""Those of the CPU size whose state grows with the channels of a key."""

FAMILIES = {
    'key_dim': (
        *('linear_transformer', 'cosformer', 'hedgehog', 'nalaformer', 'performer', 'retnet', 'lightning', 'gla'),
        *('hgrn2', 'mlstm', 'delta_net', 'gated_delta_net', 'kda', 'gated_delta_product', 'gated_delta_net2', 'comba'),
        *('preconditioned_gdn', 'taylorshift', 'third_order_taylor', 'based'),
    ),
    'bits': ('ecoformer',),
    'slots': ('gsa', 'raven'),
    'state': ('mamba', 'mamba2', 'mamba3', 'mamba3_mimo', 's4', 's4d', 's5', 's6', 'lru'),
    'width': ('rg_lru', 'mingru', 'minlstm', 'al_rnn'),
    'heads': ('rwkv6', 'rwkv7', 'mesa_net', 'ttt_linear', 'titans_linear', 'slstm', 'lizard', 'mlstm_block'),
}
"""Recipes by the argument that sets the size of their state; fewer heads are wider, and have the larger state."""

SHARED = ('s5', 'lru')
"""Those whose `state` is that of all channels together, and not of each."""


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the experiment is.

    Attributes:
      families: recipes by the argument of which they have four values.
      values: these values, by argument; or by recipe, where it has others.
      arg: of configs/recall.py, without the recipe.
      recall: tokens and pairs of the kinds of examples; `None`: those of the config.
      steps: of training; `None`: those of the config.
      rates: the learning rates, the same for all.
      examples: of every slice.
    """

    families: dict[str, tuple[str, ...]]
    values: dict[str, tuple[int, ...]]
    arg: str
    recall: tuple[tuple[int, int], ...] | None
    steps: int | None
    rates: tuple[float, ...]
    examples: int


SIZES = {
    'cpu': Size(
        families={'key_dim': BY_KEYS, 'state': ('mamba2',)},
        values={'key_dim': (4, 8, 16, 32), 'state': (4, 8, 16, 32)},
        arg='task=mqar_mixed,conv=1',
        recall=((8, 1), (16, 2), (16, 4), (32, 8)),
        steps=600,
        rates=(1e-2, 3e-2),
        examples=512,
    ),
    'full': Size(
        families=FAMILIES,
        values={
            'key_dim': (8, 16, 32, 64),
            'bits': (8, 16, 32, 64),
            'slots': (8, 16, 32, 64),
            'state': (8, 16, 32, 64),
            'width': (64, 128, 256, 512),
            'heads': (8, 4, 2, 1),
            **dict.fromkeys(SHARED, (64, 128, 256, 512)),
        },
        arg='task=mqar_mixed,conv=1,size=paper',
        recall=None,
        steps=None,
        rates=(1e-3, 3.2e-3, 1e-2, 3.2e-2),
        examples=3000,
    ),
}


def studies(size):
    """A study a recipe and size of its state."""
    chosen = SIZES[size]
    return {
        'recall': {
            label_of(recipe, f'{argument}={value}'): study(config(recipe, argument, value, chosen), chosen)
            for argument, recipes in chosen.families.items()
            for recipe in recipes
            for value in chosen.values.get(recipe, chosen.values[argument])
        }
    }


def study(base, chosen):
    """All learning rates with one seed, none given up early, then the best with fresh seeds: the same for all."""
    return rates_config(
        base, chosen.rates, metric='valid/1x/accuracy', goal='max', confirm=SEEDS, reported='test/1x/accuracy'
    )


def config(recipe, argument, value, chosen):
    """A short convolution and the mixer with a state of that size; the head is the table of the embedding.

    With a head of its own the value of every one of 4,096 tokens has to be learned twice, which takes most of the
    training.
    """
    found = config_of(CONFIG, f'{chosen.arg},zoo={recipe}')
    with found.unlocked():
        found.model.head = None
        found.model.inputs.scale = 0.2
        # The first is the short convolution; at the end of the pattern of based attention has the argument too.
        mixers = (block.mixer for block in found.model.stack.blocks[1:])
        next(mixer for mixer in mixers if argument in takes(mixer))[argument] = value
        if chosen.recall is not None:
            shorten(found, chosen)
        found.checkpoint.every = found.steps
        found.evals = of_splits(chosen.examples, every=found.steps)
        found.report.update(every=max(1, found.steps // 20), tensorboard=False)
    return found


def shorten(found, chosen):
    """Examples of a few tokens, of the same vocabulary, for some steps."""
    found.task.problem = spec_of(mixed_recall(VOCAB, chosen.recall))
    found.update(length=max(length for length, _ in chosen.recall), batch_size=64, steps=chosen.steps)
