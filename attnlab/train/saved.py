"""Which steps of a run have a checkpoint."""

import os
import pathlib

from attnlab.errors import UserError


def steps_in(folder: pathlib.Path) -> list[int]:
    """The steps that have a checkpoint, damaged or not, in order; none where there is no such folder.

    Raises `UserError` where they cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(int(entry.name) for entry in entries if _is_step(entry.name) and entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(folder, error) from error


def unreadable(folder: pathlib.Path, error: OSError) -> UserError:
    """What is said of checkpoints that a disk or a network does not give."""
    where = '' if error.filename in (None, os.fspath(folder)) else f' ({error.filename})'
    return UserError(
        f'{folder} cannot be read: {error.strerror}{where}; nothing was changed: give the same command again, later'
    )


def _is_step(name: str) -> bool:
    """Whether a folder of this name is a checkpoint: a number as it is written here, without zeros before it."""
    return name.isascii() and name.isdecimal() and name == str(int(name))
