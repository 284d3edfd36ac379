"""One label for a long sequence, or for a pair of them."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from attnlab.data.long_range.drawn import Drawn
from attnlab.data.long_range.listops import ListOps
from attnlab.data.long_range.rows import Chosen, Padded, blank
from attnlab.data.long_range.source import Source
from attnlab.errors import UserError
from attnlab.metrics import Average
from attnlab.models.model import Classifier
from attnlab.tasks.task import Batch, Slice, context
from attnlab.typing import DropoutKey, Sequence


@dataclasses.dataclass(frozen=True)
class Classification:
    """Predict the label of a sequence, or of two that one encoder has read apart from each other.

    A document is the mean of its last hidden states, padding left out, whatever the model; see `pooled`.

    Attributes:
      data: where the examples come from (see `attnlab.data.long_range`).
    """

    data: Source = Drawn(ListOps())

    @property
    def vocab(self) -> int:
        """Number of tokens; of classes, where the inputs are real-valued."""
        return self.data.kind.vocab or self.data.kind.classes

    def source(self, split: str, length: int, tokens: int | None = None) -> Padded:
        """The examples of a split; to evaluate, those that make up the first `tokens` places, at least one."""
        rows = self.data.rows(split)
        if tokens is not None:
            rows = Chosen(rows, tuple(range(min(len(rows), max(1, tokens // length)))))
        return Padded(rows, self.data.kind, self._share(length))

    def slices(self, split: str, length: int, multiples: tuple[int, ...], count: int) -> dict[str, Slice]:
        """The first `count` examples, `all`, and those of each difficulty; there are none of other lengths."""
        del multiples
        rows = self.data.rows(split)
        count = min(count, len(rows))
        found = {'all': tuple(range(count))}
        for name, bounds in self.data.kind.difficulties.items():
            values = _difficulty(self.data, split, name)[:count]
            for least, bound in zip(bounds, (*bounds[1:], np.inf), strict=True):
                title = f'{name}={least}' if bound == least + 1 else f'{name}>={least}'
                chosen = tuple(np.flatnonzero((values >= least) & (values < bound)).tolist())
                if 0 < len(chosen) < count:
                    found[title] = chosen
        kind = self.data.kind
        return {
            title: Slice(Padded(Chosen(rows, chosen), kind, self._share(length)), length)
            for title, chosen in found.items()
        }

    def example(self, length: int) -> dict[str, np.ndarray]:
        """A row of zeros."""
        return blank(self.data.kind, self._share(length))

    def describe(self) -> dict[str, Any]:
        """Where the data are from."""
        return self.data.describe()

    def save(self, folder: pathlib.Path) -> None:
        """Writes nothing: the config says it all."""
        del folder

    def measure(self, model: Classifier, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """Loss in nats an example, and accuracy."""
        logits = self.logits(model, batch, dropout_key)
        labels, weights = batch['label'], batch['weights'][:, None]
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        right = jnp.argmax(logits, axis=1) == labels
        return {
            'loss': Average.of(losses, weights),
            'accuracy': Average.of(right.astype(jnp.float32)[:, None], weights),
        }

    def logits(self, model: Classifier, batch: Batch, dropout_key: DropoutKey | None) -> Float[Array, 'b o']:
        """Scores of the classes, in float32."""
        count = self.data.kind.documents
        if model.documents != count:
            raise UserError(
                f'model.head is for {model.documents} document(s); an example of {type(self.data).__name__} has {count}'
            )
        apart = {name: _apart(batch[name], count) for name in ('tokens', 'segments', 'positions')}
        hidden, _ = model.hidden(apart['tokens'], context(apart, dropout_key))
        documents = pooled(hidden, apart['segments'] > 0)
        return model.classify(*jnp.moveaxis(documents.reshape(-1, count, documents.shape[1]), 1, 0))

    def _share(self, length: int) -> int:
        if length % self.data.kind.documents:
            raise UserError(f'config.length is {length}; a pair of documents wants an even one')
        return length


def pooled(hidden: Sequence, where: Bool[Array, 'b t']) -> Float[Array, 'b d']:
    """The mean over time of what is `where`, in float32; zero where nothing is."""
    weights = where.astype(jnp.float32)
    total = jnp.einsum('b t d, b t -> b d', hidden.astype(jnp.float32), weights)
    return total / jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1.0)


def _apart(x: jax.Array, count: int) -> jax.Array:
    """The documents that share a row, each in a row of its own."""
    return x.reshape(x.shape[0] * count, x.shape[1] // count, *x.shape[2:])


@functools.lru_cache(maxsize=16)
def _difficulty(data: Source, split: str, name: str) -> np.ndarray:
    """A scalar of every example of a split."""
    rows = data.rows(split)
    examples = (rows[index] for index in range(len(rows)))
    return np.array([len(example['x']) if name == 'length' else int(example[name]) for example in examples])
