"""Known probabilities of what follows a token: the loss has no noise, and its least value is known."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from attnlab.data.synthetic.ranked import Contexts, RankedTransitions
from attnlab.errors import UserError
from attnlab.metrics import Average
from attnlab.models.predictor import Predictor
from attnlab.tasks.task import Batch, Slice, WithoutFiles, context
from attnlab.typing import DropoutKey


@dataclasses.dataclass(frozen=True)
class Transitions(WithoutFiles):
    """Predict the distribution of what follows a token, all of it, from the token.

    The loss is the cross-entropy to the logits of the head, which must be log-probabilities up to a constant and are
    trained as such: what a head trains on otherwise does not apply.

    Attributes:
      table: the source.
    """

    packs: ClassVar[bool] = True
    labels: ClassVar[str] = 'probabilities'

    table: RankedTransitions = RankedTransitions()

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.table.tokens

    @property
    def evaluated_split(self) -> str:
        """The contexts again: there is nothing to generalise to."""
        return 'test'

    def source(self, split: str, length: int, tokens: int | None = None) -> Contexts:
        """All contexts, whatever the number of `tokens` asked for."""
        del tokens
        if length != 1:
            raise UserError(f'config.length is {length}; a context is 1 token')
        return self.table.contexts(split)

    def slices(self, split: str, length: int, multiples: tuple[int, ...], count: int) -> dict[str, Slice]:
        """All contexts, `all`."""
        del multiples, count
        return {'all': Slice(self.source(split, length), length)}

    def example(self, length: int) -> dict[str, np.ndarray]:
        """A row of zeros."""
        return {
            'tokens': np.zeros(length, np.int32),
            'probabilities': np.zeros(self.vocab, np.float32),
            'weights': np.zeros((), np.float32),
        }

    def describe(self) -> dict[str, Any]:
        """The table: everything the probabilities depend on."""
        return {'source': 'transitions of a known rank', 'table': self.table.name, 'content': self.table.content}

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """The cross-entropy in nats, and `divergence`, what it is above the entropy of the source."""
        hidden, _ = model.hidden(batch['tokens'], context(batch, dropout_key))
        losses, entropies = cross_entropies(model.logits(hidden[:, 0]), batch['probabilities'])
        weights = batch['weights'][:, None]
        return {
            'loss': Average.of(losses[:, None], weights),
            'divergence': Average.of((losses - entropies)[:, None], weights),
        }


def cross_entropies(
    logits: Float[Array, 'b o'], chances: Float[Array, 'b o']
) -> tuple[Float[Array, ' b'], Float[Array, ' b']]:
    """`-sum_w p_w log softmax(x)_w` in nats, and the entropy `-sum_w p_w log p_w`, its least value."""
    entropies = -jnp.sum(chances * jnp.log(jnp.where(chances > 0, chances, 1)), axis=1)
    return -jnp.sum(chances * jax.nn.log_softmax(logits), axis=1), entropies
