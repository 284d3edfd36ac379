"""Loss on held-out text: per token, per byte, by position, and on windows longer than those trained on."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from attnlab.data.pipeline import ordered_batches
from attnlab.errors import UserError
from attnlab.evals.cadence import AtEnd, EveryNSteps
from attnlab.metrics import Average, bits, perplexity
from attnlab.train.figures import position_curves
from attnlab.train.partition import batch_shards
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


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Evaluates next-token prediction on a split.

    Attributes:
      cadence: when to run during training.
      split: which split of the task's text.
      multiples: window lengths, in multiples of the training length; the first names its numbers without a suffix.
      tokens: how many tokens to evaluate at each length, from the start of the split; `None` for all of it.
      name: what its numbers are filed under.
    """

    cadence: EveryNSteps | AtEnd
    split: str = 'valid'
    multiples: tuple[int, ...] = (1,)
    tokens: int | None = None
    name: str = 'valid'

    def evaluate(self, setup: Setup, params: nnx.State) -> Evaluation:
        """Returns loss (nats per token), bits per byte and perplexity for each length."""
        numbers: dict[str, float] = {}
        curves = {}
        for multiple in self.multiples:
            averages = self._measured(setup, params, setup.length * multiple)
            suffix = '' if multiple == self.multiples[0] else f'@{multiple}x'
            numbers |= {f'{name}{suffix}': value for name, value in summary(averages).items()}
            position = averages['position_loss']
            curves[f'{multiple}x'] = np.divide(
                position.total, position.count, out=np.full(position.total.shape, np.nan), where=position.count > 0
            )
        return Evaluation(numbers, curves, setup.length)

    def _measured(self, setup: Setup, params: nnx.State, length: int) -> dict[str, Average]:
        source = setup.task.source(self.split, length)
        examples = len(source) if self.tokens is None else min(len(source), max(1, self.tokens // length))
        rows = _rows(setup, length)
        merged: dict[str, Average] | None = None
        for batch in ordered_batches(
            source,
            examples=examples,
            batch_size=rows,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        ):
            found = jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(setup.measure(params, setup.place(batch))))
            merged = found if merged is None else {name: merged[name].merge(found[name]) for name in merged}
        if merged is None:
            raise UserError(f'the {self.split} split holds no window of {length} tokens')
        return merged


def summary(averages: Mapping[str, Average]) -> dict[str, float]:
    """Loss, bits per byte and perplexity."""
    loss = float(averages['loss'].mean())
    return {'loss': loss, 'bits_per_byte': bits(float(averages['byte_loss'].mean())), 'perplexity': perplexity(loss)}


def _rows(setup: Setup, length: int) -> int:
    """Rows of an evaluation batch: as many tokens as in training, and a multiple of what the mesh splits."""
    shards = batch_shards(setup.mesh)
    return max(1, setup.batch_size * setup.length // length // shards) * shards
