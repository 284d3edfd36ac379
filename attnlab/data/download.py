"""Downloads over HTTP, verified and cached."""

import hashlib
import http.client
import io
import pathlib
import time
import urllib.error
import urllib.request

from absl import logging

from attnlab.errors import UserError
from attnlab.files import replacing

WAITS = (0.0, 1.0, 4.0)
"""Seconds before every attempt at a download."""

TIMEOUT = 60.0
"""Seconds without an answer after which an attempt has failed."""

BLOCK = 2**20

NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError)


def fetch(url: str, path: pathlib.Path, *, size: int, digest: str | None, algorithm: str = 'sha256') -> pathlib.Path:
    """Returns `path`, holding the file of `size` bytes and `digest` (hexadecimal), downloaded unless it is there.

    Without a digest only the size is checked. Raises `UserError` naming the address and the path when the file
    cannot be downloaded or written, or has another size or digest.
    """
    if not path.is_file():
        logging.info('downloading %s', url)
        _download(url, path)
    with path.open('rb') as file:
        found = path.stat().st_size, hashlib.file_digest(file, algorithm).hexdigest()
    if found != (size, digest or found[1]):
        expected, got = (f'{n} bytes, {algorithm} {d}' for n, d in ((size, digest), found))
        raise UserError(f'{path} is not the file at {url}: it has {got}, not {expected}; delete it and start again')
    return path


def read(url: str) -> bytes:
    """Returns the response of `url`. Raises `UserError` naming the address when there is none."""
    answer = io.BytesIO()
    failure = _transfer(url, answer)
    if failure is not None:
        raise UserError(f'cannot read {url}: {failure}')
    return answer.getvalue()


def _download(url: str, path: pathlib.Path) -> None:
    """Downloads `url` to `path`, which appears only when it is complete."""
    try:
        with replacing(path) as temporary:
            with temporary.open('wb') as file:
                failure = _transfer(url, file)
            if failure is not None:
                raise UserError(f'cannot download {url}: {failure}; without a network, put a copy of it at {path}')
    except OSError as error:
        raise UserError(f'cannot write {path}: {error.strerror}; make room or name another folder') from error


def _transfer(url: str, file: io.BufferedIOBase) -> str | None:
    """Copies the response of `url` to `file`, with a few attempts; returns the last error, if all failed."""
    for wait in WAITS:
        time.sleep(wait)
        file.seek(0)
        file.truncate()
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
                while block := answer.read(BLOCK):
                    file.write(block)
                if not answer.length:
                    return None
                failure = f'{answer.length} bytes are missing'
        except NETWORK_ERRORS as error:
            failure = str(getattr(error, 'reason', None) or error)
    return failure
