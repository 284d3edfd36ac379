"""Tolerances: they depend on the type and the reduction length, and on nothing else."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from attnlab.functional.precision import wide_dtype

STEP = float(np.finfo(np.float64).eps) ** (1 / 3)
"""The step of a central difference in float64 that balances truncation against rounding, about 6e-6."""


def tolerance(dtype: DTypeLike, reduction: int = 1) -> float:
    """Returns the error to expect, as a fraction of the size of the result: `16 (eps + eps_a sqrt(reduction))`.

    `eps` is the spacing of `dtype` at one, `eps_a` that of the type it is accumulated in, float32 or wider; `reduction`
    is the number of terms in a sum. About 1e-5 in float32 and 1e-1 in bfloat16.
    """
    accumulator = wide_dtype(dtype)
    return 16 * float(jnp.finfo(dtype).eps + jnp.finfo(accumulator).eps * math.sqrt(reduction))


def difference_tolerance() -> float:
    """Returns the error to expect of a central difference of step `STEP` in float64, about 4e-7."""
    return 1e4 * STEP**2


def assert_close(actual: ArrayLike, expected: ArrayLike, *, dtype: DTypeLike, reduction: int, what: str) -> None:
    """Raises AssertionError, naming `what`, unless every element agrees to `tolerance(dtype, reduction)`.

    Errors are measured against the root mean square of `expected`, so that an element near zero need not be exact.
    Also raises when either holds a number that is not finite.
    """
    if np.shape(actual) != np.shape(expected):
        raise AssertionError(f'{what}: shape {np.shape(actual)} instead of {np.shape(expected)}')
    if not (_finite(actual) and _finite(expected)):
        raise AssertionError(f'{what}: not finite')
    worst = worst_error(actual, expected, dtype=dtype, reduction=reduction)
    if worst.error > worst.bound:
        raise AssertionError(
            f'{what}: at {worst.place} is {worst.actual:.6g}, expected {worst.expected:.6g}; '
            f'the error {worst.error:.2g} exceeds {worst.bound:.2g}'
        )


class Worst(NamedTuple):
    """The element of an array with the worst error: its index and value, and the expected error."""

    place: tuple[int, ...]
    actual: float
    expected: float
    error: float
    bound: float


def worst_error(actual: ArrayLike, expected: ArrayLike, *, dtype: DTypeLike, reduction: int) -> Worst:
    """Returns the element of `actual` with the largest error, infinite if not finite, and the bound on it."""
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected).astype(np.float64)
    error = np.abs(actual - expected)
    error = np.where(np.isfinite(error), error, np.inf)
    place = np.unravel_index(np.argmax(error), error.shape)
    bound = tolerance(dtype, reduction) * np.sqrt(np.mean(np.square(expected)))
    return Worst(tuple(map(int, place)), *map(float, (actual[place], expected[place], error[place], bound)))


def _finite(array: ArrayLike) -> bool:
    return bool(np.isfinite(np.asarray(array).astype(np.float64)).all())
