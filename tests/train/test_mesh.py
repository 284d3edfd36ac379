"""A model on a mesh gives the numbers of one device: every class of mixer, in this process."""

import dataclasses
import functools
import math
import re
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.models.sampling import generate
from attnlab.train.optimizer import named_parameters
from attnlab.train.partition import Axes
from attnlab.train.setup import Setup, prepare
from attnlab.zoo import ZOO
from configs import language

EDGES = ((10,), (24,), (7, 30), ())
"""Where documents begin in four rows of 48 tokens, besides at their beginning: within one of two devices that share
the time of a row, at the edge between them, and within both."""

QUICK = ('mha', 'linear_transformer', 'mamba')
DIVIDED = ('mha', 'gla', 'mamba')


def one_of_each_class():
    """The first recipe of every class of mixers that predicts the next token."""
    found: dict[str, str] = {}
    for name, recipe in ZOO.items():
        if recipe.causal:
            found.setdefault(recipe.pattern[0].target, name)
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in found.values()]


def small(zoo: str, *, heads: int | None = None, causal: bool = True, **sizes: int) -> Setup:
    """A small model of a recipe on a mesh, of two rows unless sizes are given."""
    config = language.get_config(f'zoo={zoo},size=tiny').unlock()
    config.batch_size, config.length, config.steps = 4, 48, 2
    config.model.dim, config.model.stack.depth = 64, len(config.model.stack.blocks)
    for block in config.model.stack.blocks:
        if heads is not None:
            block.mixer.heads = heads
        if not causal:
            block.mixer.causal = False
    for axis, size in ({'data': 1} | sizes).items() if sizes else ():
        config.mesh[axis] = size
    return prepare(config.lock())


def documents() -> dict[str, np.ndarray]:
    """Segments and positions of the rows."""
    starts = np.zeros((4, 48), np.int32)
    for row, edges in zip(starts, EDGES, strict=True):
        row[list(edges)] = 1
    segments, tokens = 1 + np.cumsum(starts, axis=1, dtype=np.int32), np.arange(48, dtype=np.int32)
    return {'segments': segments, 'positions': tokens - np.maximum.accumulate(starts * tokens, axis=1)}


def trained(setup: Setup, *, packed: bool = True) -> dict[str, Any]:
    """Losses and norms of the gradients of two steps, and the gradient of every parameter in the first.

    Gradients are the first momentum of Adam: times a number that is one for all parameters.
    """
    state, found = setup.initialize(), {}
    for number in (1, 2):
        noise = np.random.default_rng(number).integers(0, 256, (4, 48)).astype(np.int32)
        rows = {
            name: noise if name in ('tokens', 'targets') else np.ones((4, 48), array.dtype)
            for name, array in setup.abstract_batch().items()
        }
        rows['positions'] = np.tile(np.arange(48, dtype=np.int32), (4, 1))
        rows |= documents() if packed else {}
        state, metrics = setup.step(state, setup.place(rows), np.int32(number))
        found[f'loss {number}'] = float(metrics['loss'].total)
        found[f'gradient {number}'] = float(metrics['grad_norm'])
        if number == 1:
            momenta = named_parameters(optax.tree.get(state.opt_state, 'mu'))
            found |= {f'gradient of {path}': np.asarray(momentum[...]) for path, momentum in momenta.items()}
    return found


def assert_same(divided: dict[str, Any], alone: dict[str, Any]) -> None:
    """Numbers agree by themselves; gradients by the root mean square of the parameter's, or where a parameter has next
    to none, as keys' biases have under a softmax, by a hundred-thousandth of the greatest."""
    assert divided.keys() == alone.keys()
    sizes = {name: float(np.sqrt(np.mean(np.square(value)))) for name, value in alone.items()}
    greatest = max(size for name, size in sizes.items() if name.startswith('gradient of'))
    for name, value in alone.items():
        bound = 1e-3 * sizes[name] + 1e-5 * greatest if name.startswith('gradient of') else 2e-4 * sizes[name]
        assert np.max(np.abs(divided[name] - value)) <= bound, name


