"""Caches of trained tokenizers and of token ids, in files and folders that are written atomically.

Folders are made as `attnlab.files` writes files: under a hidden name beside their own, and renamed at the end.
"""

import contextlib
import hashlib
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import numpy as np
from jaxtyping import Shaped

from attnlab import files
from attnlab.errors import UserError

FOLDER = '~/.cache/attnlab/text'
"""The default folder of trained tokenizers and token ids."""


def key(*parts: str) -> str:
    """The cache key of a value determined by `parts`: 32 hexadecimal digits."""
    return hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:32]


@contextlib.contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields an empty folder that is renamed to `path` when the block ends, and removed when the block fails.

    When another process has created `path` in the meantime, that one stays and this one is removed.
    Raises `UserError` naming the folder where it cannot be written (no permission, full disk).
    """
    temporary = files.temporary_name(path)
    try:
        with _writing(path):
            temporary.mkdir(parents=True)
        yield temporary
        with _writing(path):
            for file in temporary.iterdir():
                files.flush(file)
            try:
                os.rename(temporary, path)
            except OSError:
                if not path.is_dir():
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_file(path: pathlib.Path, content: str | bytes) -> None:
    """Writes `content` to `path` atomically: on failure `path` is unchanged.

    Raises `UserError` naming the folder where it cannot be written (no permission, full disk).
    """
    with _writing(path):
        files.write(path, content)


def write_array(path: pathlib.Path, pieces: Iterable[Shaped[np.ndarray, '_']], dtype: np.dtype) -> int:
    """Writes the concatenation of `pieces` as one `.npy` file, without holding all of it in memory; returns its length.

    Raises `UserError` naming the folder where it cannot be written (no permission, full disk).
    """
    length = 0
    with _writing(path), path.open('xb') as file:
        _write_header(file, dtype, length)
        start = file.tell()
        for piece in pieces:
            file.write(piece.astype(dtype, copy=False).tobytes())
            length += len(piece)
        file.seek(0)
        _write_header(file, dtype, length)
        if file.tell() != start:
            raise AssertionError('numpy left no room in the .npy header for the array to grow')
    return length


def _write_header(file: BinaryIO, dtype: np.dtype, length: int) -> None:
    fields = {'descr': np.lib.format.dtype_to_descr(dtype), 'fortran_order': False, 'shape': (length,)}
    np.lib.format.write_array_header_1_0(file, fields)


@contextlib.contextmanager
def _writing(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        folder = path.parents[path.parent.name.endswith('.tmp')]
        reason = error.strerror or str(error)
        raise UserError(f'cannot write to {folder}: {reason}; make room or name another folder') from error
