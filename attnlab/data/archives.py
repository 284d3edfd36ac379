"""What is read out of archives without unpacking them to the disk."""

import pathlib
import re
import tarfile
from collections.abc import Iterator
from typing import IO

from attnlab.errors import UserError


def tar_members(archive: pathlib.Path, wanted: re.Pattern[str]) -> Iterator[tuple[pathlib.PurePosixPath, IO[bytes]]]:
    """The paths inside and the contents of the plain files of an archive whose path inside matches, in its order.

    Each content is to be read before the next is asked for. Raises `UserError` for an archive that cannot be read, and
    for one with a member outside its own folder.
    """
    try:
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
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f'{archive} cannot be read as a tar archive: {error}') from error
