"""What `zoo=` of a config stands for: a row of the zoo, a pattern of rows, or a mixer of your own."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

from ml_collections import ConfigDict

from attnlab.blocks.block import Block
from attnlab.blocks.layer import POINTS, MixerAndMLP, MixersAlone, check_points, joined
from attnlab.config import choose, set_value, spec, spec_of
from attnlab.errors import UserError, nearest
from attnlab.mixers.combine import Backwards, SideBySide, within
from attnlab.nn.initialization import Initialization
from attnlab.nn.preludes import Activation, Canon, ShortConv
from attnlab.trust import named
from attnlab.zoo import ZOO
from attnlab.zoo.recipe import Hierarchy, Recipe, Start

BOTH = 'bi_'
"""Before the name of a causal row: that row both ways."""

MOST_LAYERS = 1000
"""Of one row in a pattern."""


def chosen_recipe(name: str) -> Recipe:
    """Returns the recipe called `name`.

    `gla` is that row. `3*gla+mha` is a hybrid: three layers of `gla`, one of `mha`, repeated over the depth. It claims
    what all of its rows claim; a mixer that has no channel mixer in its own row (`mamba`) is followed by one if other
    rows of the pattern are. `bi_mamba` is the causal row `mamba` read both ways (`both_ways`).
    `my_mixers.MovingAverage`, a name with a dot, is the mixer class at that import path, in blocks with an MLP
    (`attnlab.trust` says which classes may be named).

    Raises `UserError` for an unknown name, a text that is not a pattern, and rows that cannot be combined: they fill
    layers in different ways, or some are only causal and others only bidirectional.
    """
    parts = [_part(text.strip(), name) for text in name.split('+')]
    recipes = [recipe for count, recipe in parts for _ in range(count)]
    first = recipes[0]
    if len(recipes) == 1:
        return first
    if not (all(recipe.causal for recipe in recipes) or all(recipe.bidirectional for recipe in recipes)):
        raise UserError(f'zoo={name} joins mixers that are only causal with mixers that are only bidirectional')
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


def next_token_recipe(name: str) -> Recipe:
    """Returns the recipe called `name`, as `chosen_recipe` does. Raises `UserError` where it is only bidirectional."""
    recipe = chosen_recipe(name)
    if not recipe.causal:
        raise UserError(
            f'zoo={name} is only bidirectional and cannot predict the next token; --config={recipe.config}:zoo={name} '
            'trains it to classify'
        )
    return recipe


def sequence_recipe(name: str) -> Recipe:
    """Returns the recipe called `name`, as `chosen_recipe` does. Raises `UserError` where it needs tokens on a grid."""
    recipe = chosen_recipe(name)
    if recipe.grid:
        raise UserError(
            f'zoo={name} mixes tokens on a grid, not in a sequence; --config=images:zoo={name} trains it, and '
            f'--config=series:inputs=grid,zoo={name} on variates by times'
        )
    return recipe


def padded_recipe(recipe: Recipe, name: str) -> Recipe:
    """Returns the recipe. Raises `UserError` if it takes no segments, by which padding is told apart."""
    if not recipe.packed:
        raise UserError(
            f'zoo={name} takes no segments, which tell the padding of a row apart; --config=language:zoo={name} trains '
            'it, on rows without any'
        )
    return recipe


def convolved(recipe: Recipe, conv: str) -> Recipe:
    """Returns the recipe with the short convolutions that `conv` names, so that compared recipes have the same ones.

    - `0`: those of its row.
    - `none`: none; their activations stay, and so does a mixer that is itself a convolution (`base_conv`).
    - `1`: layers alternate between a gated short convolution (`base_conv`) and the recipe (Arora et al. 2023,
      https://arxiv.org/abs/2312.04927).
    - any of `ABCD`: residual convolutions at these points, before mixers, within them, before channel mixers and within
      these (Allen-Zhu 2025, https://ssrn.com/abstract=5240330). A mixer that has a prelude of its own at B, such as a
      convolution, keeps that one.
    - `canon`: all four, or A and B where there are no channel mixers.

    They are causal even in bidirectional layers. Some mixers have no point B: those that make keys and values from a
    latent (`mla`) or shift tokens there (`rwkv6`, `rwkv7`), and those whose projections are parts of one map (`s4`,
    most mixers of images). `ACD`, or `A` without channel mixers, suits all blocks but those that wire their own
    branches.

    Raises `UserError` for another `conv`, for recipes whose layers or mixers lack the points asked for, and for `none`
    with mixers that contain a convolution that no argument removes.
    """
    if conv == '0':
        return recipe
    if conv == 'none':
        for mixer in (each for whole in recipe.pattern for each in within(whole)):
            if getattr(named(mixer.target, 'zoo'), 'convolves', False):
                raise UserError(
                    f'conv=none: {mixer.target} keeps a convolution, which is no argument of it; choose conv=0'
                )
        return dataclasses.replace(recipe, spec=tuple(_with_prelude(mixer, _bare) for mixer in recipe.pattern))
    if conv == '1':
        return dataclasses.replace(recipe, spec=ZOO['base_conv'].pattern + recipe.pattern)
    points = POINTS if conv == 'canon' else conv
    if not points or len(set(points)) < len(points) or not set(points) <= set(POINTS):
        raise UserError(f'conv={conv} must be 0, 1, none, canon, or points among {POINTS}, each at most once')
    if not isinstance(recipe.layer, MixerAndMLP | MixersAlone):
        raise UserError(f'conv={conv} goes with recipes that are mixers; blocks that wire their own branches take none')
    check_points(points, not isinstance(recipe.layer, MixersAlone))
    pattern = recipe.pattern
    if 'B' in points:
        for mixer in pattern:
            if not any('prelude' in each for each in within(mixer)):
                raise UserError(
                    f'point B of conv={conv} needs a mixer with a prelude; {mixer.target} has none: choose conv=ACD, '
                    'or conv=A for layers without channel mixers'
                )
        pattern = tuple(_with_prelude(mixer, lambda prelude: prelude or spec(Canon)) for mixer in pattern)
    return dataclasses.replace(recipe, spec=pattern, layer=dataclasses.replace(recipe.layer, points=points))


def padded_sequence_recipe(name: str, conv: str) -> Recipe:
    """Returns the recipe called `name` for sequences that may be padded, with the short convolutions of `conv`.

    Raises `UserError` for what `sequence_recipe`, `padded_recipe` and `convolved` refuse.
    """
    return convolved(padded_recipe(sequence_recipe(name), name), conv)


def set_norm(blocks: Sequence[ConfigDict], norm: ConfigDict, chosen: Mapping[str, str]) -> None:
    """Sets the norm of blocks to the `norm=` of a config, in place. Raises `UserError` if some have their own."""
    if any(block.target != spec(Block).target for block in blocks):
        raise UserError(
            f'norm={chosen["norm"]} is for blocks that take one; those of zoo={chosen["zoo"]} have their own'
        )
    for block in blocks:
        block.norm = norm.copy_and_resolve_references()


def _with_prelude(mixer: ConfigDict, change: Callable[[ConfigDict | None], ConfigDict | None]) -> ConfigDict:
    mixer = mixer.copy_and_resolve_references()
    if 'prelude' in mixer:
        mixer.prelude = change(mixer.prelude)
    if 'mixers' in mixer:
        mixer.mixers = tuple(_with_prelude(inner, change) for inner in mixer.mixers)
    return mixer


def _bare(prelude: ConfigDict | None) -> ConfigDict | None:
    """What is left of a prelude without its convolution."""
    if prelude is None or prelude.target != spec(ShortConv).target:
        return prelude
    return spec(Activation, name=prelude.activation or 'identity')


INITS = {'framework': False, 'paper': True}
"""The values of the argument `init=`: attnlab's own initial values, or those of the recipe's paper, together with what
the paper varies between layers."""


def initialized(recipe: Recipe, init: str) -> tuple[Recipe, ConfigDict]:
    """Returns the recipe with the initial values that `init` names, and the initialization of its stack's linear maps.

    Raises `UserError` for an unknown `init`, and for a recipe whose row does not have its paper's initial values.
    """
    if not choose(INITS, 'init', init):
        return recipe, spec(Initialization)
    if recipe.start is None:
        stated = ', '.join(name for name, row in ZOO.items() if row.start is not None)
        raise UserError(f'init=paper goes with recipes whose rows say what their papers start from: {stated}')
    pattern = tuple(mixer.copy_and_resolve_references() for mixer in recipe.pattern)
    for mixer in pattern:
        for key, value in recipe.start.arguments.items():
            set_value(mixer, key, value)
    hierarchy = _begun(recipe.hierarchy, recipe.start)
    begun = dataclasses.replace(recipe, spec=pattern, by_layer=recipe.start.by_layer, hierarchy=hierarchy)
    return begun, spec_of(recipe.start.maps)


def _begun(hierarchy: Hierarchy | None, start: Start) -> Hierarchy | None:
    """The stages with what maps between them, and that of pixels, start from."""
    if hierarchy is None:
        return None
    merge, stem = (each.copy_and_resolve_references() for each in (hierarchy.merge, hierarchy.stem))
    for each, drawn in ((merge, start.merge), (stem, start.stem)):
        if drawn is not None:
            each.start = spec_of(drawn)
    return dataclasses.replace(hierarchy, merge=merge, stem=stem)


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
    if name in ZOO:
        return ZOO[name]
    if name.startswith(BOTH) and name.removeprefix(BOTH) in ZOO:
        return both_ways(name.removeprefix(BOTH))
    raise UserError(f'there is no zoo={name}{nearest(name, ZOO)}')


def both_ways(name: str) -> Recipe:
    """Returns the row called `name` with two of every mixer, one of which reads documents from their end.

    Each has its own parameters, and their outputs are added. Schuster and Paliwal 1997,
    https://doi.org/10.1109/78.650093. Raises `UserError` for a row that is not causal, that has a bidirectional form
    itself, or whose layers are not mixers in blocks.
    """
    recipe = ZOO[name]
    if recipe.bidirectional:
        raise UserError(f'zoo={BOTH}{name}: {name} has a bidirectional form of its own; choose zoo={name}')
    if not isinstance(recipe.layer, MixerAndMLP | MixersAlone):
        raise UserError(f'zoo={BOTH}{name}: layers of {name} wire their own branches; choose a row of mixers')
    return dataclasses.replace(
        recipe,
        spec=tuple(
            spec(SideBySide, mixers=(mixer, spec(Backwards, mixers=(mixer,))), scales=(1.0, 1.0))
            for mixer in recipe.pattern
        ),
        cite=f'{recipe.cite}; Schuster and Paliwal 1997, https://doi.org/10.1109/78.650093',
        causal=False,
        bidirectional=True,
        streaming=False,
        sequence=False,
        start=None,
    )
