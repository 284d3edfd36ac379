"""A run config from the command line: `--config=NAME:ARG` and `--config.KEY=VALUE`, through ml_collections.

NAME is the path of a Python file, or that of one of the configs that come with attnlab, such as `language`.
"""

import dataclasses
import difflib
import importlib.util
import pathlib
import sys
import traceback
import types

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_dict import placeholder

from attnlab.config import TARGET, spec, value_at
from attnlab.errors import UserError, nearest, of_the_machine
from attnlab.flags import parse_flags
from attnlab.signature import Parameter, members, parameters
from attnlab.trust import importable, named

CONFIG = '--config='
OVERRIDE = '--config.'
MISSING = '--config is missing, such as --config=language:zoo=gla'
PACKAGED = pathlib.Path(__file__).parent / 'configs'
"""The configs that come with attnlab: in a clone, a link to the folder `configs`."""


def read_config(values: flags.FlagValues, argv: list[str], command: str, base: ConfigDict | None = None) -> ConfigDict:
    """Parses the flags of a command and returns the config with its overrides.

    Those that name the class of a part come first, the others in the order they are given. The config is what
    `--config` names, or `base`, which takes its place.

    An override is a number, a string, a tuple, `None` where the constructor takes it, or, for a part, the import path
    of its class, whose own keys later overrides may set.

    Raises `UserError`: for a misspelt key naming the nearest one, for a wrong type naming the key, its value and the
    right type.
    """
    given = [item for item in argv if item.startswith(CONFIG)]
    overrides = [item for item in argv if item.startswith(OVERRIDE)]
    rest = [item for item in argv if item not in given and item not in overrides]
    if '--config' in rest:
        raise UserError('flags are written --name=value, such as --config=language:zoo=gla')
    if len(given) > 1:
        raise UserError(f'--config is given {len(given)} times; give one file')
    if given and base is not None:
        raise UserError('--config and --from are both given; a fork has the config of its run')
    if not given and base is None:
        flags.DEFINE_string(
            'config',
            None,
            'A Python file with get_config(arg), as FILE.py:ARG, or a config of attnlab.',
            flag_values=values,
        )
        parse_flags(values, rest, command)
        raise UserError(MISSING)
    if base is None:
        path, _, arg = given[0].removeprefix(CONFIG).partition(':')
        base = config_of(pathlib.Path(path), arg)
        _check_kind(base, command, path, arg)
    config = base.unlock()
    plain = [item for item in overrides if not _replaces_part(config, item)]
    config_flags.DEFINE_config_dict('config', config, flag_values=values, sys_argv=['attnlab', *plain])
    parse_flags(values, [*rest, *plain], command)
    return values.config.lock()


def _check_kind(config: ConfigDict, command: str, path: str, arg: str) -> None:
    """Raises `UserError` for the config of a sweep where a run's is asked for, and the other way round."""
    given = f'{CONFIG}{path}{":" if arg else ""}{arg}'
    if command == 'train' and 'base' in config and 'model' not in config:
        raise UserError(f'{given} is the config of a sweep: attnlab sweep {given} --study=DIR')
    if command == 'sweep' and 'model' in config and 'base' not in config:
        sweeps = sorted(file.stem for file in (PACKAGED / 'sweeps').glob('*.py'))
        name = pathlib.Path(path).stem
        own = f'{CONFIG}sweeps/{name}{":" if arg else ""}{arg}'
        known = f'{", ".join(sweeps)}, of which language takes base=FILE.py, or a file of yours'
        raise UserError(
            f'{given} is the config of a run; a sweep of it is {own if name in sweeps else f"one of sweeps/: {known}"}'
        )


def config_of(path: pathlib.Path, arg: str = '') -> ConfigDict:
    """Returns what `get_config(arg)` of a config file returns; the file may import modules that lie beside it.

    The path may leave out `.py`; where there is no such file, it is the name of a config that comes with attnlab.

    Raises `UserError` for a file that is not there, has no `get_config`, raises (its own traceback is shown, and
    nothing else), or returns no ConfigDict.
    """
    path = _file(path)
    if not path.is_relative_to(PACKAGED):
        importable(path.resolve().parent)
    try:
        module = load_module(path, f'config_of_{path.stem}')
        if not hasattr(module, 'get_config'):
            raise UserError(f'{path} has no function get_config(arg), so it is no config file')
        config = module.get_config(arg)
    except UserError:
        raise
    except Exception as error:
        if of_the_machine(error):
            raise
        raise UserError(raised(path, error)) from error
    if not isinstance(config, ConfigDict):
        raise UserError(
            f'get_config of {path} returned {type(config).__name__}; it must be an ml_collections.ConfigDict'
        )
    return config


