"""Every recipe of the zoo keeps every promise that its row makes."""

import functools
import json
from collections.abc import Callable, Iterator

import pytest
from ml_collections import ConfigDict

from attnlab.config import build, from_plain, plain, takes
from attnlab.testing.contract import check_implementations, claimed
from attnlab.zoo import ZOO, Recipe

DIM = 32
SMALL = {'heads': 4, 'head_dim': 16, 'window': 5}
"""Sizes that suit `DIM` and the length of the checks, in place of the recipe's where it has such an argument."""


def mixers() -> Iterator[tuple[str, Recipe, ConfigDict]]:
    """The different mixers of all recipes; a hybrid counts as each of its layers."""
    for name, recipe in ZOO.items():
        for place, mixer in enumerate(recipe.pattern):
            if mixer not in recipe.pattern[:place]:
                yield (name if len(recipe.pattern) == 1 else f'{name}.{place}'), recipe, mixer


def small(mixer: ConfigDict) -> Callable:
    """The mixer as a function of `dim`, `rngs` and whatever else overrides the recipe."""
    factory = build(mixer)
    sizes = {name: size for name, size in SMALL.items() if name in takes(mixer)}
    if 'window' in sizes and mixer.window is None:
        del sizes['window']
    return functools.partial(factory.module, **{**factory.kwargs, **sizes})


def cases() -> Iterator[pytest.param]:
    for name, recipe, mixer in mixers():
        claims = {c: getattr(recipe, c) for c in ('causal', 'bidirectional', 'streaming', 'packed')}
        for what, check in claimed(**claims).items():
            yield pytest.param(mixer, check, id=f'{name}-{what.replace(" ", "_")}')


@pytest.mark.parametrize(('mixer', 'check'), list(cases()))
def test_property(mixer: ConfigDict, check: Callable[..., None]):
    check(small(mixer), dim=DIM)


@pytest.mark.parametrize(
    ('mixer', 'names'), [pytest.param(mixer, recipe.implementations, id=name) for name, recipe, mixer in mixers()]
)
def test_implementations(mixer: ConfigDict, names: tuple[str, ...]):
    portable = [name for name in names if name not in ('reference', 'mosaic_gpu', 'mosaic_tpu')]
    check_implementations(small(mixer), names=portable, dim=DIM)


@pytest.mark.parametrize('mixer', [pytest.param(mixer, id=name) for name, _, mixer in mixers()])
def test_spec_survives_json(mixer: ConfigDict):
    assert build(from_plain(json.loads(json.dumps(plain(mixer))))) == build(mixer)
