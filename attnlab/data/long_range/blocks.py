"""Generation of a data set in blocks, each a file: by several processes, and resumable."""

import concurrent.futures
import dataclasses
import io
import multiprocessing
import pathlib
import zipfile
from collections.abc import Callable, Iterator

import numpy as np

from attnlab.data import cache
from attnlab.data.long_range.dataset import Example
from attnlab.data.long_range.drawn import Distribution, example
from attnlab.data.workers import end_with_the_parent
from attnlab.errors import UserError

BLOCK = 500
"""Examples per file."""

Progress = Callable[[str, int, int], None]
"""Called with the name of the stage, the amount done and the total."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The examples of one split, drawn and stored in files.

    Attributes:
      of: the distribution of the examples.
      seed: see `drawn.example`.
      split: which split.
      count: how many examples there are.
      folder: where the files of this seed and distribution are.
    """

    of: Distribution
    seed: int
    split: str
    count: int
    folder: pathlib.Path

    def missing(self) -> list[range]:
        """The blocks not yet drawn."""
        return [block for block in self._all() if not self.path(block).is_file()]

    def files(self) -> list[pathlib.Path]:
        """The files of the drawn blocks."""
        return [path for path in map(self.path, self._all()) if path.is_file()]

    def path(self, block: range) -> pathlib.Path:
        """The file of a block, which is written atomically."""
        name = cache.key(self.of.name, str(self.seed))
        return self.folder / f'{name}-{self.split}-{block.start:08d}-{block.stop:08d}.npz'

    def draw(self, block: range) -> None:
        """Draws a block and writes its file."""
        examples = [example(self.of, self.seed, self.split, index) for index in block]
        columns = {name: [np.ravel(row[name]) for row in examples] for name in examples[0]}
        arrays = {name: np.concatenate(column) for name, column in columns.items()}
        arrays |= {f'{name}/ends': np.cumsum([len(part) for part in column]) for name, column in columns.items()}
        content = io.BytesIO()
        np.savez(content, **arrays)  # type: ignore[arg-type]
        cache.write_file(self.path(block), content.getvalue())

    def read(self) -> Iterator[Example]:
        """The examples in order. Raises `UserError` for a file that is damaged."""
        for block in self._all():
            path = self.path(block)
            try:
                with np.load(path) as file:
                    arrays = dict(file)
            except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
                raise UserError(f'{path} is damaged; delete it, and it will be drawn again: {error}') from error
            names = [name for name in arrays if not name.endswith('/ends')]
            columns = {name: np.split(arrays[name], arrays[f'{name}/ends'][:-1]) for name in names}
            scalars = {name for name in names if name != 'x'}
            for place in range(len(block)):
                yield {name: c[place][0] if name in scalars else c[place] for name, c in columns.items()}

    def _all(self) -> list[range]:
        return [range(start, min(start + BLOCK, self.count)) for start in range(0, self.count, BLOCK)]


def draw_all(splits: list[Blocks], workers: int, progress: Progress) -> None:
    """Draws the missing blocks of all splits, `workers` at a time."""
    missing = [(blocks, block) for blocks in splits for block in blocks.missing()]
    total = sum(blocks.count for blocks in splits)
    done = total - sum(len(block) for _, block in missing)
    progress('drawing', done, total)
    if workers <= 1:
        for blocks, block in missing:
            blocks.draw(block)
            done += len(block)
            progress('drawing', done, total)
        return
    context = multiprocessing.get_context('spawn')
    with concurrent.futures.ProcessPoolExecutor(workers, context, end_with_the_parent) as pool:
        tasks = {pool.submit(blocks.draw, block): len(block) for blocks, block in missing}
        try:
            for task in concurrent.futures.as_completed(tasks):
                task.result()
                done += tasks[task]
                progress('drawing', done, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
