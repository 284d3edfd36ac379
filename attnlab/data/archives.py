"""What is read out of archives without unpacking them to the disk."""

import pathlib
import re
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO

from attnlab.errors import UserError


def tar_members(archive: pathlib.Path, wanted: re.Pattern[str]) -> Iterator[tuple[pathlib.PurePosixPath, IO[bytes]]]:
    """The paths inside and the contents of the plain files of an archive whose path inside matches, in its order.

    Each content is to be read, from its start, before the next is asked for. Raises `UserError` for an archive with a
    member outside its own folder.
    """
    with tarfile.open(archive, 'r|*') as members:
        for member in members:
            path = pathlib.PurePosixPath(member.name)
            if path.is_absolute() or '..' in path.parts:
                raise UserError(
                    f'{archive} has a member outside its own folder, {member.name!r}; it is not to be trusted'
                )
            content = members.extractfile(member) if member.isreg() and wanted.fullmatch(path.as_posix()) else None
            if content is not None:
                yield path, content


def readable[T](archive: pathlib.Path, found: Iterator[T]) -> Iterator[T]:
    """What is found in an archive. Raises `UserError` where it turns out to be damaged, or none."""
    try:
        yield from found
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f'{archive} cannot be read as a tar archive: {error}; delete it and start again') from error
