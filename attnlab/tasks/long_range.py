"""One label for a long sequence, or for a pair of them; and prediction of the sequences themselves, for pretraining."""

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from attnlab.data.long_range.dataset import Dataset
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.long_range.listops import ListOps
from attnlab.data.long_range.rows import Chosen, Padded, blank
from attnlab.data.pipeline import Source, spread
from attnlab.errors import UserError
from attnlab.metrics import Average, likeliest, proportion
from attnlab.models.predictor import Predictor
from attnlab.tasks.task import Batch, Slice, WithoutFiles, context
from attnlab.tasks.trivial import linear, of_sequences, sampled_rows
from attnlab.typing import DropoutKey

FEWEST = 8
"""The fewest examples that make a difficulty a slice."""


@dataclasses.dataclass(frozen=True)
class LongRange(WithoutFiles, abc.ABC):
    """Base class of tasks on a data set of long sequences.

    Attributes:
      data: where the examples come from (see `attnlab.data.long_range`).
    """

    packs: ClassVar[bool] = True
    labels: ClassVar[str]

    data: Dataset = Drawn(ListOps())

    @property
    def vocab(self) -> int:
        """Number of tokens; of the numbers of a position where these are real."""
        return self.data.kind.vocab or self.data.kind.channels

    @property
    def evaluated_split(self) -> str:
        """The published test split, or the held-out one."""
        return 'test'

    def source(self, split: str, length: int, tokens: int | None = None) -> Source:
        """The examples of a split; with `tokens`, as many of them as make up `tokens` positions, at least one."""
        rows = self.data.rows(split)
        if tokens is not None:
            rows = Chosen(rows, tuple(spread(len(rows), min(len(rows), max(1, tokens // length)))))
        return self._rows(rows, length)

    def slices(self, split: str, length: int, multiples: tuple[int, ...], count: int) -> dict[str, Slice]:
        """`count` examples all over the split, `all`, and those of each difficulty with enough of them, at no other
        lengths."""
        del multiples
        rows = self.data.rows(split)
        count = min(count, len(rows))
        places = tuple(spread(len(rows), count))
        found = {'all': places}
        for name, bounds in self.data.kind.difficulties.items():
            values = _difficulty(self.data, split, name, places)
            for least, bound in zip(bounds, (*bounds[1:], np.inf), strict=True):
                title = f'{name}={least}' if bound == least + 1 else f'{name}>={least}'
                chosen = tuple(np.array(places)[(values >= least) & (values < bound)].tolist())
                if FEWEST <= len(chosen) < count:
                    found[title] = chosen
        return {title: Slice(self._rows(Chosen(rows, chosen), length), length) for title, chosen in found.items()}

    def example(self, length: int) -> dict[str, np.ndarray]:
        """A row of zeros."""
        return blank(self.data.kind, self._document_length(length))

    def describe(self) -> dict[str, Any]:
        """Where the data are from."""
        return self.data.describe()

    def same_rows(self, split: str, other: str) -> bool:
        """Whether two splits are the same examples."""
        return self.data.same_rows(split, other)

    @abc.abstractmethod
    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """The metrics of one batch."""

    def apart(self, batch: Batch) -> dict[str, jax.Array]:
        """Tokens, segments and positions, with one row for each document of a pair."""
        count = self.data.kind.documents
        parts = {name: batch[name] for name in ('tokens', 'segments', 'positions')}
        return {name: x.reshape(-1, x.shape[1] // count, *x.shape[2:]) for name, x in parts.items()}

    def _rows(self, examples: Source, length: int) -> Source:
        """Examples as rows."""
        return Padded(examples, self.data.kind, self._document_length(length))

    def _document_length(self, length: int) -> int:
        if length % self.data.kind.documents:
            raise UserError(f'config.length is {length}; a pair of documents needs an even length')
        return length


@dataclasses.dataclass(frozen=True)
class Classification(LongRange):
    """Predict the label of a sequence, or of a pair that one model has read separately."""

    labels: ClassVar[str] = 'label'

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """Loss in nats per example, and accuracy."""
        vectors = self.vectors(model, batch, dropout_key)
        labels, weights = batch['label'], batch['weights'][:, None]
        right = likeliest(model.logits(vectors), labels)
        return {
            'loss': Average.of(model.losses(vectors, labels, dropout_key)[:, None], weights),
            **proportion('accuracy', right.astype(jnp.float32)[:, None], weights),
        }

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """What guesses at the class reach (`attnlab.tasks.trivial`); of numbers a linear map of them too."""
        train, asked = sampled_rows(self.source('train', part.length)), sampled_rows(part.source)
        kind = self.data.kind
        found = of_sequences(train, asked, kind.classes, kind.vocab)
        return {'accuracy': found | ({'linear': linear(train, asked, kind.classes)} if kind.vocab is None else {})}

    def vectors(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> Float[Array, 'b d']:
        """One hidden state per example: those of its documents, concatenated."""
        count = self.data.kind.documents
        if model.documents != count:
            raise UserError(
                f'model.head is for {model.documents} document(s); an example of {type(self.data).__name__} has {count}'
            )
        apart = self.apart(batch)
        documents = model.pooled(apart['tokens'], context(apart, dropout_key, batch['weights']))
        return documents.reshape(-1, count * documents.shape[1])


@dataclasses.dataclass(frozen=True)
class Denoising(LongRange):
    """Predict the inputs of a data set, ignoring its labels.

    With `hidden=None` every position is predicted from those before it; otherwise that fraction of the positions, drawn
    anew at every step, is replaced by id 0, or by the mean, and predicted from all others. The loss is that of the
    head; real numbers are in units of their standard deviation.

    Amos, Berant and Gupta 2024, "Never Train from Scratch", https://arxiv.org/abs/2310.02980.

    Attributes:
      hidden: fraction of the positions that are hidden; `None` to predict the next one.
    """

    labels: ClassVar[str] = 'tokens'

    hidden: float | None = None

    def __post_init__(self) -> None:
        if self.hidden is not None and not 0.0 < self.hidden < 1.0:
            raise UserError(f'hidden of Denoising is {self.hidden}; it must be a fraction between 0 and 1, or None')

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """Loss per predicted position; evaluations always hide the same ones of a row, whatever it is read with."""
        apart = self.apart(batch)
        tokens, segments = apart['tokens'], apart['segments']
        there = (segments > 0) & (jnp.repeat(batch['weights'], self.data.kind.documents) > 0)[:, None]
        if self.hidden is None:
            inputs, targets = tokens, jnp.roll(tokens, -1, axis=1)
            predicted = there & (jnp.roll(segments, -1, axis=1) == segments)
            predicted = predicted.at[:, -1].set(False)
        else:
            if dropout_key is None:
                own = functools.partial(jax.random.bernoulli, p=self.hidden, shape=there.shape[1:])
                drawn = jax.vmap(own)(_own_keys(tokens))
            else:
                key, dropout_key = jax.random.split(dropout_key)
                drawn = jax.random.bernoulli(key, self.hidden, there.shape)
            predicted = there & drawn
            chosen = predicted.reshape(*predicted.shape, *(1,) * (tokens.ndim - 2))
            inputs, targets = jnp.where(chosen, jnp.zeros_like(tokens), tokens), tokens
        weights = predicted.astype(jnp.float32)
        hidden, _ = model.hidden(inputs, context(apart | {'tokens': inputs}, dropout_key, weights))
        return {'loss': Average.of(model.losses(hidden, targets, dropout_key), weights)}


def _own_keys(tokens: Shaped[Array, 'b t ...']) -> Shaped[Array, ' b']:
    """A random key of every row, by what is in it."""
    numbers = tokens.reshape(len(tokens), -1)
    bits = numbers if jnp.issubdtype(numbers.dtype, jnp.integer) else jax.lax.bitcast_convert_type(numbers, jnp.int32)
    # Odd, so that no bit is lost; sums wrap around.
    factors = (2 * jnp.arange(bits.shape[1], dtype=jnp.uint32) + 1) * jnp.uint32(2654435761)
    sums = jnp.sum(bits.astype(jnp.uint32) * factors[None], axis=1, dtype=jnp.uint32)
    return jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(0)))(sums)


@functools.lru_cache(maxsize=16)
def _difficulty(data: Dataset, split: str, name: str, places: tuple[int, ...]) -> np.ndarray:
    """The scalar `name` of each of these examples of a split."""
    rows = data.rows(split)
    examples = (rows[place] for place in places)
    return np.array([len(example['x']) if name == 'length' else int(example[name]) for example in examples])
