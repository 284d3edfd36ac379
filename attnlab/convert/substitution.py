"""Replaces the softmax of a trained model by another weight map, without training.

attnlab eval --workdir=RUN --attention=adaptive_temperature
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.blocks.block import mixer_of, steps
from attnlab.errors import UserError
from attnlab.functional.dense import ScoreRows, softmax
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.predictor import one_stack
from attnlab.module import Module
from attnlab.nn.parameter import param
from attnlab.nn.temperatures import log_length_scale
from attnlab.runs.loading import Loaded
from attnlab.signature import checked_fields
from attnlab.tasks.task import context
from attnlab.typing import DropoutKey
from pallas_kernels import AdaptiveSoftmax, ScalableSoftmax, Softmax, WeightMap

NAMES = 'adaptive_temperature, ssmax, quantized_BITS, or quantized_BITS_corrected'


class QuantizedSoftmax(Module):
    """The softmax rounded to multiples of `1 / (2^bits - 1)`, plus a constant for every head on every visible key.

    Rounding sets most small weights to zero, so that rows lose mass; the constant, measured on examples, restores it
    on average. Pandey et al. 2023, https://arxiv.org/abs/2309.01729.
    """

    def __init__(self, *, heads: int, bits: int, rngs: nnx.Rngs):
        self.bits = bits
        self.correction = param(nnx.initializers.zeros, (heads,), axes=('heads',), group='vector', rngs=rngs)

    def __call__(self, rows: ScoreRows, key: DropoutKey | None) -> Float[Array, 'b h t s']:
        rounded = quantized_weights(softmax(rows.scores, rows.visible), self.bits)
        correction = self.correction[...].astype(rounded.dtype)[None, :, None, None]
        return jnp.where(rows.visible, rounded + correction, 0)


def quantized_weights(weights: Float[Array, '*b s'], bits: int) -> Float[Array, '*b s']:
    """Rounds numbers in [0, 1] to multiples of `1 / (2^bits - 1)`."""
    top = 2**bits - 1
    return jnp.round(weights * top) / top


def substituted(loaded: Loaded, name: str, *, rows: int = 32) -> Loaded:
    """Returns the run with another weight map in every attention layer that has a softmax.

    `adaptive_temperature` sharpens rows of high entropy (`pallas_kernels.AdaptiveSoftmax`). `ssmax` multiplies scores
    by `log n` divided by its mean over lengths up to the training length. `quantized_8` rounds weights to 8 bits, and
    `quantized_8_corrected` adds the mean loss of mass, measured on the first `rows` training examples.
    Raises `UserError` for another name, or when no layer has a softmax.
    """
    by = replacement(name, loaded.setup.length)
    result = loaded.altered(functools.partial(replaced, by=by))
    if isinstance(by, Rounding) and by.corrected:
        lost = _losses_of_mass(loaded, by.bits, rows)
        result = result.altered(functools.partial(_corrected, lost=lost))
    return result


@checked_fields
@dataclasses.dataclass(frozen=True)
class Rounding:
    """A softmax rounded to `bits` bits; with `corrected` the mean rounding error is added back."""

    bits: int
    corrected: bool

    def __call__(self, *, heads: int, rngs: nnx.Rngs) -> QuantizedSoftmax:
        """Returns the map, with corrections of zero."""
        return QuantizedSoftmax(heads=heads, bits=self.bits, rngs=rngs)


def replacement(name: str, length: int) -> WeightMap | Rounding:
    """Returns the map of a name in `NAMES`, for a run trained on rows of `length`; raises `UserError` for others."""
    if name == 'adaptive_temperature':
        return AdaptiveSoftmax()
    if name == 'ssmax':
        return ScalableSoftmax(log_length_scale(length))
    found = re.fullmatch(r'quantized_(\d+)(_corrected)?', name)
    if found is None or int(found[1]) < 1:
        raise UserError(f'there is no attention {name!r}; choose from {NAMES}')
    return Rounding(bits=int(found[1]), corrected=found[2] is not None)


def replaced(model: Any, by: WeightMap | Rounding) -> Any:
    """Replaces every plain softmax of a model by a map, in place, and returns the model.

    Raises `UserError` when there is none, or one with a sink or a forget gate.
    """
    changed = 0
    for block in one_stack(model).blocks:
        repeats = jax.tree.leaves(nnx.state(block))[0].shape[0]
        for mixer in _softmaxes(block):
            if isinstance(by, WeightMap):
                mixer.weights = by
            else:
                mixer.weights = nnx.data(_repeated(by(heads=mixer.heads, rngs=nnx.Rngs(0)), repeats))
            changed += 1
    if not changed:
        raise UserError('no layer of this run is attention with a plain softmax, so there is nothing to replace')
    return model


def _softmaxes(block: nnx.Module) -> Iterator[Attention]:
    """The attention modules of a model that have a plain softmax."""
    for _, module in nnx.iter_modules(block):
        if isinstance(module, Attention) and module.weights == Softmax():
            if module.sink is not None or module.forget is not None:
                raise UserError(
                    'the softmax of this run has a learned sink or a forget gate, which no other weight map has'
                )
            yield module


def _repeated(part: nnx.Module, repeats: int) -> nnx.Module:
    """The module with its parameters stacked over all layers at its index of the pattern."""
    graphdef, state = nnx.split(part)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.stack([leaf] * repeats), state))


def _losses_of_mass(loaded: Loaded, bits: int, rows: int) -> list[Float[np.ndarray, '_'] | None]:
    """The mean rounding error of the weight of a visible key, by layer and head; `None` without a softmax."""
    source = loaded.setup.task.source('train', loaded.setup.length)

    @loaded.setup.jit
    def measure(model: Any, batch: Any) -> list[Array | None]:
        ctx = model.context(context(batch), batch['tokens'])
        stack = one_stack(model)
        streams = stack.residual.open(model.embed(batch['tokens'], ctx))
        found: list[Array | None] = []
        for block in stack.layers():
            mixer = mixer_of(block)
            taken = list(steps(block, streams, ctx))
            if isinstance(mixer, Attention) and mixer.weights == Softmax():
                weights, seen = mixer.read_weights(taken[0].normed, ctx)
                lost = jnp.where(seen[:, None], weights - quantized_weights(weights, bits), 0)
                found.append(jnp.sum(lost, axis=(0, 2, 3)) / jnp.sum(seen))
            else:
                found.append(None)
            streams = taken[-1].streams
        return found

    model = loaded.model()
    measured = [
        jax.device_get(measure(model, {name: array[None] for name, array in source[index].items()}))
        for index in range(rows)
    ]
    return [None if layer[0] is None else np.mean(layer, axis=0) for layer in zip(*measured, strict=True)]


def _corrected(model: Any, lost: list[Float[np.ndarray, '_'] | None]) -> Any:
    """Sets the corrections of a model that has a `QuantizedSoftmax` in every layer that had a softmax; returns it."""
    blocks = model.stack.blocks
    for place, block in enumerate(blocks):
        of_place = [layer for layer in lost[place :: len(blocks)] if layer is not None]
        if of_place:
            block.mixer.weights.correction[...] = jnp.asarray(np.stack(of_place), jnp.float32)
    return model
