"""attnlab: a JAX framework for research on how sequences are mixed."""

from typing import Any

from flax import nnx

from attnlab.config import Factory, build, takes
from attnlab.context import Context
from attnlab.errors import UserError, nearest
from attnlab.mixers.combine import within
from attnlab.mixers.mixer import Mixer
from attnlab.signature import check_names, parameters
from attnlab.zoo import ZOO

__all__ = ['ZOO', 'Context', 'UserError', 'make_mixer']
__version__ = '0.1.0'


def make_mixer(name: str, dim: int, *, rngs: nnx.Rngs, **overrides: Any) -> Mixer:
    """Returns the mixer of the recipe `name`, of width `dim`, with `overrides` in place of the recipe's arguments.

    `attnlab.make_mixer('gqa', 256, heads=8, kv_heads=2, rngs=nnx.Rngs(0))`. Where a recipe puts mixers side by side, an
    argument that the whole does not take goes to every inner mixer that takes it. Raises `UserError` for an unknown
    recipe or argument, a missing argument, and for a hybrid, whose layers differ and so need a stack.
    """
    if name not in ZOO:
        raise UserError(f'there is no recipe {name!r}{nearest(str(name), ZOO)}')
    recipe = ZOO[name]
    if isinstance(recipe.spec, tuple):
        raise UserError(
            f'{name!r} is a pattern of {len(recipe.spec)} layers, not one mixer: build attnlab.models.stack.Stack, '
            f"a block for each spec of attnlab.ZOO['{name}'].pattern"
        )
    mixers = (recipe.spec,) if 'mixers' in overrides else within(recipe.spec)
    check_names(repr(name), overrides, frozenset().union(*map(takes, mixers)) - {'dim'})
    missing = sorted({given for mixer in mixers for given in takes(mixer) - set(mixer)} - {'dim'} - set(overrides))
    if missing:
        raise UserError(f'{name!r} needs a value for {", ".join(missing)}')
    return _overridden(build(recipe.spec), overrides)(dim, rngs=rngs)


def _overridden(factory: Factory, overrides: dict[str, Any]) -> Factory:
    """The factory with the arguments that it takes, and with the others in the mixers side by side in it."""
    own = {name: value for name, value in overrides.items() if name in parameters(factory.module)}
    kwargs = {**factory.kwargs, **own}
    if 'mixers' in factory.kwargs and 'mixers' not in own:
        rest = {name: value for name, value in overrides.items() if name not in own}
        kwargs['mixers'] = tuple(_overridden(inner, rest) for inner in factory.kwargs['mixers'])
    return Factory(factory.module, kwargs)
