"""Another weight map in the place of every plain softmax of a model."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.layers import stacks
from pallas_kernels import Softmax, WeightMap


def replaced(model: Any, by: WeightMap | Callable[..., nnx.Module]) -> Any:
    """Replaces every plain softmax of a model by a map, or by `by(heads=, rngs=)`, in place, and returns the model.

    Raises `UserError` where there is none, where one has a sink or a forget gate, and for a map with variables where
    layers share theirs.
    """
    changed = 0
    for stack in stacks(model):
        for block in stack.blocks:
            repeats = jax.tree.leaves(nnx.state(block))[0].shape[0]
            for mixer in softmaxes(block):
                if isinstance(by, WeightMap):
                    mixer.weights = by
                else:
                    stack.check_own()
                    mixer.weights = nnx.data(_repeated(by(heads=mixer.heads, rngs=nnx.Rngs(0)), repeats))
                changed += 1
    if not changed:
        raise UserError('no layer of this run is attention with a plain softmax, so there is nothing to replace')
    return model


def softmaxes(block: nnx.Module) -> Iterator[Attention]:
    """The attention modules of a block that have a plain softmax."""
    for _, module in nnx.iter_modules(block):
        if isinstance(module, Attention) and module.weights == Softmax():
            if module.sink is not None or module.forget is not None:
                raise UserError(
                    'the softmax of this run has a learned sink or a forget gate, which no other weight map has'
                )
            yield module


def _repeated(part: nnx.Module, repeats: int) -> nnx.Module:
    """The module with its variables stacked over all layers at its index of the pattern."""
    graphdef, state = nnx.split(part)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.stack([leaf] * repeats), state))
