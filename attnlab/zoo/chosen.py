"""What `zoo=` of a config stands for: a row of the zoo, a pattern of rows, or a mixer of one's own."""

import re

from attnlab.config import spec
from attnlab.errors import UserError, nearest
from attnlab.trust import named
from attnlab.zoo import ZOO
from attnlab.zoo.recipe import Recipe


def chosen_recipe(name: str) -> Recipe:
    """Returns the recipe called `name`.

    `gla` is that row. `3*gla+mha` is a hybrid: three layers of `gla`, one of `mha`, repeated over the depth; it claims
    what all of its rows claim. `my_mixers.MovingAverage`, a name with a dot, is the mixer class at that import path,
    in blocks with an MLP (see `attnlab.trust` for whose classes may be named).

    Raises `UserError` for an unknown name, and for rows that fill layers in different ways.
    """
    parts = [_part(text.strip(), name) for text in name.split('+')]
    recipes = [recipe for count, recipe in parts for _ in range(count)]
    first = recipes[0]
    if len(recipes) == 1:
        return first
    for recipe in recipes:
        if recipe.layer != first.layer:
            raise UserError(f'zoo={name} joins {first.layer} and {recipe.layer}, which fill layers in different ways')
    return Recipe(
        spec=tuple(mixer for recipe in recipes for mixer in recipe.pattern),
        cite='; '.join(dict.fromkeys(recipe.cite for recipe in recipes)),
        causal=all(recipe.causal for recipe in recipes),
        bidirectional=all(recipe.bidirectional for recipe in recipes),
        mirrored=all(recipe.mirrored for recipe in recipes),
        streaming=all(recipe.streaming for recipe in recipes),
        packed=all(recipe.packed for recipe in recipes),
        sequence=all(recipe.sequence for recipe in recipes),
        grid=any(recipe.grid for recipe in recipes),
        implementations=tuple(
            implementation
            for implementation in first.implementations
            if all(implementation in recipe.implementations for recipe in recipes)
        ),
        layer=first.layer,
    )


def _part(text: str, name: str) -> tuple[int, Recipe]:
    """The number of layers that an item of a pattern stands for, and their recipe."""
    found = re.fullmatch(r'(?:(\d+)\*)?([\w.]+)', text)
    if found is None or found[1] == '0':
        raise UserError(f'zoo={name} holds {text!r}; a pattern is written 3*gla+mha')
    return int(found[1] or 1), _row(found[2])


def _row(name: str) -> Recipe:
    if '.' in name:
        return Recipe(spec=spec(named(name, 'zoo')), cite='', causal=True, streaming=True, packed=True)
    if name not in ZOO:
        raise UserError(f'there is no zoo={name}{nearest(name, ZOO)}')
    return ZOO[name]
