import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from attnlab.data import pipeline
from attnlab.data.pipeline import batches, mixed, ordered_batches
from attnlab.data.text.corpus import Text
from attnlab.data.text.tokenizers import Bytes
from attnlab.data.text.windows import Windows
from attnlab.errors import UserError

SMALL = 4096


@pytest.fixture(autouse=True)
def few_rows_are_drawn(monkeypatch):
    """Orders of `SMALL` rows or more are those of a cipher here, as otherwise those of a million."""
    monkeypatch.setattr(pipeline, 'DRAWN', SMALL - 1)
    pipeline._order.cache_clear()
    yield
    pipeline._order.cache_clear()


class Numbers:
    """Row `i` holds the number `i`."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {'row': np.int32(index), 'weights': np.ones(2, np.float32), 'segments': np.ones(2, np.int32)}


def take(source, count, **arguments):
    with batches(source, **({'batch_size': 4, 'seed': 0} | arguments)) as stream:
        return np.stack([next(stream)['row'] for _ in range(count)])


@pytest.mark.parametrize(('length', 'batch_size'), [(12, 4), (SMALL, SMALL // 2)])
def test_every_epoch_holds_every_row_once_in_a_new_order(length, batch_size):
    rows = take(Numbers(length), 3 * length // batch_size, batch_size=batch_size).reshape(3, length)
    for epoch in rows:
        assert sorted(epoch) == list(range(length))
        assert epoch.tolist() != list(range(length))
    assert len({tuple(epoch) for epoch in rows}) == 3


def test_unshuffled_batches_go_round():
    assert take(Numbers(6), 3, shuffle=False).tolist() == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]


def test_the_seed_decides_the_order():
    assert np.array_equal(take(Numbers(50), 20, seed=7), take(Numbers(50), 20, seed=7))
    assert not np.array_equal(take(Numbers(50), 20, seed=7), take(Numbers(50), 20, seed=8))


@pytest.mark.parametrize(('length', 'batch_size'), [(12, 4), (SMALL, SMALL // 2)])
def test_the_next_seed_is_not_the_next_epoch(length, batch_size):
    count = 2 * length // batch_size
    first, second = (take(Numbers(length), count, seed=s, batch_size=batch_size).reshape(2, length) for s in (5, 6))
    assert not np.array_equal(first[1], second[0])


@pytest.mark.parametrize('drawn', [0, 2**20])
@pytest.mark.parametrize('length', [60_000, 65_536, 65_537, 2**18 + 1])
def test_orders_of_two_seeds_and_of_two_epochs_are_independent(length, drawn, monkeypatch):
    monkeypatch.setattr(pipeline, 'DRAWN', drawn)
    count, ways = 4096, [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (0, 2)]
    orders = np.array([[pipeline._order(length, *way)(place) for place in range(count)] for way in ways])
    between = np.corrcoef(orders)[np.triu_indices(len(ways), 1)]
    neighbours = [np.corrcoef(order[:-lag], order[lag:])[0, 1] for order in orders for lag in (1, 2, 8)]
    assert max(*map(abs, between), *map(abs, neighbours)) < 5 / count**0.5


# Of a largest index of 2^16 Grain's own order has 65,536 different rows.
@pytest.mark.parametrize('length', [4097, 2**16, 2**16 + 1])
def test_mixed_rows_are_all_rows(length):
    assert len({mixed(place, length, key=9) for place in range(length)} & set(range(length))) == length


# Few rows and many are shuffled differently.
@pytest.mark.parametrize(('length', 'batch_size'), [(10, 4), (SMALL + 3, 1000)])
@pytest.mark.parametrize('start', [1, 2, 3, 7])
def test_starting_at_a_batch_is_as_if_one_had_consumed_those_before(length, batch_size, start):
    source = Numbers(length)
    whole = take(source, start + 3, batch_size=batch_size)
    assert np.array_equal(take(source, 3, batch_size=batch_size, start=start), whole[start:])


@pytest.mark.parametrize('process_count', [2, 4])
@pytest.mark.parametrize('length', [3, 8, 10, SMALL + 1])
def test_the_parts_of_the_processes_are_the_batch_of_one_across_epochs(process_count, length):
    batch_size = 8 if length < SMALL else 1024
    whole = take(Numbers(length), 10, batch_size=batch_size)
    parts = [
        take(Numbers(length), 10, batch_size=batch_size, process_index=index, process_count=process_count)
        for index in range(process_count)
    ]
    assert np.array_equal(np.concatenate(parts, axis=1), whole)


def test_a_process_resumes_too():
    arguments = {'batch_size': 6, 'process_index': 1, 'process_count': 3}
    assert np.array_equal(take(Numbers(7), 5, start=4, **arguments), take(Numbers(7), 9, **arguments)[4:])


@pytest.mark.parametrize('num_threads', [0, 1, 4])
def test_threads_change_nothing(num_threads):
    assert np.array_equal(take(Numbers(23), 20, num_threads=num_threads), take(Numbers(23), 20))


def test_fewer_rows_than_a_batch():
    assert sorted(take(Numbers(3), 3).ravel()) == sorted([*range(3)] * 4)


def test_windows_make_batches_of_rows():
    tokens = np.arange(33, dtype=np.uint8)
    source = Windows(Text(tokens, np.array([20, 33]), Bytes(), '', {}), 8)
    with batches(source, batch_size=2, seed=0, shuffle=False) as stream:
        batch = next(stream)
    assert {name: values.shape for name, values in batch.items()} == dict.fromkeys(source[0], (2, 8))
    assert np.array_equal(batch['tokens'].ravel(), tokens[:16])


def test_ordered_batches_hold_every_row_once_and_fill_the_last_with_nothing():
    with ordered_batches(Numbers(10), batch_size=4) as stream:
        found = list(stream)
    assert [batch['row'].tolist() for batch in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    assert [batch['weights'].sum() for batch in found] == [8, 8, 4]
    assert found[2]['segments'].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    assert found[2]['weights'].dtype == np.float32


def test_ordered_batches_of_a_multiple_are_not_filled():
    with ordered_batches(Numbers(8), batch_size=4) as stream:
        assert [batch['weights'].sum() for batch in stream] == [8, 8]


def test_ordered_parts_of_the_processes_are_the_batches_of_one():
    def rows(**arguments):
        with ordered_batches(Numbers(9), batch_size=4, **arguments) as stream:
            return np.stack([batch['row'] for batch in stream])

    parts = [rows(process_index=index, process_count=2) for index in range(2)]
    assert np.array_equal(np.concatenate(parts, axis=1), rows())


def test_mistakes_are_named():
    with pytest.raises(UserError, match='batch_size is 6; it must be a positive multiple of the 4 process'):
        batches(Numbers(9), batch_size=6, seed=0, process_count=4)
    with pytest.raises(UserError, match='batch_size is 0'):
        ordered_batches(Numbers(9), batch_size=0)
    with pytest.raises(UserError, match='Numbers is empty'):
        batches(Numbers(0), batch_size=1, seed=0)
    with pytest.raises(UserError, match='seed is -1'):
        batches(Numbers(9), batch_size=1, seed=-1)
    with pytest.raises(UserError, match='have no weights, only row'):
        ordered_batches([{'row': np.zeros(3)}], batch_size=1)


def test_closing_ends_the_stream_and_may_be_repeated():
    stream = batches(Numbers(9), batch_size=2, seed=0)
    next(stream)
    stream.close()
    stream.close()
    with pytest.raises(ValueError, match='closed'):
        next(stream)


def test_a_stream_that_is_dropped_is_closed():
    stream = batches(Numbers(9), batch_size=2, seed=0)
    (inner,) = stream._iterators
    next(stream)
    del stream
    with pytest.raises(ValueError, match='closed'):
        next(inner)


PROGRAM = """
import numpy as np
from attnlab.data.text.corpus import Text
from attnlab.data.pipeline import batches
from attnlab.data.text.tokenizers import Bytes
from attnlab.data.text.windows import Windows

