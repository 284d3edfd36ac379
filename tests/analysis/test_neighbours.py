"""Nearest neighbours and the mixture with them, by hand."""

import functools
import sys
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis.neighbours import (
    KEYS,
    STAGES,
    Found,
    compared,
    examine,
    inner_states,
    log_probabilities,
    mixed,
    nearest,
)
from attnlab.analysis.prediction import HeadCalls
from attnlab.blocks.block import Block
from attnlab.context import Context
from attnlab.data.synthetic.ranked import RankedTransitions
from attnlab.errors import UserError
from attnlab.mixers.linear.attention import LinearAttention
from attnlab.models.heads.language import LanguageHead
from attnlab.models.model import Model
from attnlab.models.stack import Stack
from attnlab.nn.mlps import MLP
from attnlab.runs.loading import Loaded
from attnlab.tasks.transitions import Transitions


def test_the_nearest_states_and_what_came_after_them():
    pytest.importorskip('sklearn')
    keys = np.array([[0.0, 0], [3, 0], [0, 1]])
    found = nearest(keys, np.array([7, 8, 9]), np.array([[0.0, 0.25]]), 2)
    np.testing.assert_allclose(found.distances, [[0.0625, 0.5625]])
    assert found.values.tolist() == [[7, 9]]
    with pytest.raises(UserError, match='neighbours is 4; 3 hidden states are stored'):
        nearest(keys, np.array([7, 8, 9]), keys, 4)


def test_neighbours_that_agree_share_the_probability():
    found = Found(np.array([[0.0, 2.0, 4.0]]), np.array([[5, 6, 5]]))
    weights = np.exp([0.0, -1, -2])
    np.testing.assert_allclose(
        np.exp(log_probabilities(found, np.array([5]), 2.0)), (weights[0] + weights[2]) / weights.sum()
    )
    assert log_probabilities(found, np.array([1]), 2.0) == -np.inf


def test_a_mixture_of_both_is_one_of_probabilities():
    losses, neighbours = -np.log([0.5, 0.2]), np.log([0.1, 1.0])
    np.testing.assert_allclose(mixed(losses, neighbours, 0.25), -np.mean(np.log([0.4, 0.4])))
    # A target that no neighbour has costs the logarithm of the model's share.
    np.testing.assert_allclose(mixed(losses[:1], np.array([-np.inf]), 0.25), -np.log(0.75 * 0.5))


def test_fewer_neighbours_and_smaller_stores_are_measured_at_the_best_mixture():
    pytest.importorskip('sklearn')
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((40, 3)), rng.integers(0, 4, 40)
    queries, targets = rng.standard_normal((15, 3)), rng.integers(0, 4, 15)
    losses = rng.uniform(0.5, 2, 15)
    found = examine(keys, values, queries, targets, losses, 8)
    share, temperature = found.best
    assert found.mixtures[found.best] == min(found.mixtures.values()) == found.by_count[8] == found.by_stored[40]
    assert list(found.by_count) == [1, 4, 8] and list(found.by_stored) == [10, 20, 40]
    squares = np.sum(np.square(queries[:, None] - keys[:20]), axis=-1)
    near = np.argsort(squares, axis=1)[:, :8]
    each = Found(np.take_along_axis(squares, near, axis=1), values[:20][near])
    expected = mixed(losses, log_probabilities(each, targets, temperature), share)
    np.testing.assert_allclose(found.by_stored[20], expected, rtol=1e-6)


def test_keys_are_what_the_last_layer_reads_and_makes(monkeypatch):
    task = Transitions(RankedTransitions(tokens=12, rank=3))
    block = functools.partial(Block, mixer=functools.partial(LinearAttention, heads=2), mlp=MLP)
    stack = functools.partial(Stack, depth=2, blocks=(block,))
    model = Model(12, dim=8, stack=stack, head=LanguageHead, dtype=jnp.float32, rngs=nnx.Rngs(0))
    source = task.source('test', 1)
    batch = {name: jnp.stack([source[row][name] for row in range(3)]) for name in source[0]}
    ctx = Context.full(3, 1)
    first, last = model.stack.layers()
    x = first(model.embed(batch['tokens'], ctx), ctx)[0]
    normed = last.mixer_norm(x)
    between = x + last.mixer(normed, ctx)[0]
    read = last.mlp_norm(between)
    made = last.mlp(read)
    expected = {'stream': between + made, 'mlp': read, 'mlp_output': made, 'mixer': normed}
    found = inner_states(task, model, batch, tuple(STAGES))
    assert expected.keys() == found.keys()
    for name, states in expected.items():
        np.testing.assert_allclose(found[name], states, rtol=1e-4, atol=1e-5, err_msg=name)
    # What is asked of a run is its task, its program and its variables: none need be trained.
    graphdef, variables = nnx.split(model)
    loaded = Mock(spec=Loaded, setup=Mock(task=task, graphdef=graphdef, jit=jax.jit), variables=variables)
    there = HeadCalls(np.ones((3, 8)), np.zeros((3, 12)), np.zeros(3), np.zeros(3, int), None, np.ones((3, 1), bool))
    monkeypatch.setattr('attnlab.analysis.neighbours.predictions', lambda *_: [there])
    both = compared(loaded, [batch], tuple(KEYS))
    assert tuple(both.states) == tuple(KEYS)
    for name, states in both.states.items():
        expect = there.hidden if name == 'head' else expected[name][:, 0]
        np.testing.assert_allclose(states, expect, rtol=1e-4, atol=1e-5, err_msg=name)
    bare = functools.partial(Stack, depth=1, blocks=(functools.partial(block, mlp=None),))
    model = Model(12, dim=8, stack=bare, head=LanguageHead, dtype=jnp.float32, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='keys=mlp are what the last channel mixer reads, and this model has no such'):
        inner_states(task, model, batch, ('mlp',))


def test_without_its_extra_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'sklearn.neighbors', None)
    with pytest.raises(UserError, match=r'attnlab\[offline\]'):
        nearest(np.zeros((2, 1)), np.zeros(2, int), np.zeros((1, 1)), 1)
