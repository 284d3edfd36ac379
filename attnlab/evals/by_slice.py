"""Every metric of a task on every slice of it: other difficulties, and lengths beyond those trained on."""

import dataclasses
import pathlib
from collections.abc import Mapping

import numpy as np
from flax import nnx
from rich.table import Table

from attnlab.errors import UserError
from attnlab.evals.cadence import AtEnd, EveryNSteps
from attnlab.evals.request import Request
from attnlab.evals.totals import curve, totals
from attnlab.tasks.task import Slice, Sliced
from attnlab.train.figures import length_curves, position_curves
from attnlab.train.setup import Setup

POSITION = 'position_'
"""The prefix of metrics that have one value per label."""


@dataclasses.dataclass(frozen=True)
class SlicedEvaluation:
    """The results of `BySlice`.

    Attributes:
      numbers: means by `slice/metric`.
      curves: means by label, by metric and slice.
    """

    numbers: Mapping[str, float]
    curves: Mapping[str, Mapping[str, np.ndarray]]

    def draw(self, folder: pathlib.Path) -> None:
        """Writes a figure for every metric that has curves of more than one label, and one of all metrics by length."""
        for metric, curves in self.curves.items():
            longer = {name: values for name, values in curves.items() if len(values) > 1}
            if longer:
                trained = len(next(iter(longer.values())))
                path = folder / f'{POSITION}{metric}.png'
                position_curves(longer, path, trained=trained, x='label', y=metric.replace('_', ' '))
        lengths = self.by_length()
        if lengths and len(next(iter(lengths.values()))) > 1:
            length_curves(lengths, folder / 'lengths.png')

    def by_length(self) -> dict[str, dict[int, float]]:
        """Every metric by length, in multiples of the length trained on."""
        found: dict[str, dict[int, float]] = {}
        for name, value in self.numbers.items():
            part, _, metric = name.rpartition('/')
            if part.endswith('x') and part[:-1].isdecimal():
                found.setdefault(metric, {})[int(part[:-1])] = value
        return found

    def table(self, title: str) -> Table:
        """One row a slice, one column a metric."""
        slices = dict.fromkeys(name.rpartition('/')[0] for name in self.numbers)
        metrics = dict.fromkeys(name.rpartition('/')[2] for name in self.numbers)
        table = Table(title=title, title_justify='left')
        table.add_column('slice')
        for metric in metrics:
            table.add_column(metric.replace('_', ' '), justify='right')
        for name in slices:
            table.add_row(name, *(f'{self.numbers[f"{name}/{metric}"]:.4f}' for metric in metrics))
        return table


@dataclasses.dataclass(frozen=True)
class BySlice:
    """Evaluates a task on its named slices.

    Attributes:
      cadence: when to run during training.
      split: which split of the task.
      multiples: lengths, in multiples of the training length; 1 is the problem as it is trained.
      examples: how many examples of each slice.
      name: the prefix of its numbers.
    """

    cadence: EveryNSteps | AtEnd
    split: str = 'test'
    multiples: tuple[int, ...] = (1, 2, 4)
    examples: int = 512
    name: str = 'test'

    @classmethod
    def requested(cls, setup: Setup, request: Request) -> 'BySlice':
        """The run's own evaluator with the request applied. Raises `UserError` for an option of texts."""
        request.check(setup.task, allowed=('examples',))
        default = cls(AtEnd(), split=setup.task.evaluated_split)
        own = next((evaluator for evaluator in setup.evals if isinstance(evaluator, cls)), default)
        return dataclasses.replace(
            own,
            split=request.split or own.split,
            multiples=request.multiples,
            examples=own.examples if request.examples is None else request.examples,
        )

    def load_data(self, setup: Setup) -> None:
        """Draws the first example of every slice. Raises `UserError` where a slice is wrong."""
        for part in self._slices(setup).values():
            part.source[0]

    def evaluate(self, setup: Setup, variables: nnx.State) -> SlicedEvaluation:
        """Returns the mean of every metric on every slice."""
        numbers: dict[str, float] = {}
        curves: dict[str, dict[str, np.ndarray]] = {}
        for name, part in self._slices(setup).items():
            for metric, average in totals(setup, variables, part.source, part.length).items():
                if metric.startswith(POSITION):
                    curves.setdefault(metric.removeprefix(POSITION), {})[name] = curve(average)
                else:
                    numbers[f'{name}/{metric}'] = float(average.mean())
        return SlicedEvaluation(numbers, curves)

    def _slices(self, setup: Setup) -> dict[str, Slice]:
        if not isinstance(setup.task, Sliced):
            raise UserError(f'{type(setup.task).__name__} has no slices; evaluate it with HeldOut')
        if self.examples < 1 or not self.multiples or min(self.multiples) < 1:
            raise UserError(
                f'examples and multiples of BySlice must be at least 1; got {self.examples} and {self.multiples}'
            )
        return setup.task.slices(self.split, setup.length, self.multiples, self.examples)
