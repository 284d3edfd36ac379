"""Files are whole or not there, whatever happens while they are written."""

import contextlib
import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures

import pytest

from attnlab import files

KILLED = """
import os, pathlib, runpy, signal, sys
files = runpy.run_path(sys.argv[1])
with files['replacing'](pathlib.Path(sys.argv[2])) as temporary:
    temporary.write_text('half of what is ne')
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_text_bytes_and_json_are_written_in_folders_that_are_made(tmp_path):
    files.write(tmp_path / 'a' / 'b' / 'text', 'größer')
    files.write(tmp_path / 'a' / 'bytes', b'\xff')
    files.write_json(tmp_path / 'a' / 'json', {'steps': [1, 2.5]})
    assert (tmp_path / 'a' / 'b' / 'text').read_bytes() == 'größer'.encode()
    assert (tmp_path / 'a' / 'bytes').read_bytes() == b'\xff'
    assert json.loads((tmp_path / 'a' / 'json').read_text()) == {'steps': [1, 2.5]}
    assert sorted(path.name for path in (tmp_path / 'a').iterdir()) == ['b', 'bytes', 'json']


def test_a_block_that_fails_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / 'config.json'
    files.write(path, 'old')
    with pytest.raises(ZeroDivisionError), files.replacing(path) as temporary:
        temporary.write_text('half')
        assert files.is_temporary(temporary) and not files.is_temporary(path)
        1 / 0  # noqa: B018
    assert path.read_text() == 'old' and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize('call', ['fsync', 'replace'])
def test_a_full_disk_leaves_the_old_file_and_no_litter_and_names_the_file(tmp_path, monkeypatch, call):
    path = tmp_path / 'config.json'
    files.write(path, 'old')

    def full(*_):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match='No space left') as raised:
        files.write(path, 'new')
    assert raised.value.filename == str(path)
    assert path.read_text() == 'old' and list(tmp_path.iterdir()) == [path]


def test_a_writer_that_is_killed_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / 'config.json'
    files.write(path, 'old')
    done = subprocess.run([sys.executable, '-c', KILLED, files.__file__, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = (child for child in tmp_path.iterdir() if child != path)
    assert path.read_text() == 'old' and files.is_temporary(left)
    files.write(path, 'new')
    assert path.read_text() == 'new'


def test_readers_and_writers_at_once_meet_whole_files(tmp_path):
    path = tmp_path / 'numbers.json'
    lists = [[number] * 20_000 for number in range(2)]
    files.write_json(path, lists[0])

    def write(number: int) -> None:
        for _ in range(10):
            files.write_json(path, lists[number])

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert json.loads(path.read_text()) in lists
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_on_the_disk_before_its_name_and_the_name_at_the_end(tmp_path, monkeypatch):
    calls: list[str] = []
    flush, replace = files.flush, os.replace

    def flushed(path: pathlib.Path) -> None:
        calls.append('folder' if path.is_dir() else 'file')
        flush(path)

    def replaced(old: pathlib.Path, new: pathlib.Path) -> None:
        calls.append('replace')
        replace(old, new)

    monkeypatch.setattr(files, 'flush', flushed)
    monkeypatch.setattr(os, 'replace', replaced)
    files.write(tmp_path / 'text', 'text')
    assert calls == ['file', 'replace', 'folder']


def test_a_file_that_grows_is_not_lost_to_one_that_waited(tmp_path):
    """One fails with nothing written while another waits for it: what the other writes has a name."""
    path, held, opened = tmp_path / 'file', threading.Event(), threading.Event()

    def fails():
        with contextlib.suppress(ValueError), files.growing(path):
            held.set()
            opened.wait(10)
            time.sleep(0.2)  # The other has opened the file by then, and waits for its lock.
            raise ValueError

    def writes():
        held.wait(10)
        opened.set()
        with files.growing(path) as file:
            file.write(b'content')

    threads = [threading.Thread(target=each) for each in (fails, writes)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert path.read_bytes() == b'content' and [each.name for each in tmp_path.iterdir()] == ['file']


def test_results_that_are_no_numbers_are_null(tmp_path):
    found = {'a': [1.5, float('nan'), (float('inf'), 2)], 'b': {'c': -float('inf')}}
    files.write_results(tmp_path / 'json', {}, found)
    assert json.loads((tmp_path / 'json').read_text()) == {'a': [1.5, None, [None, 2]], 'b': {'c': None}}


def test_results_of_another_request_stay_and_those_of_the_same_are_replaced(tmp_path):
    path = tmp_path / 'evals' / '600-reuse0.2.json'
    first, second, third = path, path.with_name('600-reuse0.2-1.json'), path.with_name('600-reuse0.2-2.json')
    train, few = {'split': 'train', 'rows': (1, 2)}, {'split': 'test', 'rows': None}
    assert files.write_results(path, train, {'loss': 1.0}) == first
    assert files.write_results(path, few, {'loss': 2.0}) == second
    assert files.write_results(path, train, {'loss': 3.0}) == first and json.loads(first.read_text())['loss'] == 3.0
    assert files.write_results(path, few, {'loss': 4.0}) == second and json.loads(second.read_text())['loss'] == 4.0
    # What does not say what it was asked, is damaged or is no file stays too.
    first.write_text('{"split": "train", "loss": 5.0}')
    second.write_text('{"split": "test", ')
    third.mkdir()
    assert files.write_results(path, train, {'loss': 6.0}) == path.with_name('600-reuse0.2-3.json')
    assert first.read_text() == '{"split": "train", "loss": 5.0}' and second.read_text() == '{"split": "test", '
    assert files.figures_of(second) == tmp_path / 'evals' / '600-reuse0.2-1'
    assert sorted(tmp_path.glob('evals/.*')) == []


def test_two_that_write_results_at_once_keep_both(tmp_path):
    def write(number):
        return files.write_results(tmp_path / 'results.json', {'rows': number}, {})

    with futures.ThreadPoolExecutor(8) as pool:
        places = list(pool.map(write, range(32)))
    assert len(set(places)) == 32
    assert [json.loads(place.read_text()) for place in places] == [{'rows': number} for number in range(32)]
