"""Downloads that are cut off go on, in the same call and in a later one, and only from servers that can."""

import contextlib
import errno
import functools
import hashlib
import http.client
import http.server
import io
import ssl
import threading

import pytest

from attnlab.data import download
from attnlab.data.download import fetch
from attnlab.errors import UserError

CONTENT = bytes(range(256)) * 40


class Failing(http.server.BaseHTTPRequestHandler):
    """Sends up to `most` bytes of what is asked for; `ranges`: from where it is asked for."""

    def __init__(self, options, log, *arguments):
        self.options, self.log = options, log
        super().__init__(*arguments)

    def do_GET(self):
        asked = self.headers.get('Range')
        self.log.append(asked)
        start = int(asked.removeprefix('bytes=').removesuffix('-')) if asked and self.options['ranges'] else 0
        if asked and self.options['ranges'] and start >= len(CONTENT):
            self.send_response(416)
            self.send_header('Content-Range', f'bytes */{len(CONTENT)}')
            self.send_header('Content-Length', '0')
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        self.send_header('Content-Length', str(len(CONTENT) - start))
        self.end_headers()
        self.wfile.write(CONTENT[start : start + self.options['most']])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(download, 'WAITS', (0.0, 0.0))
    options, log = {'ranges': True, 'most': len(CONTENT)}, []
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Failing, options, log))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f'http://127.0.0.1:{server.server_address[1]}/file', options, log
    server.shutdown()
    server.server_close()
    thread.join()


def had(url, path):
    return fetch(url, path, size=len(CONTENT), digest=hashlib.sha256(CONTENT).hexdigest()).read_bytes()


def test_what_has_come_is_not_asked_for_again(tmp_path, served):
    """Two attempts of 3,000 bytes, then a call that finds the rest."""
    url, options, log = served
    options['most'] = 3_000
    path = tmp_path / 'folder' / 'file'
    with pytest.raises(UserError, match=rf'cannot download .*: 4240 bytes are missing; .* put a copy of it at {path}'):
        had(url, path)
    assert not path.exists() and (tmp_path / 'folder' / 'file.part').read_bytes() == CONTENT[:6_000]
    options['most'] = len(CONTENT)
    assert had(url, path) == CONTENT
    assert log == [None, 'bytes=3000-', 'bytes=6000-']
    assert [each.name for each in path.parent.iterdir()] == ['file']


def test_servers_without_ranges_send_the_whole_again(tmp_path, served):
    url, options, log = served
    (tmp_path / 'file.part').write_bytes(b'what came before')
    options['ranges'] = False
    assert had(url, tmp_path / 'file') == CONTENT and log == ['bytes=16-']


def test_more_than_there_is_begins_anew(tmp_path, served):
    url, _, log = served
    (tmp_path / 'file.part').write_bytes(2 * CONTENT)
    assert had(url, tmp_path / 'file') == CONTENT and log == [f'bytes={2 * len(CONTENT)}-', None]


def test_what_is_whole_but_has_no_name_yet_is_not_asked_for_again(tmp_path, served):
    url, _, log = served
    (tmp_path / 'file.part').write_bytes(CONTENT)
    assert had(url, tmp_path / 'file') == CONTENT and log == [f'bytes={len(CONTENT)}-']


def test_a_connection_that_breaks_is_no_full_disk(tmp_path, served, monkeypatch):
    """Of the layers below HTTP: TLS in the middle of an answer, and a route that is gone before it begins."""
    url, _, log = served
    whole = http.client.HTTPResponse.read
    broken = [ssl.SSLEOFError(8, 'EOF occurred in violation of protocol')]

    def breaking(answer, size=None):
        if log == [None] and answer.length < len(CONTENT) and broken:
            raise broken.pop()
        return whole(answer, size)

    monkeypatch.setattr(http.client.HTTPResponse, 'read', breaking)
    monkeypatch.setattr(download, 'BLOCK', 1_000)
    assert had(url, tmp_path / 'file') == CONTENT and log == [None, 'bytes=1000-'] and not broken

    def gone(connection):
        raise OSError(errno.EHOSTUNREACH, 'No route to host')

    monkeypatch.setattr(http.client.HTTPConnection, 'getresponse', gone)
    with pytest.raises(UserError, match=r'cannot download .*No route to host; without a network'):
        had(url, tmp_path / 'other')
    with pytest.raises(UserError, match=r'cannot read .*No route to host'):
        download.read(url)


def test_a_full_disk_is_no_broken_connection(tmp_path, served, monkeypatch):
    url, _, log = served

    class Full(io.BytesIO):
        def write(self, block):
            raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(download, 'growing', lambda path: contextlib.nullcontext(Full()))
    with pytest.raises(UserError, match=r'cannot write .*: No space left on device; make room'):
        had(url, tmp_path / 'file')
    assert log == [None]


def test_of_another_file_the_digest_tells(tmp_path, served):
    url, _, _ = served
    (tmp_path / 'file.part').write_bytes(b'x' * 100)
    with pytest.raises(UserError, match='is not the file at'):
        had(url, tmp_path / 'file')
    path = tmp_path / 'none'
    with pytest.raises(UserError, match='cannot download'):
        had('http://127.0.0.1:9/nothing', path)
    assert not path.exists() and not (tmp_path / 'none.part').exists()
