"""Checks of the arguments of a core, with errors that name the argument, what it was and what was expected."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.experimental import checkify


def match(core: str, known: Mapping[str, int], **arguments: tuple[jax.Array | None, str]) -> dict[str, int]:
    """Matches shapes against dimension letters and returns the size of every letter.

    Each argument is `name=(array, letters)`, letters such as `'b t h k'`; an array that is `None` is ignored. `1`
    in place of a letter is a dimension of size one. The first use of a letter, or `known`, fixes its size for
    the rest.

    Raises:
      ValueError: an array has another rank, or a letter another size, than expected.
    """
    sizes = dict(known)
    for name, (array, letters) in arguments.items():
        if array is None:
            continue
        wanted = letters.split()
        fits = len(wanted) == array.ndim
        for letter, size in zip(wanted, array.shape, strict=False):
            fits = fits and (size == 1 if letter == '1' else sizes.setdefault(letter, size) == size)
        if not fits:
            # Only sizes fixed before this argument explain what was expected of it.
            before = _sizes_before(known, arguments, name)
            sized = ', '.join(f'{letter}={before[letter]}' for letter in wanted if letter in before)
            raise ValueError(
                f'{core}: {name} has shape {array.shape}; expected {letters}' + (f' with {sized}' if sized else '')
            )
    return sizes


def _sizes_before(
    known: Mapping[str, int], arguments: Mapping[str, tuple[jax.Array | None, str]], name: str
) -> dict[str, int]:
    sizes = dict(known)
    for other, (array, letters) in arguments.items():
        if other == name:
            break
        for letter, size in zip(letters.split(), () if array is None else array.shape, strict=False):
            sizes.setdefault(letter, size)
    return sizes


def check_floating(core: str, **arguments: jax.Array | None) -> None:
    """Raises TypeError for an array that is not real floating point."""
    _check_kind(core, jnp.floating, 'a floating-point type', arguments)


def check_inexact(core: str, **arguments: jax.Array | None) -> None:
    """Raises TypeError for an array that is neither floating point nor complex."""
    _check_kind(core, jnp.inexact, 'a floating-point or complex type', arguments)


def check_integer(core: str, **arguments: jax.Array | None) -> None:
    """Raises TypeError for an array that does not hold integers."""
    _check_kind(core, jnp.integer, 'an integer type', arguments)


def _check_kind(core: str, kind: type, expected: str, arguments: Mapping[str, jax.Array | None]) -> None:
    for name, array in arguments.items():
        if array is not None and not jnp.issubdtype(array.dtype, kind):
            raise TypeError(f'{core}: {name} has type {array.dtype} and shape {array.shape}; expected {expected}')


def check_multiple(core: str, name: str, heads: int, whole: int, of: str) -> None:
    """Raises ValueError unless `heads`, the head count of `name`, divides `whole`, the head count of `of`."""
    if heads == 0 or whole % heads:
        raise ValueError(f'{core}: {name} has {heads} heads; expected a divisor of the {whole} heads of {of}')


def check_not_positive(core: str, implementation: str | None, **arguments: jax.Array | None) -> None:
    """Raises an error for log decays or log gates above 0: the past would grow, and sums of them overflow.

    It is an error under `jax.experimental.checkify`; where the reference is named, outside of `jax.jit`, a ValueError.
    """
    for name, array in arguments.items():
        if array is None or array.size == 0:
            continue
        highest = jnp.max(array)
        message = f'{core}: {name} has entries up to {{highest}}; expected at most 0'
        if implementation == 'reference' and not isinstance(highest, jax.core.Tracer) and highest > 0:
            raise ValueError(message.format(highest=highest))
        checkify.debug_check(highest <= 0, message, highest=highest)
