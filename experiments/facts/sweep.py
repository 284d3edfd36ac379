"""Drawn facts in transformers, Mamba and gated DeltaNet: where clean values bring them back, and where edits take."""

import dataclasses
import pathlib

import jax
import numpy as np
from flax import nnx

from attnlab.analysis.asked import Query
from attnlab.analysis.editing import Edit, Editor
from attnlab.analysis.interventions import last_map
from attnlab.analysis.tracing import trace
from attnlab.config import spec, spec_of
from attnlab.configuration import config_of
from attnlab.context import Context
from attnlab.data.synthetic.facts import PROMPT, Facts
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd
from attnlab.experiment.experiment import Finished, Run, label_of
from attnlab.train.state import joined, split

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'recall.py'
RECIPES = ('mha', 'mamba', 'gated_delta_net')
SEEDS = 3
SUBJECT, ASKED = 1, PROMPT - 1
"""The last token of a subject, whose key an edit changes, and the token at which objects are predicted."""


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the experiment is.

    Attributes:
      facts: what is learned.
      dim: width of the model.
      depth: its layers.
      steps: of training.
      batch: prompts a step.
      rates: learning rates, the same for all; the better of a recipe, by the loss on facts, is shown.
      traced: facts that are traced.
      edited: facts that are edited, one at a time, in every place; by the first half a place is chosen, the second is
        shown.
      others: facts that should stay as they are, asked after every edit.
    """

    facts: Facts
    dim: int
    depth: int
    steps: int
    batch: int
    rates: tuple[float, ...]
    traced: int
    edited: int
    others: int


SIZES = {
    'cpu': Size(Facts(), 64, 4, 800, 128, (1e-3, 3e-3), traced=64, edited=16, others=256),
    'full': Size(
        Facts(subjects=16_384, names=256, relations=8, objects=256),
        256,
        8,
        50_000,
        512,
        (3e-4, 1e-3, 3e-3),
        traced=512,
        edited=64,
        others=2048,
    ),
}


def runs(size):
    """A run a recipe, learning rate and seed."""
    return [
        Run(label_of(recipe, f'{rate:g}', seed), config(recipe, rate, seed, SIZES[size]))
        for recipe in RECIPES
        for rate in SIZES[size].rates
        for seed in range(SEEDS)
    ]


def config(recipe, rate, seed, chosen):
    """A model of prompts of four tokens; seeds differ in initial values and order, the facts are the same."""
    found = config_of(CONFIG, f'task=facts,zoo={recipe}')
    with found.unlocked():
        found.seed = seed
        found.optimizer.peak_lr = rate
        found.task.problem = spec_of(chosen.facts)
        found.model.dim, found.model.stack.depth = chosen.dim, chosen.depth
        found.update(steps=chosen.steps, batch_size=chosen.batch)
        found.checkpoint.every = chosen.steps
        found.evals = (spec(BySlice, cadence=spec(AtEnd), multiples=(1,), examples=4096),)
        found.report.update(every=chosen.steps // 20, tensorboard=False)
    return found


def measure(finished: Finished):
    """The accuracy; what clean values bring back by place; and what edits of every place do."""
    loaded = finished.loaded
    facts = loaded.setup.task.problem
    chosen = SIZES[finished.size]
    rng = np.random.default_rng(0)
    found = trace(loaded, *corrupted(facts, rng, chosen.traced))
    return {
        'accuracy': finished.last('test/1x/accuracy'),
        'loss': finished.last('test/1x/loss'),
        'clean': found.clean,
        'corrupted': found.corrupted,
        'maps': {kind: each.tolist() for kind, each in found.maps.items()},
        'edits': {f'{how.layer}.{how.branch}': edits(loaded, facts, how, chosen) for how in places(loaded.model())},
    }


def corrupted(facts, rng, count):
    """Prompts with what is asked of them, and the same about other subjects with another object."""
    clean, others = [], []
    while len(clean) < count:
        one, other = rng.choice(facts.subjects, 2, replace=False)
        relation = int(rng.integers(facts.relations))
        pair = facts.fact(int(one), relation), facts.fact(int(other), relation)
        if pair[0].targets[0] != pair[1].targets[0]:
            clean.append(pair[0])
            others.append(pair[1])
    tokens, changed = (np.stack([each.tokens for each in rows]).astype(np.int32) for rows in (clean, others))
    asked = np.full(count, ASKED, np.int32)
    answers = np.array([each.targets[0] for each in clean], np.int32)
    return Query(tokens, asked, answers, Context.full(count, PROMPT)), changed


def places(model):
    """Every branch with a last map, of every layer but the last, whose values at other tokens nothing reads."""
    return [
        Edit(layer=index, branch=branch)
        for index, layer in enumerate(list(model.stack.layers())[:-1])
        for branch in ('mixer', 'mlp')
        if last_map(getattr(layer, branch, None)) is not None
    ]


def edits(loaded, facts, how, chosen):
    """Of facts given another object by a change of one map at the last token of the subject.

    `takes`: how often the new object is answered. `subject`: how often the subject's other relations are answered as
    before. `others`: how often facts of other subjects are. Each of the first half of the edits, and of the second.
    """
    rng = np.random.default_rng(1)
    editor = Editor(loaded.model(), how, at=SUBJECT, asked=ASKED, jit=loaded.setup.jit)
    rows = [
        facts.fact(int(rng.integers(facts.subjects)), int(rng.integers(facts.relations))) for _ in range(chosen.others)
    ]
    asked = np.stack([row.tokens for row in rows]).astype(np.int32)
    moments = editor.moments(jax.numpy.asarray(asked))
    answer = answering(loaded)
    before = answer(loaded.variables, asked)
    found = []
    for _ in range(chosen.edited):
        subject, relation = int(rng.integers(facts.subjects)), int(rng.integers(facts.relations))
        fact = facts.fact(subject, relation)
        target = facts.object(int(rng.integers(facts.objects)))
        while target == fact.targets[0]:
            target = facts.object(int(rng.integers(facts.objects)))
        made = editor(jax.numpy.asarray(fact.tokens[None].astype(np.int32)), target, moments)
        _, params, buffers = split(made)
        after = joined(params, buffers)
        siblings = np.stack([facts.fact(subject, other).tokens for other in range(facts.relations)]).astype(np.int32)
        kept = np.arange(facts.relations) != relation
        same = np.any(asked[:, :2] != fact.tokens[:2], axis=1)
        known = answer(loaded.variables, siblings), answer(after, siblings)
        found.append(
            (
                known[1][relation] == target,
                np.mean((known[0] == known[1])[kept]) if kept.any() else np.nan,
                np.mean((answer(after, asked) == before)[same]),
            )
        )
    halves = np.nanmean(np.array(found, float).reshape(2, -1, 3), axis=1)
    return dict(zip(('takes', 'subject', 'others'), halves.T.tolist(), strict=True))


def answering(loaded):
    """What a model of these variables answers to prompts."""
    graphdef = loaded.setup.graphdef

    @loaded.setup.jit
    def of(variables, tokens):
        model = nnx.merge(graphdef, variables)
        hidden, _ = model.hidden(tokens, Context.full(*tokens.shape))
        return jax.numpy.argmax(model.logits(hidden[:, ASKED]), axis=-1)

    return lambda variables, tokens: np.asarray(of(variables, tokens))
