"""Every metric of a task on every slice of it, proportions with intervals: other difficulties, and longer lengths."""

import dataclasses
import pathlib
from collections.abc import Mapping

import numpy as np
from flax import nnx

from attnlab.errors import UserError
from attnlab.evals.cadence import AtEnd
from attnlab.evals.measured import Measured, of_examples
from attnlab.evals.request import Request
from attnlab.evals.totals import curve, totals
from attnlab.figures import length_curves, position_curves
from attnlab.metrics import PRODUCTS, Average
from attnlab.tables import Column, Interval, Table, plus_minus
from attnlab.tasks.task import Placed, Slice, Sliced
from attnlab.train.metrics_file import ENDS, interval_ends
from attnlab.train.setup import Cadence, Setup

EXAMPLES = 'examples'
"""What the number of examples of a slice is called."""

WHOLE = 2**31 - 1
"""More examples than a split of recorded data has: all of them."""

TRAINED = '1x'
"""The slice of the training length."""

POSITION = 'position_'
"""The prefix of metrics that have one value per label or other place."""


@dataclasses.dataclass(frozen=True)
class SlicedEvaluation:
    """The results of `BySlice`.

    Attributes:
      numbers: means by `slice/metric`; of proportions such as `1x/accuracy` also the ends of the interval over the
        examples, `1x/accuracy_low` and `1x/accuracy_high`, and the number of these, `1x/examples`.
      curves: means by label or other place, by metric and slice.
      place: what a place of a curve is called.
      places: what those of the slice of the training length are.
    """

    numbers: Mapping[str, float]
    curves: Mapping[str, Mapping[str, np.ndarray]]
    place: str = 'label'
    places: str = 'labels in training'

    def draw(self, folder: pathlib.Path) -> None:
        """Writes a figure for every metric that has curves of more than one place, and one of all metrics by length."""
        for metric, curves in self.curves.items():
            longer = {name: values for name, values in curves.items() if len(values) > 1}
            if longer:
                trained = len(longer[TRAINED]) if TRAINED in longer else None
                path = folder / f'{POSITION}{metric}.png'
                y = metric.replace('_', ' ')
                position_curves(longer, path, trained=trained, mark=self.places, x=self.place, y=y)
        lengths = self.by_length()
        if lengths and len(next(iter(lengths.values()))) > 1:
            length_curves(lengths, folder / 'lengths.png')

    def by_length(self) -> dict[str, dict[int, float]]:
        """Every metric by length, in multiples of the length trained on."""
        found: dict[str, dict[int, float]] = {}
        for name, value in self.numbers.items():
            part, _, metric = name.rpartition('/')
            if part.endswith('x') and part[:-1].isdecimal() and not metric.endswith((*ENDS, EXAMPLES)):
                found.setdefault(metric, {})[int(part[:-1])] = value
        return found

    def table(self, title: str) -> Table:
        """One row a slice, one column a metric."""
        slices = dict.fromkeys(name.rpartition('/')[0] for name in self.numbers)
        hidden = (*ENDS, f'/{EXAMPLES}')
        metrics = dict.fromkeys(name.rpartition('/')[2] for name in self.numbers if not name.endswith(hidden))
        columns = [Column(metric.replace('_', ' '), _shown, True, rank) for rank, metric in enumerate(metrics)]
        rows = [(name, *(self._interval(f'{name}/{metric}') for metric in metrics)) for name in slices]
        return Table('evaluation', [Column('slice'), *columns], rows, title)

    def _interval(self, name: str) -> Interval | None:
        """A number with its interval; `None` where a slice has none of this metric."""
        if name not in self.numbers:
            return None
        low, high = map(self.numbers.get, interval_ends(name))
        return Interval(self.numbers[name], low, high)


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

    cadence: Cadence
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
        """Returns the mean of every metric on every slice, proportions with their intervals over examples."""
        numbers: dict[str, float] = {}
        curves: dict[str, dict[str, np.ndarray]] = {}
        for name, part in self._slices(setup).items():
            averages = totals(setup, variables, part.source, part.length)
            for metric, average in averages.items():
                if metric.startswith(POSITION):
                    curves.setdefault(metric.removeprefix(POSITION), {})[name] = curve(average)
                elif not metric.endswith(PRODUCTS):
                    numbers[f'{name}/{metric}'] = float(average.mean())
            for metric, measured in proportions(averages).items():
                if measured.low is not None and measured.high is not None:
                    ends = interval_ends(f'{name}/{metric}')
                    numbers |= dict(zip(ends, (measured.low, measured.high), strict=True))
                    numbers[f'{name}/{EXAMPLES}'] = float(measured.n)
        named = {'place': setup.task.place, 'places': setup.task.places} if isinstance(setup.task, Placed) else {}
        return SlicedEvaluation(numbers, curves, **named)

    def _slices(self, setup: Setup) -> dict[str, Slice]:
        if not isinstance(setup.task, Sliced):
            raise UserError(f'{type(setup.task).__name__} has no slices; evaluate it with HeldOut')
        if self.examples < 1 or not self.multiples or min(self.multiples) < 1:
            raise UserError(
                f'examples and multiples of BySlice must be at least 1; got {self.examples} and {self.multiples}'
            )
        return setup.task.slices(self.split, setup.length, self.multiples, self.examples)


def _shown(one: Interval | None) -> str:
    return '' if one is None else plus_minus(one)


def proportions(averages: Mapping[str, Average]) -> dict[str, Measured]:
    """The metrics that are shares of labels, with their intervals over examples."""
    found = {}
    for name, products in averages.items():
        if name.endswith(PRODUCTS):
            stem, examples = name.removesuffix(PRODUCTS), int(products.count[0])
            share, means = averages[stem], products.total / max(examples, 1)
            found[stem] = of_examples(float(share.total), float(share.count), means, examples)
    return found
