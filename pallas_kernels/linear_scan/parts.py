"""Complex numbers on devices without them: real and imaginary parts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """Complex numbers as two real arrays of one shape, with the arithmetic of a recurrence."""

    real: jax.Array
    imag: jax.Array

    def __add__(self, other: 'Pair') -> 'Pair':
        return Pair(self.real + other.real, self.imag + other.imag)

    def __mul__(self, other: 'Pair') -> 'Pair':
        return Pair(
            self.real * other.real - self.imag * other.imag,
            self.real * other.imag + self.imag * other.real,
        )


Numbers = Any
"""Real numbers, an array, or complex ones, a `Pair`."""


def split(array: jax.Array) -> Numbers:
    """Splits complex numbers into parts; real ones are unchanged."""
    return Pair(array.real, array.imag) if jnp.iscomplexobj(array) else array


def whole(numbers: Numbers) -> jax.Array:
    """Joins the parts of complex numbers; real ones are unchanged."""
    return jax.lax.complex(numbers.real, numbers.imag) if isinstance(numbers, Pair) else numbers


def ones_like(numbers: Numbers) -> Numbers:
    """As many ones."""
    if isinstance(numbers, Pair):
        return Pair(jnp.ones_like(numbers.real), jnp.zeros_like(numbers.imag))
    return jnp.ones_like(numbers)


def where[T](condition: jax.Array, numbers: T, others: T) -> T:
    """Chooses between numbers, or structures of numbers."""
    return jax.tree.map(lambda one, other: jnp.where(condition, one, other), numbers, others)
