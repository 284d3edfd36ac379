"""What a constructor or function takes, and whether a value fits."""

import inspect
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from attnlab.errors import UserError, nearest

ABSENT = inspect.Parameter.empty
PLAIN = (int, float, str, bool, tuple, types.NoneType)


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
    if not (type(value) in admitted or (type(value) is int and float in admitted)):
        wanted = ' or '.join('None' if member is types.NoneType else member.__name__ for member in admitted)
        raise UserError(f'{path} is {value!r}, of type {type(value).__name__}; it wants {wanted}')
