"""A trained model whose softmax is replaced by something else, and nothing trained again.

attnlab eval --workdir=RUN --attention=adaptive_temperature
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.analysis.loading import Loaded
from attnlab.errors import UserError
from attnlab.functional.dense import Rows, softmax
from attnlab.mixers.attention import Attention
from attnlab.nn.parameter import param
from attnlab.tasks.task import context
from attnlab.train.state import split
from attnlab.typing import DropoutKey
from pallas_kernels import AdaptiveSoftmax, ScalableSoftmax, Softmax

NAMES = 'adaptive_temperature, ssmax, quantized_BITS, or quantized_BITS_corrected'


class QuantizedSoftmax(nnx.Module):
    """The softmax rounded to multiples of `1 / (2^bits - 1)`, plus a constant for every head on every visible key.

    Rounding takes most small weights to zero, so that rows lose mass; the constant, measured on examples, gives the
    mean of it back. Pandey et al. 2023, https://arxiv.org/abs/2309.01729.
    """

    def __init__(self, *, heads: int, bits: int, rngs: nnx.Rngs):
        self.bits = bits
        self.correction = param(nnx.initializers.zeros, (heads,), axes=('heads',), group='vector', rngs=rngs)

    def __call__(self, rows: Rows, key: DropoutKey | None) -> Float[Array, 'b h t s']:
        rounded = quantized_weights(softmax(rows.scores, rows.visible), self.bits)
        correction = self.correction[...].astype(rounded.dtype)[None, :, None, None]
        return jnp.where(rows.visible, rounded + correction, 0)


def quantized_weights(weights: Float[Array, '*b s'], bits: int) -> Float[Array, '*b s']:
    """Rounds numbers of at most 1 to multiples of `1 / (2^bits - 1)`."""
    top = 2**bits - 1
    return jnp.round(weights * top) / top


def substituted(loaded: Loaded, name: str, *, rows: int = 32) -> Loaded:
    """Returns the run with another map in every attention layer that has a softmax.

    `adaptive_temperature` sharpens rows of high entropy (`pallas_kernels.AdaptiveSoftmax`). `ssmax` multiplies scores
    by `log n` over its mean up to the length trained on. `quantized_8` rounds weights to 8 bits, and
    `quantized_8_corrected` adds what rounding loses on average, measured on the first `rows` examples to train on.
    Raises `UserError` for another name, or when no layer has a softmax.
    """
    make = _maker(name, loaded.setup.length)
    replaced = _Substituted(loaded.setup.make_model, make)
    model = replaced.into(loaded.model())
    if name.endswith('_corrected'):
        _correct(model, _losses_of_mass(loaded, make(1).bits, rows))
    setup = dataclasses.replace(loaded.setup, make_model=replaced)
    return Loaded(setup, split(model)[1], loaded.step)


def _maker(name: str, length: int) -> Callable[[int], Any]:
    """From the number of heads to what takes the place of a softmax."""
    if name == 'adaptive_temperature':
        return lambda heads: AdaptiveSoftmax()
    if name == 'ssmax':
        scale = length / max(math.lgamma(length + 1), 1.0)
        return lambda heads: ScalableSoftmax(scale)
    found = re.fullmatch(r'quantized_(\d+)(_corrected)?', name)
    if found is None or int(found[1]) < 1:
        raise UserError(f'there is no attention {name!r}; it is {NAMES}')
    bits = int(found[1])
    return lambda heads: QuantizedSoftmax(heads=heads, bits=bits, rngs=nnx.Rngs(0))


@dataclasses.dataclass(frozen=True)
class _Substituted:
    """Makes a model, and then replaces its softmax."""

    make_model: Callable[[nnx.Rngs], nnx.Module]
    make: Callable[[int], Any]

    def __call__(self, rngs: nnx.Rngs) -> nnx.Module:
        return self.into(self.make_model(rngs))

    def into(self, model: Any) -> Any:
        """Changes the model, and returns it."""
        changed = 0
        for block in model.stack.blocks:
            repeats = jax.tree.leaves(nnx.state(block))[0].shape[0]
            for mixer in _softmaxes(block):
                part = self.make(mixer.heads)
                mixer.weights = nnx.data(_repeated(part, repeats)) if isinstance(part, nnx.Module) else part
                changed += 1
        if not changed:
            raise UserError('no layer of this run is attention with a plain softmax: there is nothing to replace')
        return model


def _softmaxes(block: nnx.Module) -> Iterator[Attention]:
    """The attention inside that has a plain softmax."""
    for _, module in nnx.iter_modules(block):
        if isinstance(module, Attention) and module.weights == Softmax():
            if module.sink is not None or module.forget is not None:
                raise UserError('the softmax of this run has a learned sink or a forget gate, which go with no other')
            yield module


def _repeated(part: nnx.Module, repeats: int) -> nnx.Module:
    """The module with its parameters once for every layer that shares its place in the pattern."""
    graphdef, state = nnx.split(part)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.stack([leaf] * repeats), state))


def _losses_of_mass(loaded: Loaded, bits: int, rows: int) -> list[Float[np.ndarray, 'h'] | None]:
    """The mean of what rounding takes from the weight of a visible key, by layer and head; `None` without a softmax."""
    source = loaded.setup.task.source('train', loaded.setup.length)

    @jax.jit
    def measure(model: Any, batch: Any) -> list[Array | None]:
        ctx = context(batch)
        x = model.embedding(batch['tokens'], model.dtype)
        found: list[Array | None] = []
        for block in model.stack.layers():
            mixer = getattr(block, 'mixer', None)
            if isinstance(mixer, Attention) and mixer.weights == Softmax():
                weights, seen = mixer.read_weights(block.mixer_norm(x), ctx)
                lost = jnp.where(seen[:, None], weights - quantized_weights(weights, bits), 0)
                found.append(jnp.sum(lost, axis=(0, 2, 3)) / jnp.sum(seen))
            else:
                found.append(None)
            x, _ = block(x, ctx)
        return found

    model = loaded.model()
    measured = [
        jax.device_get(measure(model, {name: array[None] for name, array in source[index].items()}))
        for index in range(rows)
    ]
    return [None if layer[0] is None else np.mean(layer, axis=0) for layer in zip(*measured, strict=True)]


def _correct(model: Any, lost: list[Float[np.ndarray, 'h'] | None]) -> None:
    """Sets the corrections of a model that has a `QuantizedSoftmax` in every layer that had a softmax."""
    blocks = model.stack.blocks
    for place, block in enumerate(blocks):
        of_place = [layer for layer in lost[place :: len(blocks)] if layer is not None]
        if of_place:
            block.mixer.weights.correction[...] = jnp.asarray(np.stack(of_place), jnp.float32)