if __name__ == '__main__':
    windows = Windows(Text(np.arange(200, dtype=np.uint8), np.array([200]), Bytes(), '', {}), 8)
    arguments = {'batch_size': 4, 'seed': 1, 'start': 3, 'process_index': 1, 'process_count': 2}
    left_open = [batches(windows, num_workers=n, **arguments) for n in (0, 2)]
    for _ in range(20):
        first, second = (next(stream)['tokens'].tolist() for stream in left_open)
        assert first == second, (first, second)
    print('same')
"""


def test_worker_processes_change_nothing_and_streams_left_open_make_no_noise_at_exit(tmp_path):
    program = tmp_path / 'program.py'
    program.write_text(PROGRAM)
    command = [sys.executable, '-W', 'error', program]
    environment = os.environ | {'PYTHONPATH': str(pathlib.Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, 'same\n', '')


KILLED = """
import multiprocessing
import numpy as np
from attnlab.data.text.corpus import Text
from attnlab.data.pipeline import batches
from attnlab.data.text.tokenizers import Bytes
from attnlab.data.text.windows import Windows

if __name__ == '__main__':
    windows = Windows(Text(np.arange(200, dtype=np.uint8), np.array([200]), Bytes(), '', {}), 8)
    with batches(windows, batch_size=4, seed=1, num_workers=1) as stream:
        next(stream)
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        input()
"""


def started(folder, text):
    """The process of a program, whose first line is the numbers of its workers."""
    program = folder / 'program.py'
    program.write_text(text)
    environment = os.environ | {'PYTHONPATH': str(pathlib.Path(__file__).parents[2])}
    pipes = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)
    return subprocess.Popen([sys.executable, program], env=environment, text=True, **pipes)


ASKED = KILLED.replace('input()', 'input(), print(sum(len(next(stream)["tokens"]) for _ in range(40)))')


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_worker_processes_that_are_asked_to_stop_go_on_until_the_parent_ends_them(tmp_path, number):
    with started(tmp_path, ASKED) as process:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        for pid in filter(alive, workers):
            os.kill(pid, number)
        try:
            output, errors = process.communicate('\n', timeout=60)
        finally:
            process.kill()
        assert process.returncode == 0 and output.split() == ['160'], errors
    assert workers and not any(map(alive, workers))


@pytest.mark.slow
def test_worker_processes_end_with_a_parent_that_is_killed(tmp_path):
    with started(tmp_path, KILLED) as process:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert workers and all(map(alive, workers))
        process.kill()
        process.stdout.close()
    deadline = time.monotonic() + 10
    try:
        while any(map(alive, workers)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for pid in filter(alive, workers):
            os.kill(pid, signal.SIGKILL)


def alive(pid):
    try:
        state = pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != 'Z'


@pytest.mark.parametrize('length', [7, SMALL + 1])
@pytest.mark.parametrize('process_count', [1, 3])
def test_a_process_may_have_one_row_of_a_batch(length, process_count):
    parts = [
        take(Numbers(length), 3, batch_size=process_count, process_index=index, process_count=process_count)
        for index in range(process_count)
    ]
    assert np.array_equal(
        np.concatenate(parts, axis=1), take(Numbers(length), 3 * process_count, batch_size=1).reshape(3, -1)
    )
