"""One label for an image, or one for every patch of it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from attnlab.data.long_range.dataset import Dataset
from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.long_range.rows import Padded
from attnlab.data.pipeline import Row, Source
from attnlab.data.vision.shapes import Segments
from attnlab.errors import UserError
from attnlab.metrics import Average, proportion
from attnlab.models.predictor import Predictor
from attnlab.tasks.long_range import Classification, LongRange
from attnlab.tasks.task import Batch, Slice, context
from attnlab.tasks.trivial import first_rows, linear, of_labels, of_sequences
from attnlab.typing import DropoutKey


def side(data: Dataset) -> int:
    """The height and width in pixels of the images of a data set. Raises `UserError` where they are no squares."""
    found = math.isqrt(data.kind.length)
    if found**2 != data.kind.length or data.kind.vocab is not None or data.kind.documents != 1:
        raise UserError(f'{type(data).__name__} holds no square images of real numbers; LongRange tasks read it')
    return found


def _whole(data: Dataset, length: int) -> int:
    if length != side(data) ** 2:
        raise UserError(
            f'config.length is {length}; images of {side(data)} x {side(data)} pixels need {side(data) ** 2}'
        )
    return length


@dataclasses.dataclass(frozen=True)
class ImageClassification(Classification):
    """Predict the label of an image; `length` counts its pixels, which the inputs may join to patches."""

    packs: ClassVar[bool] = False

    data: Dataset = Digits()

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """What guesses reach, and `linear on pixels`, a map fitted by least squares to the first training examples."""
        train, asked = first_rows(self.source('train', part.length)), first_rows(part.source)
        classes = self.data.kind.classes
        guesses = of_sequences(train, asked, classes, None)
        return {'accuracy': guesses | {'linear on pixels': linear(train, asked, classes)}}

    def _document_length(self, length: int) -> int:
        return _whole(self.data, length)


@dataclasses.dataclass(frozen=True)
class Patched:
    """Rows with one target for every patch: the class that most of its pixels have, of several the lowest.

    A row is that of `Padded` with `targets`, int32, and `weights`, float32, of every patch, in the place of the label.

    Attributes:
      examples: with `targets`, one a pixel.
      rows: the same as rows of pixels.
      size: height and width in pixels.
      patch: height and width of a patch.
      classes: number of classes.
    """

    examples: Source
    rows: Padded
    size: int
    patch: int
    classes: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row, side = self.rows[index], self.size // self.patch
        pixels = self.examples[index]['targets'].reshape(side, self.patch, side, self.patch)
        counts = (pixels[..., None] == np.arange(self.classes)).sum(axis=(1, 3))
        targets = counts.argmax(axis=-1).reshape(-1).astype(np.int32)
        return _labelled(row, targets)


@dataclasses.dataclass(frozen=True)
class Segmentation(LongRange):
    """Predict the class of every patch of an image.

    Attributes:
      data: images whose examples have `targets`, a class a pixel.
      patch: height and width of a patch, that of the inputs.
    """

    packs: ClassVar[bool] = False
    labels: ClassVar[str] = 'targets'

    data: Dataset = Drawn(Segments())
    patch: int = 1

    def __post_init__(self) -> None:
        if side(self.data) % self.patch:
            raise UserError(f'patch of Segmentation is {self.patch}; it must divide {side(self.data)} pixels')

    def example(self, length: int) -> dict[str, np.ndarray]:
        """A row of zeros."""
        row = _labelled(super().example(length), np.zeros(length // self.patch**2, np.int32))
        return {name: np.zeros_like(value) for name, value in row.items()}

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """Loss in nats and accuracy per patch; `iou_1` is intersection over union of class 1, found and true.

        There is one for every class but the background, 0; both are summed over all images first.
        """
        hidden, _ = model.hidden(batch['tokens'], context(batch, dropout_key))
        targets, weights = batch['targets'], batch['weights']
        if hidden.shape[1] != targets.shape[1]:
            raise UserError(
                f'patch of Segmentation is {self.patch}, {targets.shape[1]} patches an image; the model has '
                f'{hidden.shape[1]} hidden states: the inputs need the same patch and no class token'
            )
        found = jnp.argmax(model.logits(hidden), axis=-1)
        overlaps = {f'iou_{o}': _overlap(found == o, targets == o, weights) for o in range(1, self.data.kind.classes)}
        return {
            'loss': Average.of(model.losses(hidden, targets, dropout_key), weights),
            **proportion('accuracy', (found == targets).astype(jnp.float32), weights),
            **overlaps,
        }

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """What guesses at the class of a patch reach."""
        train, asked = (
            np.concatenate([row['targets'] for row in first_rows(source)])
            for source in (self.source('train', part.length), part.source)
        )
        return {'accuracy': of_labels(train, asked, self.data.kind.classes)}

    def _rows(self, examples: Source, length: int) -> Source:
        kind = self.data.kind
        rows = Padded(examples, kind, self._document_length(length))
        return Patched(examples, rows, side(self.data), self.patch, kind.classes)

    def _document_length(self, length: int) -> int:
        return _whole(self.data, length)


def _overlap(found: Any, there: Any, weights: Any) -> Average:
    return Average(jnp.sum((found & there) * weights), jnp.sum((found | there) * weights))


def _labelled(row: Mapping[str, Any], targets: np.ndarray) -> dict[str, Any]:
    """A row with targets and their weights in the place of its label."""
    kept = {name: value for name, value in row.items() if name not in ('label', 'weights')}
    return kept | {'targets': targets, 'weights': np.ones(len(targets), np.float32)}
