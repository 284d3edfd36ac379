"""The recipes that stand for others in what is asked every time; of the others the same is asked nightly."""

from collections.abc import Callable, Mapping

import pytest

from attnlab.zoo import ZOO


def first(key: Callable[[str], str]) -> Mapping[str, str]:
    """The recipe that stands for its class, or for what else `key` makes of its class. Of a stack of what has rows of
    its own, none does."""
    return {
        key(recipe.pattern[0].target): name
        for name, recipe in reversed(ZOO.items())
        if len(recipe.pattern) == 1 and not recipe.slow
    }


def room(target: str) -> str:
    """The package that holds a class: `attnlab.mixers.linear` for what is defined in any module of it."""
    return '.'.join(target.split('.')[:3])


FIRST = first(str)
FIRST_OF_ROOM = first(room)


def one_or_all(some: Mapping[str, str], name: str) -> list:
    """Cases of a test that goes through recipes: those of `some` every time, all of them nightly."""
    return [
        pytest.param(tuple(some.values()), id=f'one of a {name}'),
        pytest.param(tuple(ZOO), id='all', marks=pytest.mark.slow),
    ]
