"""What an analysis is asked: about which run, on which rows of its data; and where what it finds goes."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attnlab.errors import UserError
from attnlab.files import check_own, write_results
from attnlab.models.forecasters import WindowModel
from attnlab.models.predictor import Stacked
from attnlab.models.separators import Separator
from attnlab.runs.loading import Loaded, load_run
from attnlab.tables import Printer, Table
from attnlab.tasks.task import Batch
from attnlab.train.rows import rows_of
from attnlab.train.run import check_data


@dataclasses.dataclass(frozen=True)
class Question:
    """A checkpoint of a run, and rows all over a split of its task.

    Attributes:
      workdir: the folder of the run.
      loaded: the checkpoint.
      split: its name.
      rows: how many of it, of the length trained on.
      other_data: whether its data may be others than those trained on.
    """

    workdir: pathlib.Path
    loaded: Loaded
    split: str
    rows: int
    other_data: bool = False

    @classmethod
    def of(
        cls,
        workdir: pathlib.Path,
        step: int | None,
        split: str | None,
        rows: int,
        *,
        ema: bool = False,
        other_data: bool = False,
        reads_data: bool = True,
    ) -> 'Question':
        """Loads a checkpoint, by default the newest; the split is by default the one that the task is evaluated on.

        Raises `UserError` for a run or a checkpoint that does not exist, with `ema` for one without averages, and for
        changed data unless `other_data` allows them, or no rows of them are read.
        """
        loaded = load_run(workdir, step, ema=ema)
        if reads_data:
            check_data(workdir, loaded.setup.task.describe(), other=other_data)
        split = loaded.setup.task.evaluated_split if split is None else split
        return cls(workdir, loaded, split, rows, other_data)

    @property
    def checkpoint(self) -> str:
        """How titles name it."""
        return f'{self.workdir}, step {self.loaded.name}'

    @property
    def title(self) -> str:
        """How tables of what is found on the split begin."""
        return f'{self.checkpoint}, {self.split}'

    def batches(self) -> list[Batch]:
        """The rows, each as one batch. Raises `UserError` for a split that does not exist, or with fewer rows."""
        return rows_of(self.loaded.setup, self.split, self.rows)

    def check_layers(self, clause: str = 'which has no layers to look into') -> None:
        """Raises `UserError`, which ends in `clause`, for a model without a stack of layers."""
        if not isinstance(self.loaded.setup.model, Stacked):
            raise UserError(f'{self.workdir} holds a {type(self.loaded.setup.model).__name__}, {clause}')

    def check_stream(self) -> None:
        """Raises `UserError` for a model without layers, and for one whose head reads more than their output."""
        self.check_layers()
        model = self.loaded.setup.model
        if isinstance(model, WindowModel | Separator):
            kind = type(model).__name__
            raise UserError(
                f'{self.workdir} holds a {kind}, whose head does not read the output of its layers as it is'
            )

    def record(self) -> dict[str, Any]:
        """What a file of results says of it: the part of a request that all analyses have."""
        return {
            'step': self.loaded.step,
            'split': self.split,
            'rows': self.rows,
            'ema': self.loaded.ema,
            'other_data': self.other_data,
        }

    def report(
        self,
        printer: Printer,
        suffix: str,
        asked: Mapping[str, Any],
        found: Mapping[str, Any],
        tables: Iterable[Table],
        figure: Callable[[pathlib.Path], Any] | None = None,
    ) -> None:
        """Writes `analysis/<step><suffix>.json` and beside it the figure; prints the tables, and what was written.

        What was found for another request, of which `asked` is the record, stays: see `files.write_results`.
        """
        check_own(self.workdir, ('analysis',))
        path = self.workdir / 'analysis' / f'{self.loaded.name}{suffix}.json'
        written = [write_results(path, asked, found)]
        if figure is not None:
            written.append(written[0].with_suffix('.png'))
            figure(written[-1])
        for table in tables:
            printer.table(table)
        printer.line(f'written: {", ".join(map(str, written))}')
