"""The one exception meant for the person at the keyboard."""

import difflib
import errno
import importlib
from collections.abc import Iterable
from typing import Any

EXTRAS = {
    'optuna': 'sweep',
    'submitit': 'sweep',
    'psycopg': 'postgresql',
    'tokenizers': 'bpe',
    'tensorflow_datasets': 'tfds',
    'sklearn': 'offline',
    'pyarrow': 'parquet',
    'outlines_core': 'regex',
    'lark': 'grammar',
    'wandb': 'wandb',
}
"""The extra that installs a package that is not always there."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk on which there is no room."""


SHOWN = 40
"""The most names that an error lists."""


class UserError(Exception):
    """A mistake or a circumstance the user can mend; the command line prints it as one line, without a traceback."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the valid name closest to `name`, or the valid names when none is close.

    It shows all that are equally close, and of many names of which none is close those that are least far.
    """
    valid = sorted(valid)
    close = sorted(valid, key=lambda other: _closeness(name, other), reverse=True)[:SHOWN]
    if close and _closeness(name, close[0])[0] >= 0.5:
        equally = [other for other in close if _closeness(name, other) == _closeness(name, close[0])]
        return f'; did you mean {" or ".join(map(repr, equally))}?'
    if len(valid) > SHOWN:
        return f'; the nearest of {len(valid)} valid names: {", ".join(close)}'
    return f'; valid names: {", ".join(valid) or "none"}'


def optional(module: str, needed_by: str) -> Any:
    """Imports a module of a package that is not always there.

    Raises `UserError` with the extra that installs the package where it is missing; one that is there and broken raises
    what it raises.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = not_installed(error, needed_by)
        if missing is None:
            raise
        raise missing from error


def not_installed(error: ModuleNotFoundError, needed_by: str) -> UserError | None:
    """What is to be installed where a package of an extra was not found; `None` for any other."""
    package = (error.name or '').partition('.')[0]
    if package not in EXTRAS:
        return None
    return UserError(f'{needed_by} needs {package}, which is not installed: pip install "attnlab[{EXTRAS[package]}]"')


def out_of_memory(error: BaseException) -> str | None:
    """What JAX says in its first line where a device has too little memory; `None` for any other error."""
    first = str(error).strip().partition('\n')[0]
    # By name, so that whatever only prints need not import JAX.
    exhausted = 'RESOURCE_EXHAUSTED' in first or 'Out of memory' in first
    return first if exhausted and type(error).__name__ == 'JaxRuntimeError' else None


def unserved(error: BaseException) -> bool:
    """Whether a core has no form for a call, `pallas_kernels.dispatch.Unserved`: by name, for the same reason."""
    return type(error).__name__ == 'Unserved'


def of_the_machine(error: Exception) -> bool:
    """Whether an error is no bug of the code that raised it, and `attnlab.cli` has a line for it.

    It is a missing package of an extra, a full disk, too little memory of a device, or a core without a form.
    """
    if isinstance(error, ModuleNotFoundError):
        return not_installed(error, '') is not None
    if isinstance(error, OSError):
        return error.errno in FULL
    return out_of_memory(error) is not None or unserved(error)


def _closeness(name: str, other: str) -> tuple[float, bool]:
    """The share of letters that match in order, and whether the names are the same letters in another order."""
    return difflib.SequenceMatcher(a=other, b=name).ratio(), sorted(name) == sorted(other)
