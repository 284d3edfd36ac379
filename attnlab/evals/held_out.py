"""Loss on held-out text: per token, per byte, by position, and on windows longer than those trained on."""

import dataclasses
import pathlib
from collections.abc import Mapping

import numpy as np
from flax import nnx

from attnlab.data.text.windows import Sample
from attnlab.errors import UserError
from attnlab.evals.cadence import AtEnd
from attnlab.evals.measured import Measured, of_documents
from attnlab.evals.request import Request
from attnlab.evals.totals import curve, totals
from attnlab.figures import position_curves
from attnlab.metrics import Average, bits, perplexity
from attnlab.tables import Column, Interval, Table, digits, plus_minus
from attnlab.tasks.task import Textual
from attnlab.train.metrics_file import interval_ends
from attnlab.train.setup import Cadence, Setup


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The results of `HeldOut`.

    Attributes:
      numbers: by name, for the record; `loss_low` and `loss_high` are the ends of the interval of `loss`.
      curves: loss by position, in nats per token, by the name of the window length.
      trained: the length that was trained on.
      sample: what was evaluated, in words.
    """

    numbers: Mapping[str, float]
    curves: Mapping[str, np.ndarray]
    trained: int
    sample: str = ''

    def draw(self, folder: pathlib.Path) -> None:
        """Writes the figure of loss by position."""
        position_curves(self.curves, folder / 'position_loss.png', trained=self.trained)

    def table(self, title: str) -> Table:
        """One row a window length."""
        rows = []
        for index, window in enumerate(self.curves):
            suffix = f'@{window}' if index else ''
            tokens = int(window.removesuffix('x')) * self.trained
            intervals = [self._interval(name, suffix) for name in INTERVALS]
            rows.append((window, tokens, *intervals, self.numbers[f'perplexity{suffix}']))
        return Table('evaluation', COLUMNS, rows, f'{title}: {self.sample}' if self.sample else title)

    def _interval(self, name: str, suffix: str) -> Interval:
        metric = f'{name}{suffix}'
        low, high = map(self.numbers.get, interval_ends(metric))
        return Interval(self.numbers[metric], low, high)


COLUMNS = (
    Column('window', right=True),
    Column('tokens', right=True, rank=2),
    Column('nats/token', plus_minus, right=True),
    Column('bits/byte', plus_minus, right=True, rank=1),
    Column('perplexity', digits('.4g'), right=True, rank=1),
)
"""Of the table, a row a length of window."""

INTERVALS = ('loss', 'bits_per_byte')
"""The numbers that have intervals."""


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Evaluates next-token prediction on a split.

    Attributes:
      cadence: when to run during training.
      split: which split of the task's text.
      multiples: window lengths, in multiples of the training length; the first names its numbers without a suffix.
      tokens: how many tokens of the split to evaluate, in blocks of the longest window spread over all of its documents
        (`Sample`), the same at each length; `None` for all.
      name: the prefix of its numbers.
      stride: tokens from the start of one window to that of the next, at most the shortest window: with less, windows
        overlap, and only what no earlier one predicted is counted; `None` for windows side by side.
    """

    cadence: Cadence
    split: str = 'valid'
    multiples: tuple[int, ...] = (1,)
    tokens: int | None = None
    name: str = 'valid'
    stride: int | None = None

    def __post_init__(self) -> None:
        """Raises `UserError` for lengths or counts below 1."""
        if not self.multiples or min(self.multiples) < 1:
            raise UserError(
                f'multiples of HeldOut is {self.multiples}; it must hold one or more whole numbers of at least 1'
            )

    @classmethod
    def requested(cls, setup: Setup, request: Request) -> 'HeldOut':
        """The evaluator of a request. Raises `UserError` for an option that does not apply to text."""
        request.check(setup.task, allowed=('tokens', 'stride'))
        split = request.split or setup.task.evaluated_split
        return cls(AtEnd(), split=split, multiples=request.multiples, tokens=request.tokens, stride=request.stride)

    def load_data(self, setup: Setup) -> None:
        """Loads the split. Raises `UserError` where it is missing or wrong."""
        for multiple in self.multiples:
            self._source(setup, setup.length * multiple)

    def evaluate(self, setup: Setup, variables: nnx.State) -> Evaluation:
        """Returns loss (nats per token), bits per byte and perplexity for each length.

        Then the intervals of the first two, by bootstrap over documents where there are two or more; and how many
        tokens of how many documents were counted, named `sampled_...` unless that is the whole split.
        """
        numbers: dict[str, float] = {}
        intervals: dict[str, float] = {}
        curves, tokens = {}, 0.0
        for multiple in self.multiples:
            length = setup.length * multiple
            averages = totals(setup, variables, self._source(setup, length), length)
            suffix = '' if multiple == self.multiples[0] else f'@{multiple}x'
            numbers |= {f'{name}{suffix}': value for name, value in summary(averages).items()}
            for name, measured in by_document(averages).items():
                if measured.low is not None and measured.high is not None:
                    ends = interval_ends(f'{name}{suffix}')
                    intervals |= dict(zip(ends, (measured.low, measured.high), strict=True))
            curves[f'{multiple}x'] = curve(averages['position_loss'])
            tokens = float(averages['loss'].count)
        sample = self._source(setup, setup.length * self.multiples[-1])
        start = '' if sample.whole else 'sampled_'
        counts = {f'{start}tokens': tokens, f'{start}documents': float(sample.documents)}
        words = f'{"" if sample.whole else "a sample, "}{tokens:,.0f} tokens of {sample.documents:,} documents'
        if not sample.whole:
            words += f' of {len(sample.text.ends):,}'
        return Evaluation({**numbers, **intervals, **counts}, curves, setup.length, words)

    def _source(self, setup: Setup, length: int) -> Sample:
        if not isinstance(setup.task, Textual):
            raise UserError(f'{type(setup.task).__name__} does not have text; evaluate it with BySlice')
        block = setup.length * max(self.multiples)
        return setup.task.sample(self.split, length, self.tokens, block=block, stride=self.stride)


def summary(averages: Mapping[str, Average]) -> dict[str, float]:
    """Loss, bits per byte and perplexity."""
    loss = float(averages['loss'].mean())
    return {'loss': loss, 'bits_per_byte': bits(float(averages['byte_loss'].mean())), 'perplexity': perplexity(loss)}


def by_document(averages: Mapping[str, Average]) -> dict[str, Measured]:
    """The loss and the bits per byte with their intervals over documents."""
    found = {name: of_documents(averages[key].total, averages[key].count) for name, key in DOCUMENT_SUMS.items()}
    return found | {'bits_per_byte': found['bits_per_byte'].scaled(bits(1.0))}


DOCUMENT_SUMS = {'loss': 'document_loss', 'bits_per_byte': 'document_byte_loss'}
"""The task's metric of sums by document for each number that has an interval."""
