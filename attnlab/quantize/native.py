"""Products of numbers of eight bits, as devices have them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.quantize.formats import Floating, Format, Rounding, Stored, Symmetric
from attnlab.quantize.packing import unpacked

FLOATS = {'e4m3': jnp.float8_e4m3fn, 'e5m2': jnp.float8_e5m2}
"""Floating-point numbers of eight bits that arrays may have, by the names of formats."""


def check_native(weights: object, inputs: object) -> None:
    """Raises `UserError` for formats whose products devices do not take: one scale a row, of eight bits, both alike."""
    integers = isinstance(weights, Symmetric) and isinstance(inputs, Symmetric) and max(weights.bits, inputs.bits) <= 8
    floats = (
        isinstance(weights, Floating)
        and isinstance(inputs, Floating)
        and {weights.element, inputs.element} <= {*FLOATS}
    )
    by_row = all(getattr(each, 'scope', None) == 'row' for each in (weights, inputs))
    if not ((integers or floats) and by_row):
        raise UserError(
            f'native products are of weights and inputs of eight bits with a scale a row, --weights=int8 --inputs=int8 '
            f'or e4m3 and e5m2; they are {weights} and {inputs}'
        )


def native_product(
    x: Float[Array, 'n d'], stored: Stored, shape: tuple[int, ...], weights: Format, inputs: Rounding
) -> Float[Array, 'n f']:
    """`s_x s_w sum_d q_x q_w`, integers summed as integers of 32 bits, floating-point numbers in float32.

    Args:
      x: rows, each with a scale of its own.
      stored: of the weight, an output a row; `shape` is that of these rows, outputs and inputs.
      shape: see there.
      weights: the format of the weight.
      inputs: the format of `x`.
    """
    assert isinstance(weights, Symmetric | Floating) and isinstance(inputs, Symmetric | Floating)
    fitted = inputs.fitted(x.astype(jnp.float32))
    ours = inputs.codes(x.astype(jnp.float32), fitted)
    theirs = unpacked(stored['codes'], weights.code_bits, shape[1])
    if isinstance(weights, Symmetric) and isinstance(inputs, Symmetric):
        left, right = (
            (codes - (2 ** (format.bits - 1) - 1)).astype(jnp.int8)
            for codes, format in ((ours, inputs), (theirs, weights))
        )
        kind: Any = jnp.int32
    else:
        ones = {'scales': jnp.ones(1, jnp.float32)}
        left, right = (
            format.numbers(codes, ones, jnp.float32).astype(FLOATS[format.element])  # type: ignore[union-attr]
            for codes, format in ((ours, inputs), (theirs, weights))
        )
        kind = jnp.float32
    y = jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=kind)
    scales = fitted['scales'].astype(jnp.float32)[:, None] * stored['scales'].astype(jnp.float32)[None]
    return y.astype(jnp.float32) * scales
