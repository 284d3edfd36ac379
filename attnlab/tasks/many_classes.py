"""Tell very many classes apart, of which most are rare."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from attnlab.data.long_range.rows import Chosen
from attnlab.data.synthetic.problem import ENDLESS
from attnlab.data.synthetic.prototypes import ZipfPrototypes, ZipfRows
from attnlab.errors import UserError
from attnlab.metrics import Average, likeliest, proportion
from attnlab.models.predictor import Predictor
from attnlab.tasks.task import Batch, Slice, WithoutFiles, context
from attnlab.typing import DropoutKey

BANDS = ('frequent', 'middle', 'rare')


@dataclasses.dataclass(frozen=True)
class ManyClasses(WithoutFiles):
    """Predict the class of a point; a row is one point, a token of real numbers.

    Attributes:
      data: the source.
      bounds: the first classes of the slices `middle` and `rare`; those before are `frequent`.
      held_out: the number of examples of a split that is not trained on.

    Raises `UserError` for bounds that do not rise, or lie outside of the classes.
    """

    packs: ClassVar[bool] = False
    labels: ClassVar[str] = 'label'

    data: ZipfPrototypes = ZipfPrototypes()
    bounds: tuple[int, int] = (50, 2_000)
    held_out: int = 4_096

    def __post_init__(self) -> None:
        if not 0 < self.bounds[0] < self.bounds[1] < self.data.classes:
            raise UserError(
                f'bounds of ManyClasses is {self.bounds}; it must rise between 0 and the classes, {self.data.classes}'
            )

    @property
    def vocab(self) -> int:
        """Number of classes."""
        return self.data.classes

    @property
    def evaluated_split(self) -> str:
        """Other examples."""
        return 'test'

    def source(self, split: str, length: int, tokens: int | None = None) -> ZipfRows:
        """The first `tokens` examples of a split; `None`: all."""
        if length != 1:
            raise UserError(f'config.length is {length}; a point is 1 token')
        count = ENDLESS if split == 'train' else self.held_out
        return self.data.rows(split, count if tokens is None else min(count, tokens))

    def slices(self, split: str, length: int, multiples: tuple[int, ...], count: int) -> dict[str, Slice]:
        """The first `count` examples, `all`, and those of `BANDS` of classes by their frequency."""
        del multiples
        rows = self.source(split, length, count)
        bands = np.searchsorted(self.bounds, [rows[index]['label'] for index in range(len(rows))], side='right')
        found = {'all': np.arange(len(rows)), **{name: np.flatnonzero(bands == i) for i, name in enumerate(BANDS)}}
        return {name: Slice(Chosen(rows, tuple(at.tolist())), length) for name, at in found.items() if len(at)}

    def example(self, length: int) -> dict[str, np.ndarray]:
        """A row of zeros."""
        tokens = np.zeros((length, self.data.dim), np.float32)
        return {'tokens': tokens, 'label': np.zeros((), np.int32), 'weights': np.zeros((), np.float32)}

    def describe(self) -> dict[str, Any]:
        """The source: everything an example depends on."""
        return {'source': 'prototypes of many classes', 'data': self.data.name, 'content': self.data.content}

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """The loss in nats; in evaluation, without a key, the accuracy too, which needs the scores of all classes."""
        hidden, _ = model.hidden(batch['tokens'], context(batch, dropout_key))
        labels, weights = batch['label'], batch['weights'][:, None]
        found = {'loss': Average.of(model.losses(hidden[:, 0], labels, dropout_key)[:, None], weights)}
        if dropout_key is None:
            right = likeliest(model.logits(hidden[:, 0]), labels)
            found |= proportion('accuracy', right.astype(jnp.float32)[:, None], weights)
        return found

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """What is reached by the frequencies alone, and by `posterior`, the best there is."""
        rows = [part.source[index] for index in range(len(part.source))]
        x, labels = np.concatenate([row['tokens'] for row in rows]), np.array([row['label'] for row in rows])
        losses, right = self.data.posterior(x, labels)
        chances = self.data.frequencies()
        return {
            'accuracy': {'majority': float(np.mean(labels == 0)), 'posterior': float(np.mean(right))},
            'loss': {'frequencies': float(np.mean(-np.log(chances[labels]))), 'posterior': float(np.mean(losses))},
        }
