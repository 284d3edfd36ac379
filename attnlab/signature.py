"""What a constructor or function takes, and whether a value fits."""

import collections.abc
import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from flax import nnx

from attnlab.errors import UserError, nearest
from pallas_kernels import dispatch

ABSENT = inspect.Parameter.empty
PLAIN = (int, float, str, bool, tuple, types.NoneType)


FROM_ZERO = frozenset(
    {
        'antialias',
        'branches',
        'confirm',
        'covariates',
        'dash',
        'distractors',
        'held_out',
        'initial',
        'label',
        'layers',
        'links',
        'local',
        'place',
        'rectified',
        'transient',
        'zero',
    }
    | {'magnitude', 'margin', 'padding', 'repeated', 'rewrites', 'seed', 'startup', 'step'}
)
"""Parameters of which there may be none though their default does not show it; other whole numbers begin at 1."""

IMPLEMENTATIONS = (*dispatch.PREFERENCE, *dispatch.LIBRARIES, *dispatch.ALTERNATIVES)
"""What a parameter called `implementation` may be: the names of forms of a core."""

MESH = frozenset({'data', 'expert', 'fsdp', 'sequence', 'tensor'})
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
    return tuple(typing.get_origin(k) or k for k in _whole_members(kind))


def _whole_members(kind: Any) -> tuple[Any, ...]:
    """The same with what they are made of: `tuple[int, ...] | None` gives (tuple[int, ...], NoneType)."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if union else (kind,)


def check_names(path: str, given: Iterable[str], taken: Iterable[str]) -> None:
    """Raises `UserError` for the first name in `given` that is not in `taken`, naming the nearest that is."""
    for name in given:
        if name not in taken:
            raise UserError(f'{path} takes no argument {name!r}{nearest(name, taken)}')


def check_type(path: str, value: Any, kind: Any) -> None:
    """Raises `UserError` when `value` is of none of the types that `kind` admits; whole numbers pass for real ones.

    A part may be whatever can be called where a factory is due, and else an instance of the class. Types that
    `isinstance` cannot ask about, such as those of arrays, admit everything but a plain value.
    """
    admitted = members(kind)
    if admitted == (typing.Literal,):
        if value not in typing.get_args(kind):
            raise UserError(f'{path} is {value!r}; it must be {" or ".join(map(repr, typing.get_args(kind)))}')
    elif not any(_admits(member, value) for member in admitted):
        raise UserError(f'{path} is {value!r}, of type {type(value).__name__}; it must be {_wanted(value, admitted)}')
    elif type(value) is tuple:
        _check_elements(path, value, kind)


def _check_elements(path: str, value: tuple[Any, ...], kind: Any) -> None:
    """Raises `UserError` for a tuple that is of none of the kinds of tuples that `kind` admits, naming an element."""
    each = [typing.get_args(member) for member in _whole_members(kind) if typing.get_origin(member) is tuple]
    known = [args[:1] * len(value) if args[1:] == (...,) else args for args in each]
    if not known:
        return
    fitting = [args for args in known if len(args) == len(value)]
    if not fitting:
        counts = ' or '.join(str(len(args)) for args in known)
        raise UserError(f'{path} is {value!r}, of {len(value)} elements; it must have {counts}')
    refused: list[UserError] = []
    for args in fitting:
        try:
            for place, (element, wanted) in enumerate(zip(value, args, strict=True)):
                check_type(f'{path}[{place}]', element, wanted)
        except UserError as error:
            refused.append(error)
        else:
            return
    raise refused[0]


def _admits(kind: Any, value: Any) -> bool:
    """Whether a type, without its arguments, admits a value."""
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if kind in PLAIN:
        return type(value) is kind
    if kind is collections.abc.Callable:
        return callable(value)
    if kind in (Any, typing.Literal):
        return True
    if not _can_be_asked(kind):
        return type(value) not in PLAIN
    return isinstance(value, kind)


def _can_be_asked(kind: Any) -> bool:
    """Whether `isinstance` answers for a type."""
    protocol = getattr(kind, '_is_protocol', False) and not getattr(kind, '_is_runtime_protocol', False)
    return isinstance(kind, type) and not protocol and not kind.__module__.startswith('jaxtyping')


def _wanted(value: Any, admitted: tuple[Any, ...]) -> str:
    """What would be right in the place of a value, with the class that a name may have meant."""
    classes = [kind for kind in admitted if _can_be_asked(kind) and kind not in PLAIN]
    below = {found.__name__.lower(): found.__name__ for kind in classes for found in _subclasses(kind)}
    meant = below.get(value.lower().replace('_', '')) if isinstance(value, str) else None
    names = ('None' if kind is types.NoneType else _called(kind) for kind in admitted)
    return ' or '.join(names) + (f', such as {meant}()' if meant else '')


def _called(kind: Any) -> str:
    return 'a class or function that makes one' if kind is collections.abc.Callable else str(kind.__name__)


def _subclasses(kind: type) -> Iterator[type]:
    yield kind
    below: type
    for below in type.__subclasses__(kind):
        yield from _subclasses(below)


def check_value(path: str, name: str, value: Any, kind: Any, default: Any = ABSENT) -> None:
    """Checks a value by the type of its parameter and, where that is a number, by its range.

    A whole number begins at 1, at 0 for the names of `FROM_ZERO`, and at its default where that is below. Raises
    `UserError` for a wrong type, a number below its range, for what is not a number, and for an unknown implementation.
    """
    check_type(path, value, kind)
    if isinstance(value, float) and math.isnan(value):
        raise UserError(f'{path} is nan; it must be a number')
    if name == 'implementation' and isinstance(value, str) and value not in IMPLEMENTATIONS:
        raise UserError(f'{path} is {value!r}{nearest(value, IMPLEMENTATIONS)}')
    least = min(int(name not in FROM_ZERO), default if type(default) is int else 1)
    if int in members(kind) and isinstance(value, numbers.Integral) and name not in MESH and value < least:
        raise UserError(f'{path} is {value}; it must be a whole number of at least {least}')


def checked[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """The same method, which checks its arguments first, as `check_value` does."""
    signature = inspect.signature(function)
    taken = functools.cache(lambda: parameters(function))

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
            path = f'{name} of {type(args[0]).__name__}'
            if name in taken():
                check_value(path, name, value, *taken()[name])
            elif name == 'rngs' and not isinstance(value, nnx.Rngs):
                raise UserError(f'{path} is {value!r}, of type {type(value).__name__}; it must be nnx.Rngs(seed)')
        return function(*args, **kwargs)

    return called


def checked_fields[T](kind: type[T]) -> type[T]:
    """The same dataclass, which checks its fields when it is made, as `check_value` does."""
    kind.__init__ = checked(kind.__init__)  # type: ignore[method-assign]
    return kind
