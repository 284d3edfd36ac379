"""Files that are there whole or not at all.

A file is written under a hidden name beside its destination, put on the disk, and renamed into place: a reader meets
what was there before or what is there now, never half of it, and so does whoever starts after a crash or a power cut.
Of two writers of one file either may win. A process that is killed while it writes leaves its hidden file behind, which
may be deleted at any time.

Runs and studies are handed on, and may hold links to files of whoever goes on with them: what is not replaced but
opened to be written goes through `opened` or `appending`, and folders that are written to through `check_own`. Pipes
and devices have no end: what is read goes through `reading`.
"""

import contextlib
import errno
import fcntl
import io
import itertools
import json
import math
import os
import pathlib
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

from attnlab.errors import UserError


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path to write to; its file takes the place of `path` when the block ends, and vanishes when it fails.

    Folders that are missing are made. An `OSError` names `path` where it named the temporary file or none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)
    except OSError as error:
        if error.filename in (None, os.fspath(temporary)):
            error.filename = os.fspath(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def growing(path: pathlib.Path) -> Iterator[io.BufferedIOBase | None]:
    """Yields a file to append to, which takes the place of `path` when the block ends.

    Until then it is `path.part`; when the block fails, what it holds is kept, and a later call goes on with it. Another
    process waits, and is given `None` where `path` is there by then; a file system without locks does without.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f'{path.name}.part')
    with _held(part) as file:
        try:
            if path.is_file():
                yield None
                return
            yield file
            file.flush()
            flush(part)
            os.replace(part, path)
            flush(path.parent)
        finally:
            # While it is locked: nobody else can have begun to write to it.
            if _is_at(part, file) and not part.stat().st_size:
                part.unlink()


def _held(part: pathlib.Path) -> io.BufferedRandom:
    """The file at a path, opened to append to and locked; whoever held it before may have moved or removed it."""
    while True:
        file = part.open('a+b')
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if _is_at(part, file):
            return file
        file.close()


def _is_at(path: pathlib.Path, file: io.BufferedRandom) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def write(path: pathlib.Path, content: str | bytes) -> None:
    """Writes `content`, text as UTF-8, to `path`, which from then on holds all of it, or else what it held before."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes `value` as indented JSON, as `write` does."""
    write(path, json.dumps(value, indent=2) + '\n')


def write_results(path: pathlib.Path, asked: Mapping[str, Any], found: Mapping[str, Any]) -> pathlib.Path:
    """Writes what was asked for and what was found as one JSON object, as `write` does, and returns where it stands.

    A file that holds what was found for another request stays: `NAME-1.json` is taken in its place, or the next name
    that is free or has been given to this request. Numbers that are not finite are null, since JSON has none.
    """
    text = json.dumps(finite({**asked, **found}), indent=2, allow_nan=False) + '\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(path.parent):
        place = next(each for each in _numbered(path) if _is_for(each, asked))
        write(place, text)
    return place


def figures_of(results: pathlib.Path) -> pathlib.Path:
    """The folder of the figures of a file of results, beside it. Raises `UserError` where it is a link."""
    folder = results.with_suffix('')
    check_own(folder.parent, (folder.name,))
    return folder


def _numbered(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The path, and those with a number after its name."""
    yield path
    yield from (path.with_name(f'{path.stem}-{number}{path.suffix}') for number in itertools.count(1))


def _is_for(path: pathlib.Path, asked: Mapping[str, Any]) -> bool:
    """Whether a path is free, or a file of what was found for the same request."""
    if not os.path.lexists(path):
        return True
    try:
        kept = json.loads(path.read_text(encoding='utf-8')) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return False
    wanted = json.loads(json.dumps(finite(asked)))
    return isinstance(kept, dict) and all(name in kept and kept[name] == value for name, value in wanted.items())


@contextlib.contextmanager
def _alone_in(folder: pathlib.Path) -> Iterator[None]:
    """Keeps others who choose a name in a folder waiting; a file system without locks does without."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def finite(value: Any) -> Any:
    """The same with `None` for numbers that are not finite, which JSON has none of."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def read_json(path: pathlib.Path, remedy: str) -> Any:
    """Returns what a JSON file holds. Raises `UserError`, naming the file and the `remedy`, where it is damaged."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f'{path} is damaged: {error}; {remedy}') from error


def reading(path: pathlib.Path) -> io.BufferedReader:
    """The file at `path`, or that behind a link, to read. Raises `UserError` where it is none, such as a pipe."""
    try:
        # Without waiting for whoever is at the other end, should it be a pipe.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        # What a socket answers.
        if error.errno == errno.ENXIO:
            raise _not_to_read(path) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _not_to_read(path)
    return os.fdopen(handle, 'rb')


def read_text(path: pathlib.Path, errors: str = 'strict') -> str:
    """The text of a file in UTF-8. Raises `UserError` where it is no file."""
    with io.TextIOWrapper(reading(path), encoding='utf-8', errors=errors) as file:
        return file.read()


def _not_to_read(path: pathlib.Path) -> UserError:
    return UserError(f'{path} is not a regular file (a pipe, folder or device): replace it with the file')


def opened(path: pathlib.Path, flags: int) -> int:
    """A descriptor of the file at `path`, as `os.open` gives one for `flags`.

    Raises `UserError` where it is a link, or no file, such as a pipe.
    """
    try:
        # Without waiting for whoever is at the other end, should it be a pipe.
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        check_own(path.parent, (path.name,))
        # What a pipe that nobody reads, or a socket, answers.
        if error.errno == errno.ENXIO:
            raise _no_file(path) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _no_file(path)
    return handle


def _no_file(path: pathlib.Path) -> UserError:
    return UserError(f'{path} is not a regular file (a pipe, folder or device), so it is not written to: remove it')


def appending(path: pathlib.Path) -> TextIO:
    """A text file to append to. Raises `UserError` where `path` is a link, or no file."""
    return os.fdopen(opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 'a', encoding='utf-8')


def check_own(folder: pathlib.Path, names: Iterable[str]) -> None:
    """Raises `UserError` where one of the names in a folder is a link: what is written there would be elsewhere."""
    for name in names:
        path = folder / name
        if path.is_symlink():
            there = str(path.readlink())
            raise UserError(f'{path} is a link to {there!r}, which nothing is written through: remove the link')


def temporary_name(path: pathlib.Path) -> pathlib.Path:
    """A hidden name beside `path` that nobody else has."""
    return path.with_name(f'.{path.name}.{uuid.uuid4().hex}.tmp')


def is_temporary(path: pathlib.Path) -> bool:
    """Whether a path is a file that is being written, or was when its writer was killed."""
    return path.name.startswith('.') and path.name.endswith('.tmp')


def flush(path: pathlib.Path) -> None:
    """Puts a file on the disk, or the names in a folder, so that a power cut cannot take them back."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems keep no names of their own to put anywhere.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(handle)
