"""Downloads over HTTP, verified and cached, that go on where they were cut off."""

import contextlib
import hashlib
import http
import http.client
import io
import pathlib
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

from absl import logging

from attnlab.errors import UserError
from attnlab.files import growing

WAITS = (0.0, 1.0, 4.0)
"""Seconds before every attempt at a download."""

TIMEOUT = 60.0
"""Seconds without an answer after which an attempt has failed."""

BLOCK = 2**20


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
    """Downloads `url` to `path`, which appears only when it is complete; a later call goes on behind what has come."""
    try:
        with growing(path) as file:
            failure = None if file is None else _transfer(url, file)
            if failure is not None:
                raise UserError(f'cannot download {url}: {failure}; without a network, put a copy of it at {path}')
    except OSError as error:
        raise UserError(f'cannot write {path}: {error.strerror}; make room or name another folder') from error


def _transfer(url: str, file: io.BufferedIOBase) -> str | None:
    """Brings `file` to the response of `url`, with a few attempts that each go on behind what is there.

    Returns the last error, if all failed. A server that sends no ranges, or none from there on, is asked for the whole.
    """
    failure = None
    for wait in WAITS:
        time.sleep(wait)
        failure = _attempt(url, file)
        if failure is None:
            return None
    return failure


def _attempt(url: str, file: io.BufferedIOBase) -> str | None:
    start = file.seek(0, io.SEEK_END)
    request = urllib.request.Request(url, headers={'Range': f'bytes={start}-'} if start else {})
    try:
        with _network():
            answer = urllib.request.urlopen(request, timeout=TIMEOUT)
        with answer:
            if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
                file.seek(0)
                file.truncate()
            while block := _block(answer):
                file.write(block)
            return f'{answer.length} bytes are missing' if answer.length else None
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            if error.headers.get('Content-Range') == f'bytes */{start}':
                return None  # All of it is here: whoever brought it was stopped before it had its name.
            file.seek(0)
            file.truncate()
        return str(error.reason)
    except (urllib.error.URLError, http.client.HTTPException) as error:
        return str(getattr(error, 'reason', None) or error)


def _block(answer: http.client.HTTPResponse) -> bytes:
    with _network():
        return answer.read(BLOCK)


@contextlib.contextmanager
def _network() -> Iterator[None]:
    """Raises `URLError` for every `OSError` of a connection (TLS, routes), which is then none of the disk."""
    try:
        yield
    except urllib.error.URLError:
        raise
    except OSError as error:
        raise urllib.error.URLError(error) from error