def _file(path: pathlib.Path) -> pathlib.Path:
    """The config file that a path stands for; a file of the user's own goes before one that comes with attnlab."""
    candidates = (path, pathlib.Path(f'{path}.py'), PACKAGED / f'{path}.py')
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if (path / 'config.json').is_file():
        raise UserError(f'{path} is a run and no config file; attnlab train --from={path} goes on from it')
    packaged = (str(file.relative_to(PACKAGED).with_suffix('')) for file in PACKAGED.glob('**/*.py'))
    there = [*map(str, path.parent.glob('*.py')), *packaged]
    raise UserError(f'there is no config file {path}{nearest(str(path), there)}')


def load_module(path: pathlib.Path, name: str) -> types.ModuleType:
    """The module of a file of Python, made anew under a name of its own; what the file raises passes through.

    Raises `UserError` for a file that is no Python.
    """
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise UserError(f'{path} is no Python file')
    module = importlib.util.module_from_spec(found)
    # Dataclasses look up the module that they stand in.
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def raised(path: pathlib.Path, error: Exception) -> str:
    """The traceback of what a file of Python raised, from that file on."""
    frames, file = traceback.extract_tb(error.__traceback__), path.absolute()
    own = next((index for index, frame in enumerate(frames) if pathlib.Path(frame.filename) == file), len(frames))
    lines = [*traceback.format_list(frames[own:]), *traceback.format_exception_only(error)]
    return f'{path} raised {type(error).__name__}:\n{"".join(lines).rstrip()}'


def _replaces_part(config: ConfigDict, item: str) -> bool:
    """Carries out an override that puts in a part or takes one out; says whether it was one.

    Any other is checked, so that ml_collections can carry it out. Raises `UserError` where it does not fit the config.
    """
    key, equals, text = item.removeprefix(OVERRIDE).partition('=')
    if not equals:
        raise UserError(f'{item} has no value; overrides are written {OVERRIDE}{key}=VALUE')
    value = _value(config, key)
    taken = _parameter(config, key)
    if taken is not None:
        kinds = tuple(kind for kind in members(taken.kind) if kind in PLAIN)
    else:  # A number is no part; whether the run takes one is checked when it is built.
        kinds = tuple(kind for kind in (int, float) if value is None and _reads_as(text, kind))
    # Keys of the run itself may be left out, and are checked when it is built.
    optional = '.' not in key if taken is None else taken.default is None or types.NoneType in members(taken.kind)
    if text == 'None' and optional:
        _put(config, key, None)
        return True
    if value is None and kinds:
        # ml_collections cannot tell the type of what is not set.
        _put(config, key, placeholder(kinds[0]))
        value, kind = None, kinds[0]
    elif value is None or isinstance(value, ConfigDict):
        _put(config, key, _part(config, key, text, optional))
        return True
    else:
        kind = type(value)
    if kind in (int, float, bool) and not _reads_as(text, kind):
        raise UserError(f'config.{key} is {text!r}, of type str; it must be {kind.__name__}')
    return False


PLAIN = (int, float, str, bool, tuple)
"""The types of what an override can spell out, in the order in which they are tried for a key that is not set."""


def _part(config: ConfigDict, key: str, text: str, optional: bool) -> ConfigDict:
    """The part that an override names by the import path of its class."""
    value = _value(config, key)
    if '.' not in text:
        keys = f', or override its keys ({", ".join(sorted(value))})' if isinstance(value, ConfigDict) else ''
        without = ', or leave it out with None' if optional and value is not None else ''
        raise UserError(
            f'config.{key} is {text!r}; it is a part, so give the import path of a class, such as '
            f'attnlab.nn.norms.RMSNorm{keys}{without}'
        )
    return spec(named(text, f'config.{key}'))


