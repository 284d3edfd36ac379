"""Retrieval of the largest of at most 16 items, and then of up to 4096, by seven maps from scores to weights."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.convert.substitution import substituted
from attnlab.data.synthetic.problem import Examples
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd
from attnlab.experiment.experiment import Finished, Run, label_of
from attnlab.mixers.softmax.attention import Attention
from attnlab.zoo import ZOO

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'recall.py'
MAPS = {
    'softmax': 'mha',
    'ssmax': 'ssmax',
    'entmax15': 'entmax15',
    'sparsemax': 'sparsemax',
    'softpick': 'softpick',
    'relu': 'relu_attention',
}
"""Labels, and the recipes that they are; positions are taken out of all: the items are a set."""

TRAINED = 16
ITEMS = (4, 16, 64, 256, 1024, 4096)
EXAMPLES, AT_ONCE = 1024, 64
"""Examples of each number of items, and how many of them are asked at once."""


def runs(size):
    """A run a map and seed: one layer, one head."""
    return [Run(label_of(label, seed), config(label, size, seed)) for label in MAPS for seed in range(3)]


def config(label, size, seed):
    """The run of a map."""
    found = config_of(CONFIG, f'task=max_retrieval,zoo={MAPS[label]},size={"tiny" if size == "cpu" else "paper"}')
    with found.unlocked():
        found.seed = seed
        found.length = TRAINED + 1
        found.model.stack.update(depth=1)
        block = found.model.stack.blocks[0]
        parts = {name: value for name, value in ZOO[MAPS[label]].spec.items() if name in ('weights', 'temperature')}
        block.mixer = spec(Attention, heads=1, **parts)
        if label == 'ssmax':
            block.mixer.temperature.length = TRAINED
        if size == 'cpu':
            found.update(steps=1000)
        found.evals = (spec(BySlice, cadence=spec(AtEnd), multiples=(1,)),)
        found.checkpoint.every = found.steps
        found.report.every = found.steps // 20
        found.report.tensorboard = False
    return found


def measure(finished: Finished):
    """Accuracy and weight of the largest item by number of items, of the softmax also with adaptive temperature."""
    loaded, task = finished.loaded, finished.loaded.setup.task
    with loaded.setup.precision.scope():
        found = by_items(loaded.model(), task)
        if finished.parts[0] != 'softmax':
            return found
        return found | {'adaptive': by_items(substituted(loaded, 'adaptive_temperature').model(), task)}


def by_items(model, task):
    """For each number of items, how often the class of the largest is right, and its share of the query's weights."""
    found = {'accuracy': {}, 'share': {}}
    for items in ITEMS:
        rows = Examples(task.problem.stretched(), items + 1, task.seed, 'test', EXAMPLES)
        right, share = [], []
        for start in range(0, EXAMPLES, AT_ONCE):
            some = [rows[index] for index in range(start, start + AT_ONCE)]
            answers = ask(model, {name: np.stack([row[name] for row in some]) for name in ('tokens', 'at', 'targets')})
            right.append(answers[0])
            share.append(answers[1])
        found['accuracy'][items] = float(np.mean(right))
        found['share'][items] = float(np.mean(share))
    return found


@jax.jit
def ask(model, batch):
    """Whether the class is right, and what share of its weights the query gives the largest item.

    Of the only layer, with its only head, nothing is computed but what the query reads: its row of the weights.
    """
    (block,) = model.stack.layers()
    mixer, at = block.mixer, batch['at']
    inputs = model.embedding(batch['tokens'], model.dtype)
    x = block.mixer_norm(inputs)
    query = jnp.take_along_axis(x, at[:, :, None], axis=1)
    scores = jnp.einsum('btk,bsk->bts', mixer.query(query), mixer.key(x)) * mixer.key_dim**-0.5
    if mixer.temperature is not None:
        scores *= mixer.temperature(query, (at + 1).astype(scores.dtype))
    visible = jnp.arange(x.shape[1])[None, None] <= at[:, :, None]
    weights = mixer.weights.weights(scores, visible)
    read = mixer.output(jnp.einsum('bts,bsv->btv', weights, mixer.value(x)))
    hidden = jnp.take_along_axis(inputs, at[:, :, None], axis=1) + read
    hidden += block.mlp(block.mlp_norm(hidden))
    right = jnp.argmax(model.logits(model.norm(hidden)), axis=-1) == batch['targets']

    total = jnp.sum(weights, axis=2)
    largest = jnp.argmax(batch['tokens'][:, :, 0], axis=1)[:, None, None]
    share = jnp.take_along_axis(weights, largest, axis=2)[:, :, 0] / jnp.where(total > 0, total, 1)
    return right[:, 0], share[:, 0]
