"""Locks of the kernel: who looks at one changes nothing, and none is taken through a link."""

import os

import pytest

from attnlab import files
from attnlab.errors import UserError
from attnlab.locks import Lock


def test_looking_at_a_lock_writes_nothing_and_does_not_take_it(tmp_path):
    path = tmp_path / 'lock'
    assert not Lock(path).taken() and not path.exists()
    path.write_text('process 7 on nowhere')
    path.chmod(0o444)
    before = path.stat()
    assert not Lock(path).taken()
    assert path.read_text() == 'process 7 on nowhere' and path.stat().st_mtime_ns == before.st_mtime_ns
    path.chmod(0o644)
    held = Lock(path)
    assert held.acquire() and Lock(path).taken() and not Lock(path).acquire(wait=False)
    held.release()
    assert not Lock(path).taken()


@pytest.mark.parametrize('make', [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_no_lock(tmp_path, make):
    path = tmp_path / 'lock'
    make(path)
    for ask in (Lock(path).acquire, Lock(path).taken, lambda: files.appending(path)):
        with pytest.raises((UserError, IsADirectoryError)) as caught:
            ask()
        if make is os.mkfifo:
            assert f'{path} is not a regular file (a pipe, folder or device)' in str(caught.value)


@pytest.mark.parametrize('there', [True, False])
def test_no_lock_is_taken_through_a_link(tmp_path, there):
    victim = tmp_path / 'thesis.tex'
    if there:
        victim.write_text('precious')
    (tmp_path / 'lock').symlink_to(victim)
    with pytest.raises(UserError, match=r"lock is a link to '.*thesis\.tex', which nothing is written through"):
        Lock(tmp_path / 'lock').acquire()
    if there:
        with pytest.raises(UserError, match='is a link to'):
            Lock(tmp_path / 'lock').taken()
    assert victim.exists() == there and (not there or victim.read_text() == 'precious')
