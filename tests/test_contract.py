"""Every recipe of the zoo keeps every promise that its row makes."""

import functools
import json
from typing import Any

import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.config import build, from_plain, plain
from attnlab.models.stack import Stack
from attnlab.testing.contract import Check, Subject, check_implementations, claimed, is_mirrored, on_grid
from attnlab.zoo import ZOO, Recipe
from tests.chosen import FIRST, FIRST_OF_ROOM, room

EVERY_TIME = ('decoding', 'spec survives JSON')
"""The checks that every recipe has to pass every time, unless they take long (`LONG` in tests/conftest.py); the others
are nightly but for the first recipe of a class.

What equals one pass in single steps has not looked ahead. Documents are kept apart by what the recipes of a class
share. Gradients of weight maps, decays and gates, which are what tells recipes of a class apart, are checked where
these are: tests/kernels, tests/nn.
"""

BY_ROOM = (
    'bfloat16 gradients',
    'bidirectional',
    'implementations',
    'long packed',
    'long prompt',
    'no look-ahead',
    'streaming',
    'streaming bfloat16',
    'streaming gradients',
    'streaming packed',
)
"""The checks that compile most, and ask of parts that classes share: of these the first class of a room is enough."""


@functools.lru_cache(maxsize=1)
def subject(name: str) -> Subject:
    """The recipe's mixer and what is compiled for it; the tests of a recipe follow one another in one process."""
    recipe = ZOO[name]
    made = functools.partial(make, recipe)
    smooth = functools.partial(made, **recipe.surrogate) if recipe.surrogate else None
    return Subject(on_grid(made) if recipe.grid else made, causal=recipe.causal, surrogate=smooth)


def make(recipe: Recipe, dim: int, *, rngs: nnx.Rngs, **overrides: Any) -> nnx.Module:
    """The recipe's mixer, small; a hybrid as a stack of its different layers, which obeys the contract of a mixer."""
    pattern = recipe.reduced(**overrides)
    mixers = build(tuple(mixer for place, mixer in enumerate(pattern) if mixer not in pattern[:place]))
    if len(mixers) == 1:
        return mixers[0](dim, rngs=rngs)
    blocks = tuple(functools.partial(Block, mixer=mixer) for mixer in mixers)
    return Stack(dim, depth=len(blocks), blocks=blocks, rngs=rngs)


def checks(recipe: Recipe) -> dict[str, Check]:
    """What the row claims, by name."""
    claims = ('causal', 'bidirectional', 'streaming', 'packed', 'grid', 'sparse')
    found = claimed(**{name: getattr(recipe, name) for name in claims})
    if len(recipe.pattern) > 1:
        # A stack has no parameters of its own: those of its mixers gain a dimension, which the names leave out.
        del found['parameters']
    portable = [name for name in recipe.implementations if name not in ('reference', 'mosaic_gpu', 'mosaic_tpu')]
    if portable and recipe.packed:
        found['implementations'] = functools.partial(check_implementations, names=portable)
    if recipe.bidirectional and not recipe.grid:
        found['mirrored'] = functools.partial(check_mirrored, claim=recipe.mirrored)
    found['spec survives JSON'] = lambda _: check_json(recipe)
    return found


def check_mirrored(subject: Subject, *, claim: bool) -> None:
    """What cannot tell left from right says so."""
    assert is_mirrored(subject) == claim


def check_json(recipe: Recipe) -> None:
    """The spec read back from a file builds the same."""
    assert build(from_plain(json.loads(json.dumps(plain(recipe.spec))))) == build(recipe.spec)


def marks(name: str, recipe: Recipe, what: str) -> list[pytest.MarkDecorator]:
    always = what in EVERY_TIME and (len(recipe.pattern) == 1 or what == 'spec survives JSON')
    always = always or (what == 'mirrored' and recipe.mirrored)
    target = recipe.pattern[0].target
    always = always or name == (FIRST_OF_ROOM.get(room(target)) if what in BY_ROOM else FIRST.get(target))
    return [
        pytest.mark.xdist_group(f'contract of {name}'),
        *([] if always else [pytest.mark.slow]),
    ]


@pytest.mark.parametrize(
    ('name', 'what', 'check'),
    [
        pytest.param(name, what, check, id=f'{name}-{what.replace(" ", "_")}', marks=marks(name, recipe, what))
        for name, recipe in ZOO.items()
        for what, check in checks(recipe).items()
    ],
)
def test_property(name: str, what: str, check: Check):
    check(subject(name))
