"""What a constructor or function takes, and whether a value fits."""

import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from attnlab.errors import UserError, nearest

ABSENT = inspect.Parameter.empty
PLAIN = (int, float, str, bool, tuple, types.NoneType)


FROM_ZERO = frozenset(
    {'antialias', 'confirm', 'dash', 'distractors', 'held_out', 'initial', 'label', 'layers', 'links', 'local'}
    | {'margin', 'offset', 'padding', 'repeated', 'rewrites', 'seed', 'sinks', 'startup', 'step'}
)
"""Parameters that count something there may be none of; every other whole number is a size, which begins at 1."""

MESH = frozenset({'data', 'fsdp', 'sequence', 'tensor'})
"""Axes of a mesh, one of which may be -1."""


class Parameter(NamedTuple):
    """The type hint of a parameter, and its default or ABSENT."""

    kind: Any
    default: Any


def parameters(target: Callable[..., Any]) -> dict[str, Parameter]:
    """The parameters of `target` by name, without `self` and `rngs`.

    A Flax module's class signature is `(*args, **kwargs)`, so of a class `__init__` is read.
    """
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    hints = typing.get_type_hints(function)
    named = inspect.signature(function).parameters.items()
    return {name: Parameter(hints.get(name, Any), p.default) for name, p in named if name not in ('self', 'rngs')}


def members(kind: Any) -> tuple[Any, ...]:
    """The types a hint admits: `int | None` gives (int, NoneType), `tuple[int, ...]` gives (tuple,)."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return tuple(typing.get_origin(k) or k for k in (typing.get_args(kind) if union else (kind,)))


def check_names(path: str, given: Iterable[str], taken: Iterable[str]) -> None:
    """Raises `UserError` for the first name in `given` that is not in `taken`, naming the nearest that is."""
    for name in given:
        if name not in taken:
            raise UserError(f'{path} takes no argument {name!r}{nearest(name, taken)}')


def check_type(path: str, value: Any, kind: Any) -> None:
    """Raises `UserError` when `kind` admits only plain types and `value` has none of them; an int passes for float."""
    admitted = members(kind)
    if not all(member in PLAIN for member in admitted):
        return
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not (type(value) in admitted or (whole and (int in admitted or float in admitted))):
        wanted = ' or '.join('None' if member is types.NoneType else member.__name__ for member in admitted)
        raise UserError(f'{path} is {value!r}, of type {type(value).__name__}; it must be {wanted}')


def check_value(path: str, name: str, value: Any, kind: Any) -> None:
    """Checks a value by the type of its parameter and, where that is a number, by its range.

    Raises `UserError` for a wrong type, a size below 1, a count below 0, and for what is not a number.
    """
    check_type(path, value, kind)
    if isinstance(value, float) and math.isnan(value):
        raise UserError(f'{path} is nan; it must be a number')
    least = 0 if name in FROM_ZERO else 1
    if int in members(kind) and isinstance(value, numbers.Integral) and name not in MESH and value < least:
        raise UserError(f'{path} is {value}; it must be a whole number of at least {least}')


def checked[**P](function: Callable[P, None]) -> Callable[P, None]:
    """The same `__init__`, which checks its arguments first, as `check_value` does."""

    @functools.wraps(function)
    def init(*args: P.args, **kwargs: P.kwargs) -> None:
        taken = parameters(function)
        given = inspect.signature(function).bind_partial(*args, **kwargs).arguments
        for name, value in given.items():
            if name in taken:
                check_value(f'{name} of {type(args[0]).__name__}', name, value, taken[name].kind)
        function(*args, **kwargs)

    return init
