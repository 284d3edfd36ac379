"""Training with few bits: linear maps whose weights and inputs are rounded in every pass, gradients straight through.

attnlab train --config=language:zoo=gla,rounding=learned4+affine8 --workdir=runs/gla-learned4
attnlab quantize --workdir=runs/gla-learned4 --out=runs/gla-learned4-packed
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float
from ml_collections import ConfigDict

from attnlab.config import build, spec, spec_of
from attnlab.errors import UserError
from attnlab.functional.straight_through import straight_through
from attnlab.nn.projections import Linear
from attnlab.quantize.formats import CALLED, Format, Rounding, Symmetric, format_called, rows_apart
from attnlab.quantize.layers import Quantization, QuantizedLinear, check_maps, check_own, over_leading, replace_maps
from attnlab.quantize.quartet import Quartet
from attnlab.signature import checked_fields
from attnlab.train.cost import weight_bytes
from attnlab.train.fit import fit_to_weights
from attnlab.train.partition import Axes
from attnlab.train.run import QUANTIZATION
from attnlab.train.setup import ROUNDING, prepare


@checked_fields
@dataclasses.dataclass(frozen=True)
class Learned:
    """`w ~ s clip(round(w / s), -n, n)`, `n = 2^(bits-1) - 1`, `s = e^theta` learned for every output.

        dw^/dw = 1 where |w / s| < n, else 0
        dw^/ds = round(w / s) - w / s where |w / s| < n, else n sign(w)

    divided, for s, by the root of n times as many weights as share it; s starts as twice the mean of |w| over the root
    of n, of weights that start at zero that of a map as usual, `fan_in_normal`. Esser et al. 2020,
    https://arxiv.org/abs/1902.08153, whose codes reach to -n - 1, and who learn s, not its logarithm: with Adam a
    learning rate of weights would move s by as much as it is large.

    Attributes:
      bits: of a code, 2 to 16.
    """

    bits: int

    def __post_init__(self) -> None:
        """Raises `UserError` for bits that there are not."""
        Symmetric(self.bits)

    @property
    def stored(self) -> Symmetric:
        """The format in which the weights are stored after training."""
        return Symmetric(self.bits)

    @property
    def top(self) -> int:
        """The largest code."""
        return 2 ** (self.bits - 1) - 1

    def first(self, weight: Float[Array, '*l d f']) -> Float[Array, '*l f']:
        """The logarithms of steps that training starts with."""
        mean = jnp.mean(jnp.abs(weight), axis=-2)
        usual = (2 / (np.pi * weight.shape[-2])) ** 0.5
        return jnp.log(2 * jnp.where(mean > 0, mean, usual) / self.top**0.5)

    def rounded(self, weight: Float[Array, 'd f'], log_step: Float[Array, 'f']) -> Float[Array, 'd f']:
        """The weight, rounded, with the gradients above."""
        return _rounded(self.stored, weight, jnp.exp(log_step))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded(format: Symmetric, weight: Float[Array, 'd f'], steps: Float[Array, 'f']) -> Float[Array, 'd f']:
    fitted = {'scales': steps}
    return format.numbers(format.codes(weight.T, fitted), fitted, weight.dtype).T


def _forward(format: Symmetric, weight: Array, steps: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rounded(format, weight, steps), (weight, steps)


def _backward(format: Symmetric, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    weight, steps = kept
    top = 2 ** (format.bits - 1) - 1
    ratio = weight / jnp.broadcast_to(steps, weight.shape)
    inside = jnp.abs(ratio) < top
    slope = jnp.where(inside, jnp.round(ratio) - ratio, top * jnp.sign(ratio))
    return jnp.where(inside, gradient, 0), jnp.sum(gradient * slope, axis=0) / (top * len(weight)) ** 0.5


_rounded.defvjp(_forward, _backward)


class RoundedLinear(Linear):
    """A linear map with parameters of full precision that are rounded where they are used, as its inputs are.

    Args:
      linear: the map, of which the parameters are taken; stacked over layers or not.
      weights: how weights are rounded, an output a row; `None`: they are not.
      inputs: how inputs are, a token a row; `None`: they are not.
    """

    def __init__(self, linear: Linear, *, weights: Format | Learned | None, inputs: Rounding | None):
        self.share(linear)
        self.how, self.input_format = weights, inputs
        self.log_code_step: Any = None
        if isinstance(weights, Learned):
            first = weights.first(linear.weight[...])
            self.log_code_step = nnx.data(nnx.Param(first, axes=(linear.axes[1],), group='vector'))

    def fit_to_weights(self) -> tuple[nnx.Param, ...]:
        """Sets steps to those that training starts with, where the weights are not those it was made with."""
        if not isinstance(self.how, Learned):
            return ()
        self.log_code_step[...] = self.how.first(self.weight[...])
        return (self.log_code_step,)

    @property
    def rows_apart(self) -> bool:
        """Whether inputs are rounded row by row."""
        return rows_apart(self.input_format)

    def inputs(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        """The inputs, rounded."""
        return x if self.input_format is None else straight_through(self.input_format.rounded(x), x)

    def matrix(self) -> Float[Array, 'd f']:
        """The weight, rounded."""
        weight = self.weight[...]
        if isinstance(self.how, Learned):
            return self.how.rounded(weight, self.log_code_step[...])
        return weight if self.how is None else straight_through(self.how.rounded(weight.T).T, weight)

    def packed(self) -> QuantizedLinear:
        """The map with its weight stored, which computes the same."""
        if not isinstance(self.how, Learned):
            return QuantizedLinear(self, weights=self.how, inputs=self.input_format)
        made = QuantizedLinear(self, weights=self.how.stored, inputs=self.input_format)
        weight, steps, format = self.weight[...], jnp.exp(self.log_code_step[...]), self.how.stored
        for name, array in over_leading(lambda *each: _stored(format, *each), weight, steps).items():
            made.stored[name][...] = array
        return made


def _stored(format: Symmetric, weight: Float[Array, 'd f'], steps: Float[Array, 'f']) -> dict[str, Array]:
    return format.stored_with(weight.T, {'scales': steps})


@checked_fields
@dataclasses.dataclass(frozen=True)
class Rounded:
    """What a model in training computes with: the maps' weights and inputs, rounded in every pass.

    Gradients are those of the numbers before they are rounded (straight through). After training `packed` makes the
    run of few bits, with the same numbers.

    Attributes:
      weights: how weights of linear maps are rounded: by a format, with its scales of the weights as they are, or with
        learned steps; `None`: they are not.
      inputs: how what they read is; `None`: it is not.
    """

    weights: Format | Learned | None = None
    inputs: Rounding | None = None

    def __post_init__(self) -> None:
        """Raises `UserError` where nothing is rounded."""
        if self.weights is None and self.inputs is None:
            raise UserError('nothing is rounded: give a format of weights or inputs, such as int4')

    def __call__(self, model: Any) -> Any:
        """Replaces every `Linear` of a model, in place; raises `UserError` for one that has none or is quantized."""
        check_maps(model)
        replace_maps(model, lambda index, linear: RoundedLinear(linear, weights=self.weights, inputs=self.inputs))
        fit_to_weights(model)
        return model

    @property
    def added(self) -> tuple[str, ...]:
        """Patterns of the variables that a model has besides those of full precision."""
        return ('*/log_code_step',) if isinstance(self.weights, Learned) else ()

    @property
    def quantization(self) -> Quantization:
        """What the packed model is, but for the steps that were learned."""
        stored = self.weights.stored if isinstance(self.weights, Learned) else self.weights
        return Quantization(stored, self.inputs)

    def packed(self, model: Any) -> Any:
        """The trained model with its weights stored in few bits, in place.

        Raises `UserError` where layers share parameters.
        """
        if self.weights is not None:
            check_own(model)
        replace_maps(model, lambda index, linear: linear.packed())  # type: ignore[attr-defined]
        return model


def packed_bytes(config: ConfigDict) -> int:
    """Bytes of the parameters and buffers of a run as `attnlab quantize` packs what was trained with few bits.

    Of any other run they are those that it keeps.
    """
    rounded = build(config[ROUNDING], f'config.{ROUNDING}') if ROUNDING in config else None
    config = config.copy_and_resolve_references()
    with config.unlocked():
        # Devices need not be those it was trained on.
        config.mesh = spec(Axes)
        if isinstance(rounded, Rounded):
            del config[ROUNDING]
            config[QUANTIZATION] = spec_of(rounded.quantization)
    return weight_bytes(prepare(config))


def rounding_called(text: str) -> Rounded | Quartet:
    """What `rounding=` of a config stands for: `int4`, `learned4`, `mxe2m1+mxe2m1` (weights, then inputs), `quartet`.

    Of the two one may be empty, `+affine8`. Raises `UserError` for an unknown format.
    """
    if text == 'quartet':
        return Quartet()
    weights, _, inputs = text.partition('+')
    return Rounded(_weights(weights) if weights else None, format_called(inputs) if inputs else None)


def _weights(text: str) -> Format | Learned:
    if (found := re.fullmatch(r'learned(\d+)', text)) is not None:
        return Learned(int(found[1]))
    made = format_called(text)
    if not isinstance(made, Format):
        raise UserError(f'{text!r} rounds what maps read; of weights choose from learnedN, {CALLED}')
    return made
