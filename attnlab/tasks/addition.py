"""Modular addition: learn part of a table of sums, and predict the rest."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.data.synthetic.addition import OPERANDS, ModularAddition, Sums
from attnlab.errors import UserError
from attnlab.losses import softmax_loss
from attnlab.metrics import Average, likeliest
from attnlab.models.predictor import Predictor
from attnlab.tasks.task import Batch, Slice, WithoutFiles, context
from attnlab.tasks.trivial import sampled_rows
from attnlab.typing import DropoutKey


@dataclasses.dataclass(frozen=True)
class Addition(WithoutFiles):
    """Predict the sum of two numbers.

    Attributes:
      table: the sums and their splits.
    """

    packs: ClassVar[bool] = True
    labels: ClassVar[str] = 'target'

    table: ModularAddition = ModularAddition()

    @property
    def vocab(self) -> int:
        """Number of numbers."""
        return self.table.modulus

    @property
    def evaluated_split(self) -> str:
        """The sums that are not trained on."""
        return 'test'

    def source(self, split: str, length: int, tokens: int | None = None) -> Sums:
        """The sums of a split; with `tokens`, the first of them, at least one."""
        if length != OPERANDS:
            raise UserError(f'config.length is {length}; a sum has {OPERANDS} tokens')
        sums = self.table.sums(split)
        return sums if tokens is None else dataclasses.replace(sums, count=min(len(sums), max(1, tokens // length)))

    def slices(self, split: str, length: int, multiples: tuple[int, ...], count: int) -> dict[str, Slice]:
        """The first `count` sums of a split, `all`; there are no other lengths."""
        del multiples
        return {'all': Slice(self.source(split, length, count * length), length)}

    def example(self, length: int) -> dict[str, np.ndarray]:
        """A row of zeros."""
        return {
            'tokens': np.zeros(length, np.int32),
            'target': np.zeros((), np.int32),
            'weights': np.zeros((), np.float32),
        }

    def describe(self) -> dict[str, Any]:
        """The table: all that the splits depend on but the version of numpy, which run.json has."""
        return {'source': 'modular addition', 'table': self.table.name, 'content': self.table.content}

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """Any number, and the sum that is most frequent among those shown."""
        shown, asked = (
            np.array([row['target'] for row in sampled_rows(source, len(source))])
            for source in (self.source('train', part.length), part.source)
        )
        majority = np.bincount(shown, minlength=self.vocab).argmax()
        return {'accuracy': {'chance': 1 / self.vocab, 'majority': float(np.mean(asked == majority))}}

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """Loss in nats, accuracy, and how many sums have no gradient left.

        `collapsed` counts sums whose cross-entropy has a derivative of exactly zero with respect to the logit of the
        right class, and `vanished` those where this holds for all logits.
        """
        hidden, targets = model.pooled(batch['tokens'], context(batch, dropout_key)), batch['target']
        logits = model.logits(hidden)
        still = jax.lax.stop_gradient(logits)
        zero = jax.grad(lambda logits: jnp.sum(softmax_loss(logits, targets)))(still) == 0
        found = {
            'accuracy': likeliest(logits, targets),
            'collapsed': jnp.take_along_axis(zero, targets[:, None], axis=1)[:, 0],
            'vanished': jnp.all(zero, axis=1),
        }
        losses = model.losses(hidden, targets, dropout_key)
        values = {'loss': losses} | {name: x.astype(jnp.float32) for name, x in found.items()}
        return {name: Average.of(x[:, None], batch['weights'][:, None]) for name, x in values.items()}
