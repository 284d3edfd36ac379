"""Parts shared by the kernels of `selective_scan`: their inputs, and the calls they reject."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import precision
from pallas_kernels.selective_scan.vjp import Operands

LETTERS = ('b t d', 'b t d', 'd n', 'b t n', 'b t n', 'b d n')
"""The shapes of the operands, in their order."""


def refusal(operands: Operands, most: int) -> str | None:
    """The reason why kernels that hold `most` numbers a channel cannot serve a call, or `None`."""
    dtype = precision.accumulator(*operands)
    if dtype != jnp.float32:
        return f'it would be computed in {dtype}; expected operands of at most float32'
    if 0 in (*operands.x.shape, *operands.A.shape):
        return f'x has shape {operands.x.shape}, A {operands.A.shape}; expected no dimension of size zero'
    n = operands.A.shape[1]
    if n > most:
        return f'the state of a channel has {n} numbers; expected at most {most}'
    return None


def filled(operands: Operands, multiples: dict[str, int], types: tuple[DTypeLike, ...]) -> Operands:
    """Pads sizes to multiples with zeros, which change nothing: steps of size zero, and empty channels.

    x and dt keep their type if it is one of `types`; the rest becomes float32.
    """

    def fill(array: jax.Array, letters: str) -> jax.Array:
        if letters != 'b t d' or array.dtype not in types:
            array = array.astype(jnp.float32)
        sizes = zip(letters.split(), array.shape, strict=True)
        return jnp.pad(array, [(0, -size % multiples.get(letter, 1)) for letter, size in sizes])

    return Operands(*(fill(array, letters) for array, letters in zip(operands, LETTERS, strict=True)))


def kept(starts: jax.Array, length: int) -> jax.Array:
    """The factor of the past at every step, one or zero, float32 `b length`."""
    return jnp.pad(1 - starts.astype(jnp.float32), ((0, 0), (0, length - starts.shape[1])), constant_values=1)


def cut(gradients: Operands, operands: Operands) -> Operands:
    """Removes padding, and converts to the types of the operands."""

    def like(gradient: jax.Array, operand: jax.Array) -> jax.Array:
        return gradient[tuple(map(slice, operand.shape))].astype(operand.dtype)

    return Operands(*map(like, gradients, operands))
