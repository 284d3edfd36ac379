"""Loss on held-out text: per token, per byte, by position, and on windows longer than those trained on."""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping

import numpy as np
from flax import nnx
from rich.table import Table

from attnlab.data.pipeline import Source
from attnlab.evals.asked import Asked
from attnlab.evals.cadence import AtEnd, EveryNSteps
from attnlab.evals.totals import curve, totals
from attnlab.metrics import Average, bits, perplexity
from attnlab.train.figures import position_curves
from attnlab.train.setup import Setup


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What an evaluator found.

    Attributes:
      numbers: by name, for the record.
      curves: loss by position, in nats per token, by the name of the window length.
      trained: the length that was trained on.
    """

    numbers: Mapping[str, float]
    curves: Mapping[str, np.ndarray]
    trained: int

    def draw(self, folder: pathlib.Path) -> None:
        """Writes the figure of loss by position."""
        position_curves(self.curves, folder / 'position_loss.png', trained=self.trained)

    def table(self, title: str) -> Table:
        """One row a window length."""
        table = Table(title=title, title_justify='left')
        for column in ('window', 'tokens', 'nats/token', 'bits/byte', 'perplexity'):
            table.add_column(column, justify='right')
        for index, window in enumerate(self.curves):
            suffix = f'@{window}' if index else ''
            loss, bits, perplexity = (
                self.numbers[f'{name}{suffix}'] for name in ('loss', 'bits_per_byte', 'perplexity')
            )
            tokens = int(window.removesuffix('x')) * self.trained
            table.add_row(window, str(tokens), f'{loss:.4f}', f'{bits:.4f}', f'{perplexity:.4g}')
        return table


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Evaluates next-token prediction on a split.

    Attributes:
      cadence: when to run during training.
      split: which split of the task's text.
      multiples: window lengths, in multiples of the training length; the first names its numbers without a suffix.
      tokens: how many tokens of the split to evaluate, from its start and the same at each length; `None` for all.
      name: what its numbers are filed under.
    """

    cadence: EveryNSteps | AtEnd
    split: str = 'valid'
    multiples: tuple[int, ...] = (1,)
    tokens: int | None = None
    name: str = 'valid'

    @classmethod
    def asked(cls, setup: Setup, asked: Asked) -> 'HeldOut':
        """The evaluator of what was asked, once. Raises `UserError` for what does not go with a text."""
        asked.check(setup.task, taken='tokens')
        split = asked.split or setup.task.evaluated_split
        return cls(AtEnd(), split=split, multiples=asked.multiples, tokens=asked.tokens)

    def load_data(self, setup: Setup) -> None:
        """Loads the split. Raises `UserError` for what is wrong with it."""
        for multiple in self.multiples:
            self._source(setup, setup.length * multiple)

    def evaluate(self, setup: Setup, variables: nnx.State) -> Evaluation:
        """Returns loss (nats per token), bits per byte and perplexity for each length."""
        numbers: dict[str, float] = {}
        curves = {}
        for multiple in self.multiples:
            length = setup.length * multiple
            averages = totals(setup, variables, self._source(setup, length), length)
            suffix = '' if multiple == self.multiples[0] else f'@{multiple}x'
            numbers |= {f'{name}{suffix}': value for name, value in summary(averages).items()}
            curves[f'{multiple}x'] = curve(averages['position_loss'])
        return Evaluation(numbers, curves, setup.length)

    def _source(self, setup: Setup, length: int) -> Source:
        return setup.task.source(self.split, length, sys.maxsize - 1 if self.tokens is None else self.tokens)


def summary(averages: Mapping[str, Average]) -> dict[str, float]:
    """Loss, bits per byte and perplexity."""
    loss = float(averages['loss'].mean())
    return {'loss': loss, 'bits_per_byte': bits(float(averages['byte_loss'].mean())), 'perplexity': perplexity(loss)}
