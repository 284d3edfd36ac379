"""How close is equal: a matter of the type and of how many numbers were added up, and of nothing else."""

import math

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

STEP = float(np.finfo(np.float64).eps) ** (1 / 3)
"""The step of a central difference in float64 that balances truncation against rounding, about 6e-6."""


def tolerance(dtype: DTypeLike, reduction: int = 1) -> float:
    """Returns the error to expect, as a fraction of the size of the result: `16 (eps + eps_a sqrt(reduction))`.

    `eps` is the spacing of `dtype` at one, `eps_a` that of the type it is accumulated in, float32 or wider; `reduction`
    is how many numbers are added up into one. About 1e-5 in float32 and 1e-1 in bfloat16.
    """
    accumulator = jnp.promote_types(dtype, jnp.float32)
    return 16 * float(jnp.finfo(dtype).eps + jnp.finfo(accumulator).eps * math.sqrt(reduction))


def difference_tolerance() -> float:
    """Returns the error to expect of a central difference of step `STEP` in float64, about 4e-7."""
    return 1e4 * STEP**2


def assert_close(actual: ArrayLike, expected: ArrayLike, *, dtype: DTypeLike, reduction: int, what: str) -> None:
    """Raises AssertionError, naming `what`, unless every element agrees to `tolerance(dtype, reduction)`.

    Errors are measured against the root mean square of `expected`, so that an element near zero need not be exact.
    Also raises when either holds a number that is not finite.
    """
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected).astype(np.float64)
    if actual.shape != expected.shape:
        raise AssertionError(f'{what}: shape {actual.shape} instead of {expected.shape}')
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        raise AssertionError(f'{what}: not finite')
    scale = np.sqrt(np.mean(np.square(expected)))
    error = np.abs(actual - expected)
    worst = np.unravel_index(np.argmax(error), error.shape)
    bound = tolerance(dtype, reduction) * scale
    if error[worst] > bound:
        raise AssertionError(
            f'{what}: at {tuple(map(int, worst))} is {actual[worst]:.6g}, expected {expected[worst]:.6g}; '
            f'the error {error[worst]:.2g} exceeds {bound:.2g}'
        )
