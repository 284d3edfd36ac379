"""Every recipe of the zoo keeps every promise that its row makes."""

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.config import build, from_plain, plain
from attnlab.models.stack import Stack
from attnlab.testing.contract import check_implementations, claimed, is_mirrored
from attnlab.zoo import ZOO, Recipe

DIM = 32
ROWS = [pytest.param(recipe, id=name) for name, recipe in ZOO.items()]


def make(recipe: Recipe, dim: int, *, rngs: nnx.Rngs, **overrides: Any) -> nnx.Module:
    """The recipe's mixer, small; a hybrid as a stack of one period, which obeys the contract of a mixer."""
    mixers = build(recipe.reduced(**overrides))
    if len(mixers) == 1:
        return mixers[0](dim, rngs=rngs)
    blocks = tuple(functools.partial(Block, mixer=mixer) for mixer in mixers)
    return Stack(dim, depth=len(blocks), blocks=blocks, rngs=rngs)


def checks(recipe: Recipe) -> dict[str, Callable[..., None]]:
    found = claimed(
        causal=recipe.causal, bidirectional=recipe.bidirectional, streaming=recipe.streaming, packed=recipe.packed
    )
    if len(recipe.pattern) > 1:
        # A stack has no parameters of its own: those of its mixers gain a dimension, which the names leave out.
        del found['parameters']
    return found


QUICK = ('streaming', 'packing')
"""The checks that every recipe has to pass every time; the others are nightly but for the first recipe of a class.

What equals one pass in pieces has not looked ahead. Gradients of weight maps, decays and gates, which are what tells
recipes of a class apart, are checked where these are: tests/kernels, tests/nn.
"""

FIRST = {recipe.pattern[0].target: name for name, recipe in reversed(ZOO.items())}


def marks(name: str, recipe: Recipe, what: str) -> tuple[pytest.MarkDecorator, ...]:
    first = FIRST[recipe.pattern[0].target] == name and not recipe.slow
    # A hybrid is a stack, which hands states and segments on as tests/models has it, of mixers with rows of their own.
    return () if first or (what in QUICK and len(recipe.pattern) == 1) else (pytest.mark.slow,)


SERVED = [
    pytest.param(recipe, id=name, marks=marks(name, recipe, 'implementations'))
    for name, recipe in ZOO.items()
    if recipe.implementations and recipe.packed
]


@pytest.mark.parametrize(
    ('recipe', 'check'),
    [
        pytest.param(recipe, check, id=f'{name}-{what.replace(" ", "_")}', marks=marks(name, recipe, what))
        for name, recipe in ZOO.items()
        for what, check in checks(recipe).items()
    ],
)
def test_property(recipe: Recipe, check: Callable[..., None]):
    check(functools.partial(make, recipe), dim=DIM)


@pytest.mark.parametrize('recipe', SERVED)
def test_implementations(recipe: Recipe):
    portable = [name for name in recipe.implementations if name not in ('reference', 'mosaic_gpu', 'mosaic_tpu')]
    check_implementations(functools.partial(make, recipe), names=portable, dim=DIM)


@pytest.mark.parametrize(
    'recipe',
    [
        pytest.param(recipe, id=name, marks=() if recipe.mirrored else marks(name, recipe, 'mirrored'))
        for name, recipe in ZOO.items()
        if recipe.bidirectional
    ],
)
def test_what_cannot_tell_left_from_right_says_so(recipe: Recipe):
    assert is_mirrored(functools.partial(make, recipe), dim=DIM) == recipe.mirrored


@pytest.mark.parametrize('recipe', ROWS)
def test_spec_survives_json(recipe: Recipe):
    assert build(from_plain(json.loads(json.dumps(plain(recipe.spec))))) == build(recipe.spec)
