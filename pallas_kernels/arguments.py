"""Checks of the arguments of a core, with errors that name the argument, what it was and what was expected."""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

_CHECKING: contextvars.ContextVar[bool] = contextvars.ContextVar('checking', default=False)


@contextlib.contextmanager
def checking_values() -> Iterator[None]:
    """Has calls that are traced inside the `with` block check values, as errors of `jax.experimental.checkify`.

        with pallas_kernels.checking_values():
            error, outputs = jax.jit(checkify.checkify(function))(arrays)

    Programs traced elsewhere hold no such check. It would do nothing there, yet slow them down: JAX passes arrays to a
    program with a check one by one from Python, a millisecond a step for a model of a hundred arrays. A function that
    was compiled before is not traced again, and so gains no checks.
    """
    token = _CHECKING.set(True)
    try:
        yield
    finally:
        _CHECKING.reset(token)


def checked[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """The same function, which checks its arguments against its annotations first.

    It raises TypeError for a value of another type (numbers and truth values are told apart, and whole numbers pass for
    real ones), and ValueError for what is not a number.
    """
    signature = inspect.signature(function)
    hints = functools.cache(lambda: typing.get_type_hints(function))
    name = function.__name__

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        for argument, value in signature.bind(*args, **kwargs).arguments.items():
            if argument in hints():
                check(f'{name}: {argument}', value, hints()[argument])
        return function(*args, **kwargs)

    return called


def check_fields(value: Any) -> None:
    """Checks the fields of a dataclass as `checked` does arguments."""
    hints = typing.get_type_hints(type(value))
    for field in dataclasses.fields(value):
        check(f'{type(value).__name__}: {field.name}', getattr(value, field.name), hints[field.name])


def check(path: str, value: Any, hint: Any) -> None:
    """Raises TypeError for a value that a type hint does not admit, ValueError for a float that is not a number.

    Numbers must not be traced: they are constants of programs, and have no gradients.
    """
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if not any(_admits(member, value) for member in members):
        expected = ' or '.join(_called(member) for member in members)
        if float in members and isinstance(value, jax.core.Tracer):
            raise TypeError(
                f'{path} is traced by JAX; expected {expected}; multiply an array, such as q, by what varies'
            )
        shown = repr(value) if len(repr(value)) < 60 else 'a value'
        raise TypeError(f'{path} is {shown}, of type {type(value).__name__}; expected {expected}')
    # Of numbers of every type, NaN alone is not equal to itself.
    if float in members and _is_number(value) and value != value:
        raise ValueError(f'{path} is nan; expected a number')


def _admits(hint: Any, value: Any) -> bool:
    if hint is jax.Array:
        return hasattr(value, 'shape') and hasattr(value, 'dtype')
    if hint is float:
        return _is_number(value)
    if hint is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    kind = typing.get_origin(hint) or hint
    if kind is tuple and (inside := typing.get_args(hint)):
        same = inside[1:] == (...,)
        wanted = inside[:1] * len(value) if same and isinstance(value, tuple) else inside
        return (
            isinstance(value, tuple)
            and 0 < len(value) == len(wanted)
            and all(_admits(each, item) for each, item in zip(wanted, value, strict=True))
        )
    return not isinstance(kind, type) or isinstance(value, kind)


def _is_number(value: Any) -> bool:
    """Whether a value is real, an array of one number among others, and not traced.

    Of a traced one, a constant of the forms, a gradient would escape from some and be missing in others.
    """
    if isinstance(value, jax.core.Tracer | bool):
        return False
    if hasattr(value, 'shape') and hasattr(value, 'dtype'):
        return value.ndim == 0 and any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer))
    return isinstance(value, numbers.Real)


def _called(hint: Any) -> str:
    names = {jax.Array: 'an array', types.NoneType: 'None', int: 'a whole number', float: 'a number', bool: 'a bool'}
    return names.get(hint) or (str(hint) if typing.get_origin(hint) else str(hint.__name__))


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


def check_bool(core: str, **arguments: jax.Array | None) -> None:
    """Raises TypeError for an array that does not hold truth values."""
    for name, array in arguments.items():
        if array is not None and array.dtype != jnp.bool_:
            raise TypeError(f'{core}: {name} has type {array.dtype} and shape {array.shape}; expected bool')


def _check_kind(core: str, kind: type, expected: str, arguments: Mapping[str, jax.Array | None]) -> None:
    for name, array in arguments.items():
        if array is not None and not jnp.issubdtype(array.dtype, kind):
            raise TypeError(f'{core}: {name} has type {array.dtype} and shape {array.shape}; expected {expected}')


def check_channels(core: str, channels: int) -> None:
    """Raises ValueError for keys without channels, whose products have no scale."""
    if channels == 0:
        raise ValueError(f'{core}: q and k have 0 channels; expected at least 1')


def check_multiple(core: str, name: str, heads: int, whole: int, of: str) -> None:
    """Raises ValueError unless `heads`, the head count of `name`, divides `whole`, the head count of `of`."""
    if heads == 0 or whole % heads:
        raise ValueError(f'{core}: {name} has {heads} heads; expected a divisor of the {whole} heads of {of}')


def check_not_positive(core: str, implementation: str | None, **arguments: jax.Array | None) -> None:
    """Raises an error for log decays or log gates above 0: the past would grow, and sums of them overflow.

    Where the reference is named, outside of `jax.jit`, it is a ValueError; inside of `checking_values` one of checkify.
    """
    if implementation != 'reference' and not _CHECKING.get():
        return
    for name, array in arguments.items():
        if array is None or array.size == 0:
            continue
        highest = jnp.max(array)
        message = f'{core}: {name} has entries up to {{highest}}; expected at most 0'
        if implementation == 'reference' and not isinstance(highest, jax.core.Tracer) and highest > 0:
            raise ValueError(message.format(highest=highest))
        if _CHECKING.get():
            checkify.debug_check(highest <= 0, message, highest=highest)


def rows_refusal(x: jax.Array) -> str | None:
    """The reason why kernels that take rows cannot serve an array, or `None`."""
    if x.size == 0:
        return f'x has shape {x.shape}; expected an array with entries'
    if x.dtype.itemsize > 4:
        return f'x has type {x.dtype}; expected float32, bfloat16 or float16'
    return None


def class_numbers(labels: jax.Array) -> jax.Array:
    """Labels of any integer type in int32, those beyond it as its smallest or its largest number."""
    known, held = jnp.iinfo(labels.dtype), jnp.iinfo(jnp.int32)
    # By its own method: `jnp` would cut what NumPy has in 64 bits first.
    return jnp.asarray(labels.clip(max(known.min, held.min), min(known.max, held.max))).astype(jnp.int32)


def check_classes(core: str, labels: jax.Array, classes: int) -> None:
    """Raises ValueError for labels, int32, beyond the classes, from `classes` up or below `-classes`.

    Under `jax.jit`, where their values are not at hand, it is an error of checkify inside of `checking_values`, and
    elsewhere the loss of such a label is NaN.
    """
    if labels.size == 0:
        return
    least, most = jnp.min(labels), jnp.max(labels)
    message = f'{core}: labels has entries from {{least}} to {{most}}; expected 0 to {classes - 1}'
    fits = (most < classes) & (least >= -classes)
    if not isinstance(fits, jax.core.Tracer) and not fits:
        raise ValueError(message.format(least=least, most=most))
    if _CHECKING.get():
        checkify.debug_check(fits, message, least=least, most=most)