MEANT = {
    'betas': ('b1', 'b2'),
    'batch': ('batch_size',),
    'context': ('length',),
    'd_model': ('dim',),
    'data': ('task',),
    'epochs': ('steps',),
    'grad_clip': ('clip',),
    'hidden_size': ('dim',),
    'layers': ('depth',),
    'learning_rate': ('peak_lr',),
    'lr': ('peak_lr',),
    'max_steps': ('steps',),
    'n_layers': ('depth',),
    'num_heads': ('heads',),
    'num_layers': ('depth',),
    'seq_len': ('length',),
    'warmup_steps': ('warmup',),
    'wd': ('weight_decay',),
}
"""The last parts of keys by what others call them, whose letters are not like theirs."""


def _value(config: ConfigDict, key: str) -> object:
    """What the config has at a key, `None` where a dataclass that was put in lacks an argument without default.

    Raises `UserError` for a key that it does not have, naming what may be meant.
    """
    try:
        return value_at(config, key)
    except LookupError as error:
        if _lacking(config, key):
            return None
        raise UserError(f'the config has no key {key}; {_meant(config, key)}') from error


def _lacking(config: ConfigDict, key: str) -> bool:
    """Whether a key that is not there is an argument of a dataclass; what modules lack is for their parents to give."""
    path, _, name = key.rpartition('.')
    try:
        parent = value_at(config, path) if path else config
    except LookupError:
        return False
    if not isinstance(parent, ConfigDict) or TARGET not in parent:
        return False
    target = named(parent[TARGET], f'config.{path}.{TARGET}')
    return name in parameters(target) and dataclasses.is_dataclass(target)


def _meant(config: ConfigDict, key: str) -> str:
    """What may be meant by a key that is not there: one that ends alike, one of almost the same letters, or what is."""
    known = [other for other in keys(config) if not key.startswith(f'{other}.') and _parted(other)[1] != TARGET]
    parent, name = _parted(key)
    # Of keys that end alike those of the outermost part, such as the rate of an optimizer before those of its groups.
    alike = sorted((other for other in known if _parted(other)[1] in MEANT.get(name, (name,))), key=_depth)
    alike = [other for other in alike if other.startswith(f'{parent}.')] or alike
    alike = [other for other in alike if _depth(other) == _depth(alike[0])][:3]
    close = alike or difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    if close:
        return f'did you mean {" or ".join(close)}?'
    while parent and not any(_parted(other)[0] == parent for other in known):
        parent = _parted(parent)[0]
    there = [last for place, last in map(_parted, known) if place == parent]
    return f'{parent or "it"} has {", ".join(there) or "no keys"}'


def _parted(key: str) -> tuple[str, str]:
    """The key of the part that a key stands in, empty for the config itself, and its last part."""
    parent, _, name = key.rpartition('.')
    return parent, name


def _depth(key: str) -> int:
    """How many parts a key stands in."""
    return key.count('.')


def _parameter(config: ConfigDict, key: str) -> Parameter | None:
    """The parameter of the constructor that a key stands for; `None` for one that is not of a spec."""
    path, _, name = key.rpartition('.')
    parent = value_at(config, path) if path else config
    if not isinstance(parent, ConfigDict) or TARGET not in parent or name == TARGET:
        return None
    taken = parameters(named(parent[TARGET], f'config.{path}.{TARGET}'))
    if name.endswith(']'):
        return None
    if name not in taken:
        raise UserError(f'config.{key} is no argument of {parent[TARGET]}{nearest(name, taken)}')
    return taken[name]


def _put(config: ConfigDict, key: str, value: object) -> None:
    path, _, name = key.rpartition('.')
    parent = value_at(config, path) if path else config
    name, bracket, place = name.partition('[')
    if bracket:
        items = list(parent[name])
        items[int(place.removesuffix(']'))] = value
        value = tuple(items)
    with parent.ignore_type():
        parent[name] = value


def keys(config: object, path: str = '') -> list[str]:
    """Every key of a config as the command line spells it, groups of keys too."""
    if isinstance(config, ConfigDict):
        items = [(f'{path}.{name}' if path else name, config[name]) for name in config]
    elif isinstance(config, tuple) and any(isinstance(item, ConfigDict) for item in config):
        items = [(f'{path}[{index}]', item) for index, item in enumerate(config)]
    else:
        return []
    return [key for name, value in items for key in (name, *keys(value, name))]


def _reads_as(text: str, kind: type) -> bool:
    if kind is bool:
        return text.lower() in ('true', 'false', '1', '0')
    try:
        kind(text)
    except ValueError:
        return False
    return True
