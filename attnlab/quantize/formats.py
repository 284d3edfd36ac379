"""Simulated quantization of a trained model: rounding to few bits, computed in floating point."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.module import Module
from attnlab.nn.projections import Linear


def quantized_weight(weight: Float[Array, 'd f'], bits: int) -> Float[Array, 'd f']:
    """Rounds to the nearest of `2^bits - 1` evenly spaced numbers symmetric about zero, with one scale per matrix."""
    top = 2 ** (bits - 1) - 1
    scale = _step(jnp.max(jnp.abs(weight)), top)
    return jnp.clip(jnp.round(weight / scale), -top, top) * scale


def quantized_activations(x: Float[Array, '*b d'], bits: int) -> Float[Array, '*b d']:
    """Rounds to the nearest of `2^bits` evenly spaced numbers from the minimum to the maximum, zero among them."""
    top = 2**bits - 1
    low, high = jnp.minimum(jnp.min(x), 0), jnp.maximum(jnp.max(x), 0)
    scale = _step(high - low, top)
    zero = jnp.round(-low / scale)
    return (jnp.clip(jnp.round(x / scale) + zero, 0, top) - zero) * scale


def _step(reach: Float[Array, ''], steps: int) -> Float[Array, '']:
    return jnp.where(reach > 0, reach / steps, 1)


class QuantizedLinear(Module):
    """A linear map whose weights and inputs are rounded to `bits` bits, with ranges taken from the call.

    So the rounding of a token depends on the others of its call; a single token, as in decoding, loses less.
    """

    def __init__(self, linear: Linear, bits: int):
        self.linear = linear
        self.bits = bits

    def __call__(self, x: Float[Array, '*b d']) -> Float[Array, '*b f']:
        return self.linear.apply(self.inputs(x), self.matrix())

    def inputs(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        """The inputs, rounded."""
        return quantized_activations(x, self.bits)

    def matrix(self) -> Float[Array, 'd f']:
        """The weights, rounded."""
        return quantized_weight(self.linear.weight[...], self.bits)


def quantized(model: nnx.Module, bits: int) -> nnx.Module:
    """Replaces every `Linear` of a model by a `QuantizedLinear`, in place, and returns the model.

    Embedding, head and everything that is not a `Linear` are unchanged (as in Bondarenko et al. 2023,
    https://arxiv.org/abs/2306.12929, whose last layer is not rounded either). Raises `UserError` for fewer than 2 bits.
    """
    if bits < 2:
        raise UserError(f'bits is {bits}; it must be at least 2')
    for _, module in list(nnx.iter_modules(model)):
        if isinstance(module, QuantizedLinear):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, Linear):
                setattr(module, name, QuantizedLinear(value, bits))
    return model
