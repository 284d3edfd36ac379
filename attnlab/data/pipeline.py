"""Batches from rows by index: batch `n` is a pure function of the source, the seed and `n`."""

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np
from absl import flags
from grain.experimental import index_shuffle

from attnlab.data.workers import end_with_the_parent, leave_stopping_to_the_parent
from attnlab.errors import UserError

Batch = dict[str, np.ndarray]

Row = dict[str, Any]
"""One example as batches stack them: arrays and scalars by name, of the same shapes and types at every index."""

BUFFER = 8
"""The number of batches prefetched."""

DRAWN = 2**20
"""The most rows whose order is drawn as a whole, in 8 MiB and some 40 ms an epoch and process."""

ROUNDS = 12
"""Rounds of the cipher that orders more rows. After the four of Grain's `shuffle` orders of two seeds are alike."""

VARIED = 0xA06
"""Tells the random streams of rows from those of their order."""

ENDLESS = sys.maxsize // 2
"""Rows of an endless list; less than the largest index, since Grain counts on from its end."""


@runtime_checkable
class Source(Protocol):
    """Random access to rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


def spread(length: int, count: int) -> list[int]:
    """So many of `length` places, at equal distances from the first to the last; of one the first.

    Rows that are stored class by class, or document by document, are so sampled, where the first are of few.
    """
    return [place_of(index, length, count) for index in range(count)]


def place_of(index: int, length: int, count: int) -> int:
    """One of the places of `spread`, which are all in order where `count` is `length`."""
    return index * (length - 1) // max(count - 1, 1)


@runtime_checkable
class Varied(Protocol):
    """A source whose rows training reads changed at random, each time in another way; by index they are as they are."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def varied(self, index: int, rng: np.random.Generator) -> Row:
        """Row `index`, changed as drawn from `rng`."""


class Batches(Iterator[Batch]):
    """An iterator of batches prefetched by threads or processes, which `close` ends.

    It is a context manager, and closes itself on garbage collection and at interpreter exit.
    """

    def __init__(self, dataset: grain.IterDataset, num_workers: int) -> None:
        self._iterators = [iter(dataset)]
        self._close = weakref.finalize(self, _close, self._iterators, num_workers)

    def __next__(self) -> Batch:
        if not self._iterators:
            raise ValueError('the batches have been closed')
        return next(self._iterators[0])

    def close(self) -> None:
        """Ends the threads and processes; no batches follow."""
        self._close()

    def __enter__(self) -> 'Batches':
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _close(iterators: list[grain.DatasetIterator], num_workers: int) -> None:
    iterators.pop().close()
    if num_workers:
        # Grain's iterators close again on garbage collection, and complain if that is as late as the exit.
        gc.collect()


