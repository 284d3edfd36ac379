"""Buffers that follow what steps of training measure, such as the variances of a norm over the batch."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from attnlab.errors import UserError
from attnlab.module import Module
from attnlab.nn.parameter import Moving


def check_followed(model: nnx.Module) -> None:
    """Raises `UserError` for a part with `Moving` buffers that nothing tells of training, or that would not hear it."""
    parts = dict(nnx.iter_modules(model))
    for path, part in parts.items():
        if any(_moves((), value) for value in vars(part).values()):
            holder = parts[path[:-1]] if path else None
            place = '.'.join(map(str, path)) or 'the model'
            if not isinstance(holder, Module) or path[-1] not in holder.tells:
                raise UserError(
                    f'{place} is {type(part).__name__}, which follows the batches of training; in a '
                    f'{type(holder).__name__} it is not told of training and would never move: give it to the '
                    'norm of a Block, and another one here'
                )
            if not getattr(part, 'learns_in_training', False):
                raise UserError(
                    f'{place} is {type(part).__name__}, whose buffers follow the batches of training but whose class '
                    'does not say that it learns_in_training; set that, and define in_training'
                )


def apart(buffers: nnx.State) -> tuple[nnx.State, nnx.State]:
    """The buffers that are `Moving`, and all others."""
    moving, still = nnx.split_state(buffers, _moves, ...)
    return moving, still


def moved(moving: nnx.State, sums: nnx.State) -> nnx.State:
    """The moving buffers after a step that measured what is summed; one that nothing measured stays as it is."""

    def move(leaf: nnx.Variable, total: nnx.Variable) -> nnx.Variable:
        rule: Moving = leaf.get_metadata()['moving']

        def value(old: Array, total: Array) -> Array:
            count = total[..., -1:]
            after = rule.decay * old + (1 - rule.decay) * total / jnp.maximum(count, 1)
            return jnp.where(count > 0, after, old)

        return jax.tree.map(value, leaf, total)

    return jax.tree.map(move, moving, sums, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _moves(path: object, variable: object) -> bool:
    del path
    return isinstance(variable, nnx.Variable) and variable.get_metadata().get('moving') is not None
