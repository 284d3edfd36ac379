"""Reading archives without unpacking them to disk, and what says that one, or a file of numpy, is damaged."""

import pathlib
import re
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO

from attnlab.errors import UserError

UNREADABLE = (
    *(ValueError, OSError, EOFError, SyntaxError, MemoryError, RuntimeError),
    *(zlib.error, zipfile.BadZipFile, tokenize.TokenError),
)
"""What numpy raises for files and members of an archive that are damaged, claim more than fits, or are objects.

`RuntimeError` is for archives that are encrypted, or packed in a way that Python does not know.
"""


def tar_members(archive: pathlib.Path, wanted: re.Pattern[str]) -> Iterator[tuple[pathlib.PurePosixPath, IO[bytes]]]:
    """Yields the paths and contents of the regular files of a tar archive whose path matches, in archive order.

    Each content must be read before the next is requested. Raises `UserError` for an archive with a
    member outside its own folder.
    """
    with tarfile.open(archive, 'r|*') as members:
        for member in members:
            path = pathlib.PurePosixPath(member.name)
            if path.is_absolute() or '..' in path.parts:
                raise UserError(f'{archive} has a member outside its own folder, {member.name!r}; do not trust it')
            content = members.extractfile(member) if member.isreg() and wanted.fullmatch(path.as_posix()) else None
            if content is not None:
                yield path, content


def readable[T](archive: pathlib.Path, found: Iterator[T]) -> Iterator[T]:
    """Yields the items of an archive. Raises `UserError` where it is damaged or not an archive."""
    try:
        yield from found
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f'{archive} cannot be read as a tar archive: {error}; delete it and start again') from error
