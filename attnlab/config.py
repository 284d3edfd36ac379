"""Configs mirror construction: `spec` writes a constructor call down, `build` makes it.

A spec is a `ConfigDict` holding the import path under `target`, the arguments given, and every remaining default spelled
out, so that a saved config is a complete record. Nothing below `build` ever sees a `ConfigDict`.
"""

import dataclasses
import functools
import importlib
import inspect
import json
import pathlib
import types
import typing
from collections.abc import Callable
from typing import Any

from flax import nnx
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from attnlab.errors import UserError, nearest

TARGET = 'target'


@dataclasses.dataclass(frozen=True)
class Factory:
    """A module class with the arguments its config fixed; the parent calls it with sizes and `rngs`."""

    module: type[nnx.Module]
    kwargs: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **self.kwargs, **kwargs)


def spec(target: Callable[..., Any], /, **kwargs: Any) -> ConfigDict:
    """Returns the config of the call `target(**kwargs)`, its remaining defaults spelled out.

    Parameters without a default and without a value here (`dim`, `rngs`) are the parent's to give and are left out.
    Raises `UserError` for an argument that `target` does not take.
    """
    parameters = _parameters(target)
    path = f'{target.__module__}.{target.__qualname__}'
    _check_names(path, kwargs, parameters)
    fields = {TARGET: path}
    for name, (kind, default) in parameters.items():
        value = kwargs.get(name, default)
        if value is not inspect.Parameter.empty:
            fields[name] = _record(value, kind)
    return ConfigDict(fields, convert_dict=False)


def build(config: Any, path: str = 'config') -> Any:
    """Makes what `config` describes: a spec of a module becomes a `Factory`, any other spec the object it names.

    Tuples and plain dictionaries are built element by element; anything else is returned as it is.
    Raises `UserError` naming the key for an unknown name, a value of the wrong type, or a missing argument.
    """
    if isinstance(config, list | tuple):
        return tuple(build(item, f'{path}[{i}]') for i, item in enumerate(config))
    if not isinstance(config, ConfigDict):
        return config
    kwargs = {name: build(value, f'{path}.{name}') for name, value in config.items() if name != TARGET}
    if TARGET not in config:
        return kwargs
    target = _resolve(config[TARGET], path)
    parameters = _parameters(target)
    _check_names(path, kwargs, parameters)
    for name, value in kwargs.items():
        _check_type(f'{path}.{name}', value, parameters[name][0])
    if isinstance(target, type) and issubclass(target, nnx.Module):
        return Factory(target, kwargs)
    missing = [n for n, (_, default) in parameters.items() if default is inspect.Parameter.empty and n not in kwargs]
    if missing:
        raise UserError(f'{path} ({config[TARGET]}) lacks {", ".join(missing)}')
    return target(**kwargs)


def plain(config: Any) -> Any:
    """The same config as dictionaries, lists, numbers and strings, ready for JSON."""
    if isinstance(config, ConfigDict | dict):
        return {name: plain(value) for name, value in sorted(config.items())}
    return [plain(item) for item in config] if isinstance(config, list | tuple) else config


def save(config: ConfigDict, path: pathlib.Path) -> None:
    """Writes the resolved config as JSON."""
    path.write_text(json.dumps(plain(config), indent=2) + '\n')


def load(path: pathlib.Path) -> ConfigDict:
    """Reads a config that `save` wrote; it builds the same objects."""
    return from_plain(json.loads(path.read_text())).lock()


def from_plain(value: Any) -> Any:
    """The inverse of `plain`: dictionaries become ConfigDicts, lists become tuples."""
    if isinstance(value, dict):
        return ConfigDict({name: from_plain(item) for name, item in value.items()}, convert_dict=False)
    return tuple(from_plain(item) for item in value) if isinstance(value, list) else value


def flatten(config: Any, path: str = '') -> dict[str, Any]:
    """Every leaf of a config by its dotted path, as the command line spells it: `model.blocks[0].mixer.heads`."""
    if isinstance(config, ConfigDict | dict) and config:
        items = ((f'{path}.{name}' if path else name, value) for name, value in config.items())
    elif isinstance(config, list | tuple) and any(isinstance(item, ConfigDict | dict) for item in config):
        items = ((f'{path}[{i}]', value) for i, value in enumerate(config))
    else:
        return {path: config}
    return {key: leaf for name, value in items for key, leaf in flatten(value, name).items()}


def takes(config: ConfigDict) -> frozenset[str]:
    """The argument names that the target of a spec takes."""
    return frozenset(_parameters(_resolve(config[TARGET], 'config')))


def _parameters(target: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Name to (type, default). A module's class signature is `(*args, **kwargs)`, so its `__init__` is what is read."""
    function = target.__init__ if isinstance(target, type) else target
    hints = typing.get_type_hints(function)
    skip = ('self', 'rngs')
    signature = inspect.signature(function).parameters
    return {n: (hints.get(n, Any), p.default) for n, p in signature.items() if n not in skip}


def _record(value: Any, kind: Any) -> Any:
    if value is None:
        return placeholder(next((k for k in _members(kind) if k in (int, float, str, bool, tuple)), object))
    if isinstance(value, type | types.FunctionType):
        return spec(value)
    if isinstance(value, Factory):
        return spec(value.module, **value.kwargs)
    if dataclasses.is_dataclass(value):
        return spec(type(value), **{f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init})
    if isinstance(value, list | tuple):
        return tuple(_record(item, Any) for item in value)
    if isinstance(value, int) and not isinstance(value, bool) and _members(kind) == (float,):
        return float(value)
    return value


def _members(kind: Any) -> tuple[Any, ...]:
    """The types a hint admits: `int | None` gives (int, NoneType), `tuple[int, ...]` gives (tuple,)."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return tuple(typing.get_origin(k) or k for k in (typing.get_args(kind) if union else (kind,)))


def _check_type(path: str, value: Any, kind: Any) -> None:
    members = _members(kind)
    if not all(k in (int, float, str, bool, tuple, types.NoneType) for k in members):
        return
    numeric = isinstance(value, int) and not isinstance(value, bool) and float in members
    if not numeric and not any(type(value) is k for k in members):
        wanted = ' or '.join('None' if k is types.NoneType else k.__name__ for k in members)
        raise UserError(f'{path} is {value!r}, of type {type(value).__name__}; it wants {wanted}')


def _check_names(path: str, given: dict[str, Any], parameters: dict[str, Any]) -> None:
    for name in given:
        if name not in parameters:
            raise UserError(f'{path} takes no argument {name!r}{nearest(name, parameters)}')


@functools.cache
def _resolve(path: str, where: str) -> Callable[..., Any]:
    module, _, name = path.rpartition('.')
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f'{where}.{TARGET} is {path!r}, which cannot be imported: {error}') from error
