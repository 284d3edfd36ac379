"""`attnlab data`: what can be prepared; a progress bar for every stage, then a table of the splits."""

import pathlib
from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from attnlab.data.long_range.preparable import DATASETS
from attnlab.data.long_range.prepare import Preparation, prepare
from attnlab.data.long_range.prepared import of_another, versions
from attnlab.tables import Column, Printer, Table


class Bars:
    """One bar a stage, each made when its stage begins and full when the next one does."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._stage: tuple[str, TaskID] | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._stage is None or self._stage[0] != stage:
            self.finish()
            self._stage = stage, self._progress.add_task(stage, total=total or None)
            if done:
                self._progress.console.print(f'{stage}: {done:,} of {total:,} exist already; resuming')
        self._progress.update(self._stage[1], completed=done)

    def finish(self) -> None:
        """Fills the last bar."""
        if self._stage is not None:
            task = self._progress.tasks[self._progress.task_ids.index(self._stage[1])]
            total = max(task.total or 0, task.completed)
            self._progress.update(self._stage[1], total=total, completed=total)


def prepare_with_progress(name: str, data_dir: pathlib.Path, workers: int, printer: Printer) -> Preparation:
    """Prepares and verifies a data set with progress bars; see `prepare`."""
    columns = (TextColumn('{task.description}'), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=printer.console) as progress:
        bars = Bars(progress)
        outcome = prepare(name, data_dir, workers, bars)
        bars.finish()
    rows = [
        (split.name, split.examples, _each(split.classes), split.repeated, split.content) for split in outcome.splits
    ]
    title = f'{name}, {"prepared" if outcome.fresh else "found"} and verified'
    printer.table(Table('splits', SPLITS, rows, title))
    printer.line(f'in {outcome.folder}')
    return outcome


def print_datasets(data_dir: pathlib.Path, printer: Printer) -> None:
    """Prints the data sets that can be prepared, which of them are, and which are those of another attnlab."""
    found = {name: versions(name, data_dir) for name in DATASETS}
    others = {name: other for name in DATASETS if found[name] and (other := of_another(name, data_dir)) is not None}
    columns = (
        Column('name'),
        Column('classes', right=True, rank=2),
        Column('length', right=True, rank=2),
        Column('prepared'),
        Column('without a download', prose=True, rank=1),
    )
    rows = [
        (
            name,
            one.kind.classes,
            one.kind.length,
            bool(found[name]) and name not in others,
            one.substitute,
        )
        for name, one in DATASETS.items()
    ]
    printer.table(Table('data', columns, rows, f'data sets in {data_dir}'))
    for name, other in others.items():
        printer.line(f'{name} was {other}; run: attnlab data prepare {name}')


SPLITS = (
    Column('split'),
    Column('examples', right=True),
    Column('of each class', right=True, rank=1),
    Column('repeated', right=True, rank=2),
    Column('SHA-256', lambda content: content[:16], rank=3),
)


def _each(classes: Sequence[int]) -> str:
    """How many examples a class has."""
    fewest, most = min(classes), max(classes)
    return f'{fewest:,}' if fewest == most else f'{fewest:,} to {most:,}'
