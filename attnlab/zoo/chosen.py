"""What `zoo=` of a config stands for: a row of the zoo, a pattern of rows, or a mixer of one's own."""

import dataclasses
import re

from ml_collections import ConfigDict
from ml_collections.config_flags import config_path

from attnlab.blocks.layer import joined
from attnlab.config import choose, spec, spec_of
from attnlab.errors import UserError, nearest
from attnlab.nn.initialization import Initialization
from attnlab.trust import named
from attnlab.zoo import ZOO
from attnlab.zoo.recipe import Recipe

MOST_LAYERS = 1000
"""Of one row in a pattern."""


def chosen_recipe(name: str) -> Recipe:
    """Returns the recipe called `name`.

    `gla` is that row. `3*gla+mha` is a hybrid: three layers of `gla`, one of `mha`, repeated over the depth; it claims
    what all of its rows claim, and mixers that stand alone in their own row (`mamba`) are followed by a channel mixer
    where others of the pattern are. `my_mixers.MovingAverage`, a name with a dot, is the mixer class at that import
    path, in blocks with an MLP (see `attnlab.trust` for whose classes may be named).

    Raises `UserError` for an unknown name, for a text that is no pattern, and for rows that fill layers in different
    ways.
    """
    parts = [_part(text.strip(), name) for text in name.split('+')]
    recipes = [recipe for count, recipe in parts for _ in range(count)]
    first = recipes[0]
    if len(recipes) == 1:
        return first
    layer = joined([recipe.layer for recipe in recipes])
    if layer is None:
        kinds = ' and '.join(dict.fromkeys(str(recipe.layer) for recipe in recipes))
        raise UserError(f'zoo={name} joins {kinds}, which fill layers in different ways')
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
        layer=layer,
    )


INITS = {'framework': False, 'paper': True}
"""The values of the argument `init=`: attnlab's own initial values, or those of the recipe's paper."""


def initialized(recipe: Recipe, init: str) -> tuple[Recipe, ConfigDict]:
    """Returns the recipe with the initial values of `init`, and what the linear maps of its stack start from.

    Raises `UserError` for an unknown `init`, and for a recipe whose row does not say what its paper starts from.
    """
    if not choose(INITS, 'init', init):
        return recipe, spec(Initialization)
    if recipe.start is None:
        stated = ', '.join(name for name, row in ZOO.items() if row.start is not None)
        raise UserError(f'init=paper goes with recipes whose rows say what their papers start from: {stated}')
    pattern = tuple(mixer.copy_and_resolve_references() for mixer in recipe.pattern)
    for mixer in pattern:
        for key, value in recipe.start.arguments.items():
            config_path.set_value(key, mixer, value)
    return dataclasses.replace(recipe, spec=pattern), spec_of(recipe.start.maps)


def _part(text: str, name: str) -> tuple[int, Recipe]:
    """The number of layers that an item of a pattern stands for, and their recipe."""
    found = re.fullmatch(r'(?:([0-9]{1,4})\*)?([\w.]+)', text)
    count = 0 if found is None else int(found[1] or 1)
    if found is None or not 1 <= count <= MOST_LAYERS:
        raise UserError(
            f'zoo={name} holds {text!r}; a pattern is written 3*gla+mha, with up to {MOST_LAYERS} layers of a row'
        )
    return count, _row(found[2])


def _row(name: str) -> Recipe:
    if '.' in name:
        return Recipe(spec=spec(named(name, 'zoo')), cite='', causal=True, streaming=True, packed=True)
    if name not in ZOO:
        raise UserError(f'there is no zoo={name}{nearest(name, ZOO)}')
    return ZOO[name]
