"""`attnlab data prepare`: a progress bar for every stage, then a table of the splits."""

import pathlib

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from attnlab.data.long_range.prepare import Preparation, prepare


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


def prepare_with_progress(name: str, data_dir: pathlib.Path, workers: int, console: Console) -> Preparation:
    """Prepares and verifies a data set with progress bars; see `prepare`."""
    columns = (TextColumn('{task.description}'), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bars = Bars(progress)
        outcome = prepare(name, data_dir, workers, bars)
        bars.finish()
    table = Table(title=f'{name}, {"prepared" if outcome.fresh else "found"} and verified', title_justify='left')
    for column, justify in (
        ('split', 'left'),
        ('examples', 'right'),
        ('of each class', 'right'),
        ('repeated', 'right'),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    table.add_column('SHA-256')
    for split in outcome.splits:
        fewest, most = min(split.classes), max(split.classes)
        each = f'{fewest:,}' if fewest == most else f'{fewest:,} to {most:,}'
        table.add_row(split.name, f'{split.examples:,}', each, f'{split.repeated:,}', split.content[:16])
    console.print(table)
    console.print(f'in {outcome.folder}', highlight=False, soft_wrap=True)
    return outcome
