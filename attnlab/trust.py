"""Which classes a config may name.

Work directories, studies and reports are data that people hand on, and what a config names is imported and called. So
its names are classes of this package, of packages that declare an entry point in the group `attnlab.mixers`, of those
that the user allows (`--allow`), and of those whose classes running code has itself handed to `attnlab.config.spec`.
"""

import dataclasses
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import pathlib
import sys
from typing import Any

from flax import nnx

from attnlab.errors import UserError

OWN = ('attnlab', 'pallas_kernels')
GROUP = 'attnlab.mixers'
"""The entry point group in which an installed package declares classes of its own."""

_allowed: set[str] = set()


def allow(package: str) -> None:
    """Lets configs name classes of an installed package, or of a Python file, whose folder becomes importable.

    Raises `UserError` for a file that is not there, or that a module of the same name hides, and for a name that cannot
    be one.
    """
    path = pathlib.Path(package).expanduser().resolve() if package.endswith('.py') or '/' in package else None
    if path is not None and not path.exists():
        raise UserError(f'--allow names {package!r}, and there is no such file; give a package or a Python file')
    name = package if path is None else path.stem
    if not name.isidentifier():
        raise UserError(f'--allow names {package!r}; it must be a package, such as my_mixers, or a Python file')
    if path is not None:
        importable(path.parent)
        _check_found(package, path)
    _allowed.add(name)


def _check_found(package: str, path: pathlib.Path) -> None:
    """Raises `UserError` where the name of the file or folder `path` imports something else, which comes before it."""
    importlib.invalidate_caches()
    spec = None if path.stem == '__main__' else importlib.util.find_spec(path.stem)
    if spec is None:
        return
    places = [place for place in (spec.origin, *(spec.submodule_search_locations or ())) if place is not None]
    if path not in {pathlib.Path(place).resolve() for place in places}:
        raise UserError(
            f'--allow names {package!r}, and another {path.stem} comes before it, {places[0]}; rename the file'
        )


def allow_module(module: str) -> None:
    """Lets configs name the classes of a module whose class is at hand.

    Raises `UserError` for a module that no other process could import, such as a config file itself.
    """
    package = module.partition('.')[0]
    if package not in OWN and importlib.machinery.PathFinder.find_spec(package) is None:
        file = getattr(sys.modules.get(module), '__file__', None) or module
        raise UserError(
            f'a config names a class that stands in {file}, from which it cannot be imported again when the run is '
            'loaded: put the class into a module beside that file, and import it from there'
        )
    _allowed.add(package)


def importable(folder: pathlib.Path) -> None:
    """Lets modules of a folder be imported, after everything that is installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def allowed() -> list[str]:
    """What `allow` would be told in another process: packages of the user's own that configs may name here."""
    return [file(name) or name for name in sorted(_allowed - set(OWN))]


def file(package: str) -> str | None:
    """The file or folder that an imported package stands in; `None` where it is not imported."""
    found = getattr(sys.modules.get(package), '__file__', None)
    if found is None:
        return None
    path = pathlib.Path(found).resolve()
    return str(path.parent if path.name == '__init__.py' else path)


def named(path: Any, where: str) -> Any:
    """Imports the class that a config names by `path`, at the key `where`.

    Raises `UserError` for a package that is not allowed, for what cannot be imported, and for what is neither a module
    of Flax NNX nor a dataclass: nothing else is meant to stand in a config.
    """
    if not isinstance(path, str):
        raise UserError(f'{where} is {path!r}; it must be the import path of a class')
    module, _, name = path.rpartition('.')
    package = module.partition('.')[0]
    if package not in {*OWN, *_allowed, *_declared()}:
        raise UserError(
            f'{where} names {path}, which is no part of attnlab, and running code that comes with a config is dangerous'
            f'; if you trust it, add --allow={package or path} (a package, or the path of a Python file)'
        )
    try:
        if '__main__' in module.split('.'):
            raise ImportError(f'{module} is a program')
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        remedy = f'; give its file, --allow=PATH/{package}.py' if error.name == package else ''
        raise UserError(f'{where} is {path!r}, which cannot be imported: {error}{remedy}') from error
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f'{where} is {path!r}, which cannot be imported: {error}') from error
    if inspect.isabstract(found) and package not in OWN:
        lacks = ', '.join(sorted(found.__abstractmethods__))
        raise UserError(f'{where} names {path}, which lacks {lacks} of its base class; define what is missing')
    if inspect.isabstract(found):
        raise UserError(f'{where} names {path}, of which there are kinds, and none in general; name one of them')
    if not is_part(found) or found.__module__.partition('.')[0] != package:
        raise UserError(
            f'{where} names {path}, which no config may call: it is no nnx.Module and no dataclass of {package}'
        )
    return found


def is_part(target: Any) -> bool:
    """Whether a config may name a thing: a module of Flax NNX, or a dataclass, whose making does nothing else."""
    return isinstance(target, type) and (issubclass(target, nnx.Module) or dataclasses.is_dataclass(target))


@functools.cache
def _declared() -> frozenset[str]:
    """Packages that are installed and declare classes for configs."""
    return frozenset(point.module.partition('.')[0] for point in importlib.metadata.entry_points(group=GROUP))
