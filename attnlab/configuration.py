"""A run config from the command line: `--config=FILE.py:ARG` and `--config.KEY=VALUE`, through ml_collections."""

import difflib
import pathlib
import runpy
import types

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags import config_path

from attnlab.config import TARGET
from attnlab.errors import UserError, nearest
from attnlab.signature import members, parameters, resolve

OVERRIDE = '--config.'
EMPTIED = '=None'
MISSING = '--config is missing, such as --config=configs/language.py'


def define_config(values: flags.FlagValues, argv: list[str]) -> None:
    """Defines `--config`, and a flag for each override in `argv`."""
    config_flags.DEFINE_config_file(
        'config',
        None,
        'A Python file with get_config(arg), as FILE.py:ARG.',
        flag_values=values,
        sys_argv=['attnlab', *_given(argv)],
    )


def read_config(values: flags.FlagValues, argv: list[str], command: str) -> ConfigDict:
    """Parses the flags of a command and returns the config with its overrides.

    Raises `UserError`: a misspelt key names the nearest one, a wrong type names the key, what it has and what it wants.
    """
    overrides = [item for item in argv if item.startswith(OVERRIDE)]
    original = _original(argv, command)
    for item in overrides if original else ():
        _check(original, item)
    define_config(values, argv)
    _parse(values, _given(argv), command)
    config = values.config
    if config is None:
        raise UserError(MISSING)
    for item in (item for item in overrides if item.endswith(EMPTIED)):
        parent, name = _parent(config, item.removeprefix(OVERRIDE).partition('=')[0])
        with parent.ignore_type():
            parent[name] = None
    return config.lock()


def _original(argv: list[str], command: str) -> ConfigDict | None:
    """The config as its file gives it, so that overrides can be checked against it before ml_collections sees them."""
    values = flags.FlagValues()
    argv = [item for item in argv if item.startswith('--config=')]
    for item in argv:
        path = pathlib.Path(item.removeprefix('--config=').partition(':')[0])
        if not path.is_file():
            raise UserError(f'there is no config file {path}{nearest(str(path), map(str, path.parent.glob("*.py")))}')
    define_config(values, argv)
    _parse(values, argv, command)
    return values.config


def _given(argv: list[str]) -> list[str]:
    """What ml_collections is to read: it knows no way to set a key to `None`."""
    return [item for item in argv if not (item.startswith(OVERRIDE) and item.endswith(EMPTIED))]


def _parse(values: flags.FlagValues, argv: list[str], command: str) -> None:
    try:
        rest = values(['attnlab', *argv])[1:]
    except flags.Error as error:
        raise UserError(str(error)) from error
    if rest:
        raise UserError(f'{command} takes no argument {rest[0]!r}; flags are written --name=value')


def _check(config: ConfigDict, item: str) -> None:
    """Raises `UserError` where a `--config.KEY=VALUE` does not fit the config."""
    key, equals, text = item.removeprefix(OVERRIDE).partition('=')
    if not equals:
        raise UserError(f'{item} has no value; overrides are written {OVERRIDE}{key}=VALUE')
    try:
        value = config_path.get_value(key, config)
        kind = config_path.get_type(key, config)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        close = difflib.get_close_matches(key, list(_keys(config)), n=1, cutoff=0.0)[0]
        raise UserError(f'the config has no key {key}; did you mean {close}?') from error
    if text == 'None' and _optional(config, key):
        return
    if isinstance(value, ConfigDict):
        without = ', or leave it out with None' if _optional(config, key) else ''
        raise UserError(f'config.{key} is a group of keys ({", ".join(sorted(value))}); override those{without}')
    if kind in (int, float, bool) and not _reads_as(text, kind):
        raise UserError(f'config.{key} is {text!r}, of type str; it wants {kind.__name__}')


def _parent(config: ConfigDict, key: str) -> tuple[ConfigDict, str]:
    path, _, name = key.rpartition('.')
    return (config_path.get_value(path, config) if path else config), name


def _optional(config: ConfigDict, key: str) -> bool:
    """Whether the constructor that the key belongs to takes `None` there."""
    parent, name = _parent(config, key)
    if TARGET not in parent:
        return False
    parameter = parameters(resolve(parent[TARGET], TARGET))[name]
    return parameter.default is None or types.NoneType in members(parameter.kind)


def _keys(config: object, path: str = '') -> list[str]:
    if isinstance(config, ConfigDict):
        items = [(f'{path}.{name}' if path else name, config[name]) for name in config]
    elif isinstance(config, tuple) and any(isinstance(item, ConfigDict) for item in config):
        items = [(f'{path}[{index}]', item) for index, item in enumerate(config)]
    else:
        return []
    return [key for name, value in items for key in (name, *_keys(value, name))]


def _reads_as(text: str, kind: type) -> bool:
    if kind is bool:
        return text.lower() in ('true', 'false', '1', '0')
    try:
        kind(text)
    except ValueError:
        return False
    return True


def config_of(path: pathlib.Path, arg: str = '') -> ConfigDict:
    """What `get_config(arg)` of a config file returns, for a config that is made from another."""
    if not path.is_file():
        raise UserError(f'there is no config file {path}{nearest(str(path), map(str, path.parent.glob("*.py")))}')
    return runpy.run_path(str(path))['get_config'](arg)