def on_one_device(setup):
    """The setup on one device of its mesh."""
    if setup.mesh.size == 1:
        return setup
    return dataclasses.replace(setup, mesh=Axes().make(list(setup.mesh.devices.flat[:1])))


@functools.cache
def trained_alone(zoo: str) -> dict[str, Any]:
    return trained(on_one_device(small(zoo)), packed=ZOO[zoo].packed)


@pytest.mark.parametrize('zoo', one_of_each_class())
def test_two_devices_agree_with_one(zoo):
    assert_same(trained(small(zoo, tensor=2), packed=ZOO[zoo].packed), trained_alone(zoo))


CLAIMING = [
    pytest.param(name, marks=() if name in DIVIDED else pytest.mark.slow)
    for name, recipe in ZOO.items()
    if recipe.sequence and recipe.causal
]


@pytest.mark.parametrize('zoo', CLAIMING)
def test_time_over_two_devices_agrees_with_one(zoo):
    setup = small(zoo, sequence=2)
    assert_same(trained(setup, packed=ZOO[zoo].packed), trained_alone(zoo))
    # Cores exchange states, or keys and values; nothing else of every token is gathered.
    for line in setup.trace().lower().compile().as_text().splitlines():
        found = re.search(r'\w\[([\d,]+)]\S* (all-gather|all-to-all)\(', line)
        if found and 'shard_map' not in line:
            assert math.prod(map(int, found[1].split(','))) <= setup.batch_size * setup.length, line


@pytest.mark.parametrize('zoo', [name for name, recipe in ZOO.items() if recipe.sequence])
def test_a_recipe_that_claims_to_divides_time(zoo):
    small(zoo, sequence=2).check()


def test_what_cannot_divide_time_says_so():
    with pytest.raises(UserError, match=r'config.mesh.sequence is 2, and this SelectiveAttention has no form'):
        small('selective_attention', sequence=2).check()
    setup = dataclasses.replace(small('mha', sequence=2), length=47)
    with pytest.raises(UserError, match=r'config.length is 47; with config.mesh.sequence it must be a multiple of 2'):
        setup.check()


@pytest.mark.parametrize('sizes', [pytest.param({'data': 2}, marks=pytest.mark.slow), {'tensor': 2}], ids=str)
def test_one_sequence_is_decoded_on_a_mesh(sizes):
    setup = small('mha', **sizes)
    alone = on_one_device(setup)
    prompt = np.arange(5, dtype=np.int32)
    tokens = [
        list(generate(nnx.merge(each.graphdef, each.initialize().variables), prompt, 6, temperature=0.0, jit=each.jit))
        for each in (setup, alone)
    ]
    assert tokens[0] == tokens[1]


def test_what_does_not_divide_is_named():
    setup = small('mha', heads=1, tensor=2)
    found = [line for line in setup.undivided() if line.startswith('attention')]
    assert found == ['attention: heads 1 over tensor 2']
    assert on_one_device(setup).undivided() == []


def test_attention_to_both_sides_over_two_devices_agrees_with_one():
    setup = small('mha', causal=False, sequence=2)
    setup.check()
    assert_same(trained(setup), trained(on_one_device(setup)))


@pytest.mark.parametrize(
    ('zoo', 'mixer'), [('sliding_window', 'Attention'), ('alibi', 'Attention'), ('gla', 'LinearAttention')]
)
def test_what_sees_both_sides_and_cannot_divide_time_says_so(zoo, mixer):
    with pytest.raises(UserError, match=f'config.mesh.sequence is 2, and this {mixer} has no form that divides time'):
        small(zoo, causal=False, sequence=2).check()


def test_how_attention_divides_time_is_in_the_plan():
    assert small('mha', sequence=2).time_division() == [
        'attention: keys and values in a ring, causal work dealt out in zig-zag '
        '(weights over some of the keys combine: Softmax)'
    ]
    assert small('mha').time_division() == []
