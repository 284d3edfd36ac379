"""Heads for fifty thousand classes with Zipf's frequencies: losses, rare classes, time and memory."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnlab.config import spec
from attnlab.data.synthetic.prototypes import ZipfPrototypes
from attnlab.experiment.experiment import Finished, Run, label_of
from attnlab.experiment.splits import of_splits
from attnlab.models.heads.registry import CLASSIFIERS, HEADS
from attnlab.models.inputs.embedding import Projection
from attnlab.models.model import Model
from attnlab.models.stack import stack_spec
from attnlab.nn.norms import NoNorm
from attnlab.run_config import CHOICES, run_config
from attnlab.tasks.many_classes import BANDS, ManyClasses
from attnlab.train.optimizer import AdamW
from attnlab.train.report import Reporting
from attnlab.train.schedule import Cosine
from attnlab.train.setup import prepare
from attnlab.zoo.chosen import chosen_recipe

SEEDS = 3
DIMS = {'cpu': 20, 'full': 128}
STEPS = {'cpu': 300, 'full': 20_000}
BATCH = {'cpu': 128, 'full': 2_048}
EXAMPLES = {'cpu': 768, 'full': 16_384}
RATES = {'low': 3e-3, 'middle': 1e-2, 'high': 3e-2}

HEAD_ARGUMENTS = {
    'softmax': ('softmax', {}),
    'sampled': ('sampled_softmax', {'negatives': 512}),
    'sampled, uncorrected': ('sampled_softmax', {'negatives': 512, 'correction': False}),
    'hierarchical': ('hierarchical', {}),
    'adaptive': ('adaptive_softmax', {}),
    'arcface': ('arcface', {'scale': 16.0, 'margin': 0.2}),
    'partial fc': ('partial_fc', {'scale': 16.0, 'margin': 0.2}),
}
"""Rows of the registry, and their arguments; a margin of 0.5 is for faces, that are further apart than points here."""

TIMED = 1_024
"""Hidden states of a call whose time and memory are taken."""

ROUNDS = 7
"""Calls of a head and of `softmax`, by turns."""


def runs(size):
    """A run a head, rate and seed; seeds draw prototypes, examples and the model anew."""
    return [
        Run(label_of(head.replace(', ', '_').replace(' ', '_'), rate, seed), config(head, RATES[rate], seed, size))
        for head in HEAD_ARGUMENTS
        for rate in RATES
        for seed in range(SEEDS)
    ]


def config(head, rate, seed, size):
    """A linear map of the points with a bias, a mixer of one token, which is linear, and the head."""
    data = ZipfPrototypes(seed=seed)
    row, arguments = HEAD_ARGUMENTS[head]
    made = (HEADS | CLASSIFIERS)[row].made(**arguments, **({'classes': data.classes} if row in CLASSIFIERS else {}))
    recipe = chosen_recipe('nope')
    stack = stack_spec(recipe.sized(heads=1, window=1), layer=recipe.layer, depth=1, mlp=None)
    for block in stack.blocks:
        block.norm = spec(NoNorm)
    found = run_config(
        CHOICES,
        steps=STEPS[size],
        batch_size=BATCH[size],
        length=1,
        task=spec(ManyClasses, data=data, held_out=EXAMPLES[size]),
        model=spec(
            Model,
            dim=DIMS[size],
            stack=stack,
            norm=spec(NoNorm),
            head=made,
            inputs=spec(Projection, features=data.dim),
            streaming=False,
        ),
        optimizer=AdamW(peak_lr=rate, schedule=Cosine(warmup=0.05), weight_decay=0.0),
        evals=of_splits(EXAMPLES[size]),
        save_every=STEPS[size],
        report=Reporting(every=STEPS[size] // 10, tensorboard=False),
    )
    with found.unlocked():
        found.seed = seed
    return found


def measure(finished: Finished):
    """Losses and accuracies by how frequent classes are; once a seed the best guess, and once a head what it costs."""
    setup = finished.loaded.setup
    head, rate, seed = finished.parts
    parts = ('all', *BANDS)
    found = {
        'chosen_by': finished.last('valid/all/accuracy'),
        'loss': {part: finished.last(f'test/{part}/loss') for part in parts},
        'accuracy': {part: finished.last(f'test/{part}/accuracy') for part in parts},
    }
    if (head, rate) == ('softmax', 'low'):
        slices = setup.task.slices('test', 1, (1,), setup.task.held_out)
        guesses = {part: setup.task.trivial(each) for part, each in slices.items()}
        found['best'] = {name: {part: guesses[part][name]['posterior'] for part in parts} for name in SHOWN}
    if (rate, seed) == ('low', '0'):
        whole = prepare(config('softmax', RATES[rate], int(seed), finished.size))
        found['head'] = cost(
            finished.loaded.model(), nnx.merge(whole.graphdef, whole.initialize().variables), setup.task.data
        )
    return found


SHOWN = ('loss', 'accuracy')


def cost(model, whole, data):
    """Of a head's objective and its gradients: milliseconds, over those of `softmax`, and temporaries in MiB.

    Calls of both alternate, since other work on a machine slows some; the ratio is the median over rounds.
    """
    (ours, temporary), (reference, _) = call_of(model, data), call_of(whole, data)
    times = np.array([(seconds(ours), seconds(reference)) for _ in range(ROUNDS)])
    return {
        'milliseconds': 1e3 * float(times[:, 0].min()),
        'of_softmax': float(np.median(times[:, 0] / times[:, 1])),
        'temporary_mib': temporary / 2**20,
    }


def seconds(call):
    """That a call takes."""
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def call_of(model, data):
    """A call of a head's objective and its gradients, compiled and made once, and its temporaries in bytes."""
    graphdef, params, rest = nnx.split(model.head, nnx.Param, ...)
    hidden = jax.random.normal(jax.random.key(0), (TIMED, model.dim))
    rows = data.rows('test', TIMED)
    labels = jnp.asarray([rows[index]['label'] for index in range(TIMED)])

    def objective(params, hidden, labels, key):
        return jnp.mean(nnx.merge(graphdef, params, rest).objective(hidden, labels, key))

    arguments = params, hidden, labels, jax.random.key(1)
    program = jax.jit(jax.grad(objective, argnums=(0, 1))).lower(*arguments).compile()
    jax.block_until_ready(program(*arguments))
    return lambda: program(*arguments), program.memory_analysis().temp_size_in_bytes
