"""Heads of growing width on a source whose log-probabilities have a known rank."""

from attnlab.config import spec
from attnlab.data.synthetic.ranked import RankedTransitions
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd
from attnlab.experiment.experiment import Finished, Run, label_of
from attnlab.models.heads.registry import CLASSIFIERS, HEADS
from attnlab.models.model import Model
from attnlab.models.stack import stack_spec
from attnlab.nn.norms import NoNorm
from attnlab.run_config import CHOICES, run_config
from attnlab.tasks.transitions import Transitions
from attnlab.train.optimizer import AdamW
from attnlab.train.report import Reporting
from attnlab.train.schedule import Cosine
from attnlab.zoo.chosen import chosen_recipe

SEEDS = 3
TABLES = {'cpu': RankedTransitions(tokens=128, rank=20), 'full': RankedTransitions()}
WIDTHS = {'cpu': (4, 8, 12, 16, 19, 24), 'full': (8, 16, 24, 32, 39, 48)}
STEPS = {'cpu': 1_500, 'full': 20_000}
TRIED = {'softmax': 6, 'mixture_of_softmaxes': 2, 'sigsoftmax': 1, 'fourier_head': 1}
"""How many of the widths each head is tried at, from the least."""


def runs(size):
    """A run a head, place among the widths, and seed; seeds draw the source and the model anew."""
    return [
        Run(label_of(head, place, seed), config(head, WIDTHS[size][place], seed, size))
        for head, places in TRIED.items()
        for place in range(places)
        for seed in range(SEEDS)
    ]


def config(head, width, seed, size):
    """The run of a head: a table of vectors, a linear map of them (a mixer of one token), and the head."""
    table = TABLES[size]
    made = (HEADS | CLASSIFIERS)[head].spec.copy_and_resolve_references()
    if head in CLASSIFIERS:
        made.classes = table.tokens
    recipe = chosen_recipe('nope')
    stack = stack_spec(recipe.sized(heads=1, window=1), layer=recipe.layer, depth=1, mlp=None)
    for block in stack.blocks:
        block.norm = spec(NoNorm)
    found = run_config(
        CHOICES,
        steps=STEPS[size],
        batch_size=table.tokens,
        length=1,
        task=spec(Transitions, table=RankedTransitions(tokens=table.tokens, rank=table.rank, seed=seed)),
        model=spec(Model, dim=width, stack=stack, norm=spec(NoNorm), head=made, streaming=False),
        optimizer=AdamW(peak_lr=3e-2, schedule=Cosine(warmup=0.02), weight_decay=0.0),
        evals=(spec(BySlice, cadence=spec(AtEnd), multiples=(1,), examples=table.tokens),),
        save_every=STEPS[size],
    )
    with found.unlocked():
        found.seed = seed
        found.report = spec(Reporting, every=STEPS[size] // 10, tensorboard=False)
    return found


def measure(finished: Finished):
    """The width that the head reads, and how far its predictions are from the source, in nats."""
    return {'width': finished.loaded.model().dim, 'divergence': finished.curve('test/all/divergence')[-1][1]}
