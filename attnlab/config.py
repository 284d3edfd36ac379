"""Configs mirror construction: `spec` writes a constructor call down, `build` makes it.

A spec is a `ConfigDict` holding the import path under `target`, the arguments given, and every remaining default
spelled out, so that a saved config is a complete record. Nothing below `build` ever sees a `ConfigDict`.
"""

import dataclasses
import functools
import inspect
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from flax import nnx
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder
from ml_collections.config_flags import config_path

from attnlab.errors import UserError, nearest
from attnlab.files import read_json, write_json
from attnlab.renamed import upgraded
from attnlab.signature import ABSENT, check_names, check_value, members, parameters
from attnlab.trust import OWN, allow_module, is_part, named

TARGET = 'target'
KERNELS = 'pallas_kernels'


@dataclasses.dataclass(frozen=True)
class Factory:
    """A module class with the arguments its config fixed; the parent calls it with sizes and `rngs`."""

    module: type[nnx.Module]
    kwargs: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the module. Raises `UserError` where a class that is not of attnlab takes other arguments."""
        if self.module.__module__.partition('.')[0] not in OWN:
            _check_call(self.module, *args, **self.kwargs, **kwargs)
        return self.module(*args, **self.kwargs, **kwargs)


def spec(target: Callable[..., Any], /, **kwargs: Any) -> ConfigDict:
    """Returns the config of the call `target(**kwargs)`, its remaining defaults spelled out.

    Parameters without a default and without a value here (`dim`, `rngs`) are the parent's to give and are left out.
    Raises `UserError` for an argument that `target` does not take, for a class that could not be imported again, and
    for what is neither a module of Flax NNX nor a dataclass.
    """
    if not is_part(target):
        raise UserError(f'{target!r} cannot stand in a config: it is neither an nnx.Module nor a dataclass')
    allow_module(target.__module__)
    taken = parameters(target)
    path = f'{target.__module__}.{target.__qualname__}'
    check_names(path, kwargs, taken)
    values = {name: kwargs.get(name, parameter.default) for name, parameter in taken.items()}
    fields = {name: _record(value, taken[name].kind) for name, value in values.items() if value is not ABSENT}
    return ConfigDict({TARGET: path} | fields, convert_dict=False)


def spec_of(value: Any) -> ConfigDict:
    """Returns the spec of the call that makes a dataclass with these values."""
    return spec(
        type(value), **{item.name: getattr(value, item.name) for item in dataclasses.fields(value) if item.init}
    )


def build(config: Any, path: str = 'config') -> Any:
    """Makes what `config` describes: a spec of a module becomes a `Factory`, any other spec the object it names.

    Tuples are built element by element, a ConfigDict without target becomes a dict; anything else is returned as it is.
    Raises `UserError` naming the key for an unknown name, a value of the wrong type or one that a kernel refuses, or a
    missing argument.
    """
    if isinstance(config, list | tuple):
        return tuple(build(item, f'{path}[{i}]') for i, item in enumerate(config))
    if not isinstance(config, ConfigDict):
        return config
    kwargs = {name: build(value, f'{path}.{name}') for name, value in config.items() if name != TARGET}
    if TARGET not in config:
        return kwargs
    target = named(config[TARGET], f'{path}.{TARGET}')
    taken = parameters(target)
    check_names(path, kwargs, taken)
    for name, value in kwargs.items():
        check_value(f'{path}.{name}', name, value, *taken[name])
    if isinstance(target, type) and issubclass(target, nnx.Module):
        return Factory(target, kwargs)
    missing = [name for name, parameter in taken.items() if parameter.default is ABSENT and name not in kwargs]
    if missing:
        raise UserError(f'{path} ({config[TARGET]}) lacks {", ".join(missing)}')
    try:
        return target(**kwargs)
    except ValueError as error:
        # Kernels stand apart from attnlab and refuse a field by a ValueError; of any other class that is a bug.
        if target.__module__.partition('.')[0] != KERNELS:
            raise
        raise UserError(f'{path}: {error}') from error


def takes(config: ConfigDict) -> frozenset[str]:
    """The argument names that the target of a spec takes."""
    return frozenset(parameters(named(config[TARGET], TARGET)))


def plain(config: Any) -> Any:
    """The same config as dictionaries, lists, numbers and strings, ready for JSON."""
    if isinstance(config, ConfigDict | dict):
        return {name: plain(value) for name, value in sorted(config.items())}
    return [plain(item) for item in config] if isinstance(config, list | tuple) else config


def from_plain(value: Any) -> Any:
    """The inverse of `plain`: dictionaries become ConfigDicts, lists tuples, and names of before those of today.

    Arguments that a class has gained since have their defaults, which `build` would give them.
    """
    if isinstance(value, dict):
        fields = upgraded({name: from_plain(item) for name, item in value.items()})
        # What an upgrade adds is plain.
        made = {name: from_plain(item) if isinstance(item, dict) else item for name, item in fields.items()}
        return ConfigDict({**_gained(made), **made}, convert_dict=False)
    return tuple(from_plain(item) for item in value) if isinstance(value, list) else value


def flatten(config: Any, path: str = '') -> dict[str, Any]:
    """Every leaf of a config by its dotted path, as on the command line: `model.stack.blocks[0].mixer.heads`."""
    if isinstance(config, ConfigDict | dict) and config:
        items = ((f'{path}.{name}' if path else name, value) for name, value in config.items())
    elif isinstance(config, list | tuple) and any(isinstance(item, ConfigDict | dict) for item in config):
        items = ((f'{path}[{i}]', value) for i, value in enumerate(config))
    else:
        return {path: config}
    return {key: leaf for name, value in items for key, leaf in flatten(value, name).items()}


def value_at(config: Any, key: str) -> Any:
    """What a config has at a dotted path, as `flatten` spells it. Raises `LookupError` for one that it does not have.

    Only groups and tuples are entered, by what they hold, for keys may be a stranger's. `config_path.get_value` reads
    attributes first, from which a path leads to all of the interpreter, such as `__class__.__init__.__globals__`.
    """
    return functools.reduce(_inside, _parts(key), config)


def set_value(config: Any, key: str, value: Any) -> None:
    """Sets what a config has at a dotted path, which `value_at` reads.

    Raises `LookupError` for one that it does not have, and `TypeError` for a value of another type.
    """
    *parents, last = _parts(key)
    holder = functools.reduce(_inside, parents, config)
    _inside(holder, last)
    if not isinstance(holder, ConfigDict):
        raise KeyError(key)
    holder[last] = value


def _parts(key: str) -> tuple[Any, ...]:
    """The names and indices of a dotted path. Raises `KeyError` for what is none."""
    try:
        return config_path.split(key)
    except (MemoryError, RecursionError, TypeError, ValueError) as error:
        raise KeyError(key) from error


def _inside(holder: Any, part: Any) -> Any:
    if isinstance(holder, ConfigDict | dict) and isinstance(part, str) and part in holder:
        return holder[part]
    if isinstance(holder, list | tuple) and type(part) is int:
        return holder[part]
    raise KeyError(part)


def save(config: ConfigDict, path: pathlib.Path) -> None:
    """Writes the resolved config as JSON."""
    write_json(path, plain(config))


def load(path: pathlib.Path) -> ConfigDict:
    """Reads a config that `save` wrote; it builds the same objects.

    Raises `UserError` for a file that is damaged.
    """
    remedy = 'put back a copy of it, or start anew in another directory'
    found = read_json(path, remedy)
    if not isinstance(found, dict):
        raise UserError(f'{path} is damaged: it holds a {type(found).__name__} in place of a config; {remedy}')
    try:
        return from_plain(found).lock()
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # Upgrades of what was saved before look into fields that this file lacks, or has otherwise.
        raise UserError(f'{path} is damaged: {type(error).__name__}: {error}; {remedy}') from error


def arguments(text: str, **defaults: str) -> dict[str, str]:
    """Parses `name=value,name=value`, the part of `--config=file.py:...` that `get_config` receives.

    Raises `UserError` for a name that has no default, naming the nearest, one that is given twice, or an item without
    `=`.
    """
    given: dict[str, str] = {}
    for item in filter(None, text.split(',')):
        name, equals, value = item.partition('=')
        if not equals:
            raise UserError(f'{item!r} in the config argument {text!r} is not name=value')
        if name not in defaults:
            raise UserError(f'the config takes no argument {name!r}{nearest(name, defaults)}')
        if name in given:
            raise UserError(
                f'the config argument {text!r} has {name} twice, {given[name]!r} and {value!r}; once is enough'
            )
        given[name] = value
    return defaults | given


def check_not_given(given: Mapping[str, str], names: Iterable[str], why: str) -> None:
    """Raises `UserError`, `NAME=VALUE why`, for the first of these arguments that is given: nothing would read it.

    Arguments that belong to others are so checked whatever their value, and therefore have an empty default.
    """
    for name in names:
        if given[name]:
            raise UserError(f'{name}={given[name]} {why}')


def check_keys(config: ConfigDict, required: Collection[str], optional: Collection[str], what: str) -> None:
    """Raises `UserError` for a key that a kind of config does not have, naming the nearest, and for those it lacks."""
    known = {*required, *optional}
    for name in sorted(set(config) - known):
        raise UserError(f'{what} has no key {name!r}{nearest(name, known)}')
    missing = sorted(set(required) - set(config))
    if missing:
        raise UserError(f'{what} lacks {", ".join(missing)}')


def apart(text: str, **defaults: str) -> tuple[dict[str, str], str]:
    """The arguments of these names in `name=value,name=value`, and the text without them: those of another config.

    Raises `UserError` for one of them without `=`.
    """
    items = [item for item in text.split(',') if item]
    own = [item for item in items if item.partition('=')[0] in defaults]
    return arguments(','.join(own), **defaults), ','.join(item for item in items if item not in own)


def whole(name: str, text: str, least: int = 1) -> int:
    """The whole number of at least `least` that an argument is; raises `UserError` for another text."""
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise UserError(f'{name} is {text!r}; it must be a whole number from {least}')
    return int(text)


def choose[T](table: Mapping[str, T], kind: str, name: str) -> T:
    """The entry `name` of a table of choices. Raises `UserError` naming the `kind` of choice and the nearest name."""
    check_choice(table, kind, name)
    return table[name]


def check_choice(names: Collection[str], kind: str, name: str) -> None:
    """Raises `UserError` for a name that is not among those of a `kind` of choice, naming the nearest."""
    if name not in names:
        raise UserError(f'there is no {kind}={name}{nearest(name, names)}')


def _check_call(module: type[nnx.Module], *args: Any, **kwargs: Any) -> None:
    """Raises `UserError` for arguments that the constructor of a module does not take, or that it lacks."""
    try:
        inspect.signature(module.__init__).bind(None, *args, **kwargs)
    except TypeError as error:
        raise UserError(
            f'{module.__module__}.{module.__qualname__} cannot be made: {error}; it is called with '
            f'{", ".join([*map(str, args), *(f"{name}=" for name in kwargs)])}, so any other argument needs a default'
        ) from error


def _gained(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the arguments that a saved spec of a class of this package lacks."""
    target = fields.get(TARGET)
    if not isinstance(target, str) or target.partition('.')[0] not in OWN:
        return {}
    try:
        taken = parameters(named(target, TARGET))
    except UserError:
        # `build` names the key of what cannot be made.
        return {}
    return {
        name: _record(parameter.default, parameter.kind)
        for name, parameter in taken.items()
        if name not in fields and parameter.default is not ABSENT
    }


def _record(value: Any, kind: Any) -> Any:
    if value is None:
        return placeholder(
            next((member for member in members(kind) if member in (int, float, str, bool, tuple)), object)
        )
    if isinstance(value, type):
        return spec(value)
    if isinstance(value, Factory):
        return spec(value.module, **value.kwargs)
    if dataclasses.is_dataclass(value):
        return spec_of(value)
    if isinstance(value, list | tuple):
        return tuple(_record(item, Any) for item in value)
    return float(value) if type(value) is int and members(kind) == (float,) else value
