"""Tasks on synthetic problems: predictions at the labels of examples, and their metrics."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from attnlab.data.synthetic.problem import BASELINE, ENDLESS, Examples, Problem
from attnlab.data.synthetic.recall import MultiQueryRecall
from attnlab.data.synthetic.regression import LinearRegression
from attnlab.metrics import Average, likeliest, proportion
from attnlab.models.predictor import Predictor
from attnlab.tasks.task import Batch, Slice, WithoutFiles, context
from attnlab.tasks.trivial import of_tokens, sampled_rows
from attnlab.typing import DropoutKey, Sequence


@dataclasses.dataclass(frozen=True)
class Extra:
    """A slice of a test besides multiples of the training length: `problem` at `length` tokens, as `name`."""

    name: str
    length: int
    problem: Problem


@dataclasses.dataclass(frozen=True)
class Synthetic(WithoutFiles, abc.ABC):
    """Base class of tasks on a synthetic problem.

    Attributes:
      problem: the distribution of examples (see `attnlab.data.synthetic`).
      seed: of the examples, from 0 to 2^32 - 1; which of them a run sees, and in what order, depends on the run's seed.
      examples: the number of training examples, repeated as needed; `None` for an endless stream.
      held_out: the number of examples of the other splits, drawn from separate random streams.
      extra: further slices.
    """

    packs: ClassVar[bool] = True
    labels: ClassVar[str] = 'targets'

    problem: Problem
    seed: int = 0
    examples: int | None = None
    held_out: int = 4096
    extra: tuple[Extra, ...] = ()

    @property
    def vocab(self) -> int:
        """Number of tokens, or of outputs."""
        return self.problem.vocab

    @property
    def evaluated_split(self) -> str:
        """The test split, drawn from other random streams than the training split."""
        return 'test'

    def source(self, split: str, length: int, tokens: int | None = None) -> Examples:
        """The examples of a split; with `tokens`, those of the first `tokens` tokens, at least one."""
        count = (self.examples or ENDLESS) if split == 'train' else self.held_out
        if tokens is not None:
            count = min(count, self.held_out, max(1, tokens // length))
        return Examples(self.problem, length, self.seed, split, count)

    def slices(self, split: str, length: int, multiples: tuple[int, ...], count: int) -> dict[str, Slice]:
        """The problem at multiples of the training length, `1x` as trained, and its variants at the training length."""
        count = min(count, self.held_out)
        asked = {f'{n}x': (self.problem if n == 1 else self.problem.stretched(), n * length) for n in multiples}
        asked |= {name: (variant, length) for name, variant in self.problem.variants(length).items()}
        asked |= {extra.name: (extra.problem, extra.length) for extra in self.extra}
        return {
            name: Slice(Examples(problem, size, self.seed, split, count, baselines=True), size)
            for name, (problem, size) in asked.items()
        }

    def example(self, length: int) -> dict[str, np.ndarray]:
        """A row of zeros."""
        return {name: np.zeros_like(value) for name, value in self.source('train', length)[0].items()}

    def describe(self) -> dict[str, Any]:
        """The problem and the seed: all that the examples depend on but the version of numpy, which run.json has."""
        described = {'source': 'synthetic', 'problem': self.problem.name, 'seed': self.seed}
        return described | {'content': self.problem.content}

    @abc.abstractmethod
    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """The metrics of one batch."""


@dataclasses.dataclass(frozen=True)
class LabelPrediction(Synthetic):
    """Predict the token, or class, at every label."""

    problem: Problem = MultiQueryRecall()

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """Loss in nats and accuracy over labels, also by label; and the fraction of examples with all labels right."""
        hidden = hidden_at_labels(model, batch, dropout_key)
        targets, weights = batch['targets'], batch['weights']
        losses = model.losses(hidden, targets, dropout_key)
        right = likeliest(model.logits(hidden), targets)
        labelled = jnp.any(weights > 0, axis=1)
        exact = labelled & jnp.all(right | (weights == 0), axis=1)
        return {
            'loss': Average.of(losses, weights),
            **proportion('accuracy', right.astype(jnp.float32), weights),
            **proportion('exact_match', exact.astype(jnp.float32)[:, None], labelled.astype(jnp.float32)[:, None]),
            'position_accuracy': Average.of(right.astype(jnp.float32), weights, axis=0),
        }

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """What guesses at the labels reach (`attnlab.tasks.trivial.of_tokens`)."""
        train = sampled_rows(self.source('train', part.length))
        return {'accuracy': of_tokens(train, sampled_rows(part.source), self.vocab)}


@dataclasses.dataclass(frozen=True)
class InContextRegression(Synthetic):
    """Predict a real value at every label."""

    problem: Problem = LinearRegression()

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """The error over labels, also by label, and that of the baselines where the batch has them."""
        weights = batch['weights']
        errors = model.losses(hidden_at_labels(model, batch, dropout_key), batch['targets'], dropout_key)
        found = {'loss': Average.of(errors, weights), 'position_error': Average.of(errors, weights, axis=0)}
        for name in (name for name in batch if name.startswith(BASELINE)):
            baseline = name.removeprefix(BASELINE)
            found[baseline] = Average.of(batch[name], weights)
            found[f'position_{baseline}'] = Average.of(batch[name], weights, axis=0)
        return found

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """The errors of the problem's own baselines, such as that of predicting zero."""
        rows = sampled_rows(part.source)
        weights = np.stack([row['weights'] for row in rows])
        names = [name for name in rows[0] if name.startswith(BASELINE)]
        errors = {name: np.stack([row[name] for row in rows]) for name in names}
        means = {name: float(np.sum(error * weights) / np.sum(weights)) for name, error in errors.items()}
        return {'loss': {name.removeprefix(BASELINE): mean for name, mean in means.items()}}


def hidden_at_labels(model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> Sequence:
    """The model's output at the positions of the labels, `b n d`, so that no logits are computed elsewhere."""
    hidden, _ = model.hidden(batch['tokens'], context(batch, dropout_key))
    return jnp.take_along_axis(hidden, batch['at'][:, :, None], axis=1)
