"""attnlab: a JAX framework for research on how sequences are mixed."""

from typing import Any

from flax import nnx

from attnlab.config import build, takes
from attnlab.errors import UserError, nearest
from attnlab.mixers.mixer import Mixer
from attnlab.signature import check_names
from attnlab.zoo import ZOO

__all__ = ['ZOO', 'UserError', 'make_mixer']
__version__ = '0.1.0'


def make_mixer(name: str, dim: int, *, rngs: nnx.Rngs, **overrides: Any) -> Mixer:
    """Returns the mixer of the recipe `name`, of width `dim`, with `overrides` in place of the recipe's arguments.

    `attnlab.make_mixer('gqa', 256, heads=8, kv_heads=2, rngs=nnx.Rngs(0))`. Raises `UserError` for an unknown recipe or
    argument, a missing argument, and for a hybrid, whose layers differ and so need a stack.
    """
    if name not in ZOO:
        raise UserError(f'there is no recipe {name!r}{nearest(str(name), ZOO)}')
    recipe = ZOO[name]
    if isinstance(recipe.spec, tuple):
        raise UserError(
            f'{name!r} is a pattern of {len(recipe.spec)} layers, not one mixer: build attnlab.models.stack.Stack, '
            f"a block for each spec of attnlab.ZOO['{name}'].pattern"
        )
    taken = takes(recipe.spec) - {'dim'}
    check_names(repr(name), overrides, taken)
    missing = sorted(taken - set(recipe.spec) - set(overrides))
    if missing:
        raise UserError(f'{name!r} needs a value for {", ".join(missing)}')
    factory = build(recipe.spec)
    return factory.module(dim, **{**factory.kwargs, **overrides}, rngs=rngs)