def batches(
    source: Source,
    *,
    batch_size: int,
    seed: int,
    start: int = 0,
    shuffle: bool = True,
    process_index: int = 0,
    process_count: int = 1,
    num_threads: int = 2,
    num_workers: int = 0,
) -> Batches:
    """Returns the endless batches of a training run, from batch `start` on, as seen by one process.

    The rows of successive epochs, each shuffled differently, form one endless list; global batch `n` is rows
    `n * batch_size` to `(n + 1) * batch_size` of it, and process `p` has the `p`-th of `process_count` equal parts of
    that batch, so the concatenated parts are the same batch for any number of processes, threads and workers,
    also across epochs. A batch at the end of an epoch continues with rows of the next one; a source
    smaller than a batch is repeated inside it. The rows of a source that is `Varied` are drawn from a random stream of
    the seed and of their place in the endless list.

    Args:
      source: the examples.
      batch_size: rows a batch, all processes together.
      seed: determines the order, at least 0.
      start: the first batch wanted; a run that has consumed `n` batches resumes with `start=n`.
      shuffle: `False` keeps the order of the source.
      process_index: which process this is, from 0.
      process_count: how many processes there are.
      num_threads: threads that make batches ahead of time in this process; 0 makes them on demand.
      num_workers: further processes that make them; worth their start-up of seconds only where rows are slow to make.

    Raises:
      UserError: for an empty source, a negative seed or start, or a batch that does not divide among the processes.
    """
    if seed < 0 or start < 0:
        raise UserError(f'seed is {seed} and start is {start}; neither can be negative')
    size = _process_batch_size(source, batch_size, process_index, process_count)
    read = range(len(source)) if isinstance(source, Varied) else source
    rows = grain.MapDataset.source(_Epochs(read, seed) if shuffle else read)
    if not shuffle:
        rows = rows.repeat(ENDLESS // len(read))
    if isinstance(source, Varied):
        rows = rows.map_with_index(functools.partial(_varied, source, seed))
    dataset = rows.batch(size)[start * process_count + process_index :: process_count]
    return _iterate(dataset, num_threads, num_workers)


def ordered_batches(
    source: Source,
    *,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Batches:
    """Returns the batches of one evaluation: every row once, in order, as seen by one process.

    The last batch is filled up with rows of zeros, whose `weights` and `segments` are therefore 0, so that shapes never
    change, nothing is dropped, and every process has the same number of batches.

    Args:
      source: the examples; they need `weights`, which distinguish padding from data.
      batch_size: rows a batch, all processes together.
      process_index: which process this is, from 0.
      process_count: how many processes there are.

    Raises:
      UserError: for an empty source, rows without `weights`, or a batch that does not divide among the processes.
    """
    size = _process_batch_size(source, batch_size, process_index, process_count)
    filled = _Filled(source, batch_size)
    if 'weights' not in filled.zeros:
        raise UserError(f'rows of {type(source).__name__} have no weights, only {", ".join(filled.zeros)}')
    dataset = grain.MapDataset.source(filled).batch(size)[process_index::process_count]
    return _iterate(dataset, num_threads=2, num_workers=0)


def _varied(source: Varied, seed: int, place: int, index: int) -> Row:
    """Row `index` of the source, as it is drawn at a place of the endless list."""
    return source.varied(index, np.random.default_rng((seed, place, VARIED)))


class _Epochs:
    """The rows of successive epochs, each in its own order, as one endless list."""

    def __init__(self, source: Sequence[Any] | Source, seed: int) -> None:
        self._source, self._seed = source, seed

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        epoch, place = divmod(index, len(self._source))
        return self._source[_order(len(self._source), self._seed, epoch)(place)]


# Threads read ahead into the next epoch.
@functools.lru_cache(maxsize=2)
def _order(length: int, seed: int, epoch: int) -> Callable[[int], int]:
    """Which row is at a place of an epoch."""
    if length <= DRAWN:
        return np.random.default_rng((seed, epoch)).permutation(length).item
    key = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
    return functools.partial(mixed, length=length, key=key)


def mixed(place: int, length: int, key: int) -> int:
    """Which row is at `place`, by a cipher of indices that is walked until it gives one below `length`."""
    # Of a largest index that is a power of four Grain takes a block one bit too small; an odd one is none.
    while (place := index_shuffle(place, max_index=(length - 1) | 1, seed=key, rounds=ROUNDS)) >= length:
        pass
    return place


class _Filled:
    """A source padded to a whole number of batches with rows of zeros."""

    def __init__(self, source: Source, batch_size: int) -> None:
        self._source = source
        self._length = -(-len(source) // batch_size) * batch_size
        self.zeros = {name: np.zeros_like(value) for name, value in source[0].items()}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        return self._source[index] if index < len(self._source) else self.zeros


def _process_batch_size(source: Source, batch_size: int, process_index: int, process_count: int) -> int:
    """The rows of every batch that one process makes."""
    if not len(source):
        raise UserError(f'{type(source).__name__} is empty; a batch needs at least one row')
    if batch_size < 1 or batch_size % process_count:
        raise UserError(
            f'batch_size is {batch_size}; it must be a positive multiple of the {process_count} process(es)'
        )
    if not 0 <= process_index < process_count:
        raise ValueError(f'process_index is {process_index}, of {process_count} processes')
    return batch_size // process_count


def _iterate(dataset: grain.MapDataset, num_threads: int, num_workers: int) -> Batches:
    reading = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=BUFFER if num_threads else 0)
    stream = dataset.to_iter_dataset(reading)
    if num_workers:
        # Grain passes its absl flags to the workers, which fails unless an absl program has parsed them.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        stream = stream.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=BUFFER),
            worker_init_fn=_begin_worker,
        )
    return Batches(stream, num_workers)


def _begin_worker(index: int, count: int) -> None:
    """What Grain calls in each worker process."""
    del index, count
    leave_stopping_to_the_parent()
    end_with_the_parent()
