"""One label for an image, or one for every patch of it."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from attnlab.data.long_range.dataset import Dataset, Example
from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.long_range.rows import padded
from attnlab.data.pipeline import Row, Source
from attnlab.data.vision.augment import Augmentation, Augmented
from attnlab.data.vision.resized import Resized
from attnlab.data.vision.shapes import Segments
from attnlab.errors import UserError
from attnlab.metrics import Average, likeliest, overlap, proportion
from attnlab.models.heads.head import heads
from attnlab.models.predictor import Predictor
from attnlab.tasks.long_range import Classification, LongRange
from attnlab.tasks.task import Batch, Slice, context
from attnlab.tasks.trivial import linear, of_labels, of_sequences, sampled_rows
from attnlab.typing import DropoutKey


def side(data: Dataset) -> int:
    """The height and width in pixels of the images of a data set. Raises `UserError` where they are no squares."""
    found = math.isqrt(data.kind.length)
    if found**2 != data.kind.length or data.kind.vocab is not None or data.kind.documents != 1:
        raise UserError(f'{type(data).__name__} holds no square images of real numbers; LongRange tasks read it')
    return found


@dataclasses.dataclass(frozen=True)
class Made:
    """The rows of examples, made as they are read.

    Attributes:
      examples: by index.
      row: makes a row of one.
    """

    examples: Source
    row: Callable[[Example], Row]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Row:
        return self.row(self.examples[index])


@dataclasses.dataclass(frozen=True)
class ImageTask(LongRange):
    """Base class of tasks on images; `length` counts their pixels, which the inputs may join to patches.

    Attributes:
      data: square images.
      augmentation: how images are changed in training; `None`: not at all. They are evaluated as they are.
    """

    packs: ClassVar[bool] = False

    data: Dataset = Digits()
    augmentation: Augmentation | None = None

    def source(self, split: str, length: int, tokens: int | None = None) -> Source:
        """The examples of a split, those for training as they are augmented (see `LongRange`)."""
        if self.augmentation is None or split != 'train' or tokens is not None:
            return super().source(split, length, tokens)
        self._document_length(length)
        return Augmented(self.data.rows(split), self.row, side(self.data), self.augmentation)

    def example(self, length: int) -> Row:
        """A row of zeros."""
        pixels, kind = self._document_length(length), self.data.kind
        shape = (pixels,) if kind.channels == 1 else (pixels, kind.channels)
        empty = {'x': np.zeros(shape, np.uint8), 'targets': np.zeros(pixels, np.uint8), 'label': np.int32(0)}
        return {name: np.zeros_like(value) for name, value in self.row(empty).items()}

    @abc.abstractmethod
    def row(self, example: Example) -> Row:
        """The row of an example."""

    def _rows(self, examples: Source, length: int) -> Source:
        self._document_length(length)
        return Made(examples, self.row)

    def _document_length(self, length: int) -> int:
        pixels = side(self.data) ** 2
        if length != pixels:
            raise UserError(
                f'config.length is {length}; images of {side(self.data)} x {side(self.data)} pixels need {pixels}'
            )
        return length


@dataclasses.dataclass(frozen=True)
class ImageClassification(ImageTask, Classification):
    """Predict the label of an image.

    Where augmentation mixes two images the loss is that of both labels, each by its share of the image, and so is the
    accuracy in training; rows then have `other`, a second label, and `share`, that of the first.
    """

    def row(self, example: Example) -> Row:
        """The row of an example, which is an image that is all of its own."""
        row = padded(example, self.data.kind, self.data.kind.length)
        if self.augmentation is None or not self.augmentation.mixing:
            return row
        return row | {'other': row['label'], 'share': np.float32(1)}

    def check(self, model: Predictor) -> None:
        """Raises `UserError` for mixed images before a head that trains on the labels of a batch.

        It would be called for the first labels and for the second, and each time leave out the classes of the others.
        """
        if self.augmentation is None or not self.augmentation.mixing:
            return
        for head in heads(model):
            if head.of_batch:
                raise UserError(
                    f'{type(head).__name__} trains on the labels that occur in a batch, one of an image; augmentation '
                    'mixes images, which then have two: leave mixup and cutmix out'
                )

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """Loss in nats per image, and accuracy."""
        if 'share' not in batch:
            return super().measure(model, batch, dropout_key)
        vectors = self.vectors(model, batch, dropout_key)
        logits, weights = model.logits(vectors), batch['weights'][:, None]
        labels = ((batch['label'], batch['share']), (batch['other'], 1 - batch['share']))
        loss = sum(share * model.losses(vectors, label, dropout_key) for label, share in labels)
        right = sum(share * likeliest(logits, label).astype(jnp.float32) for label, share in labels)
        return {'loss': Average.of(loss[:, None], weights), **proportion('accuracy', right[:, None], weights)}

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """What guesses reach, and `linear on pixels`, a map fitted by least squares to training examples."""
        train, asked = sampled_rows(self.source('train', part.length)), sampled_rows(part.source)
        classes = self.data.kind.classes
        guesses = of_sequences(train, asked, classes, None)
        return {'accuracy': guesses | {'linear on pixels': linear(train, asked, classes)}}


@dataclasses.dataclass(frozen=True)
class Segmentation(ImageTask):
    """Predict the class of every patch of an image: that which most of its pixels have, of several the lowest.

    Attributes:
      data: images whose examples have `targets`, a class a pixel.
      augmentation: how images and targets are changed in training; images cannot be mixed.
      patch: height and width of a patch, that of the inputs.
    """

    labels: ClassVar[str] = 'targets'

    data: Dataset = Drawn(Segments())
    patch: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.data, Resized):
            raise UserError('Segmentation needs a class of every pixel; Resized images have those of none')
        if side(self.data) % self.patch:
            raise UserError(f'patch of Segmentation is {self.patch}; it must divide {side(self.data)} pixels')
        if self.augmentation is not None and self.augmentation.mixing:
            raise UserError(
                'augmentation of Segmentation mixes images; patches of a mixture have no class of their own'
            )

    def row(self, example: Example) -> Row:
        """The row of an example, with `targets`, int32, and `weights` of every patch, in the place of its label."""
        patches = side(self.data) // self.patch
        pixels = example['targets'].reshape(patches, self.patch, patches, self.patch)
        counts = (pixels[..., None] == np.arange(self.data.kind.classes)).sum(axis=(1, 3))
        targets = counts.argmax(axis=-1).reshape(-1).astype(np.int32)
        row = padded(example, self.data.kind, self.data.kind.length)
        kept = {name: value for name, value in row.items() if name not in ('label', 'weights')}
        return kept | {'targets': targets, 'weights': np.ones(len(targets), np.float32)}

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
        overlaps = {f'iou_{o}': overlap(found == o, targets == o, weights) for o in range(1, self.data.kind.classes)}
        return {
            'loss': Average.of(model.losses(hidden, targets, dropout_key), weights),
            **proportion('accuracy', (found == targets).astype(jnp.float32), weights),
            **overlaps,
        }

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """What guesses at the class of a patch reach."""
        train, asked = (
            np.concatenate([row['targets'] for row in sampled_rows(source)])
            for source in (self.source('train', part.length), part.source)
        )
        return {'accuracy': of_labels(train, asked, self.data.kind.classes)}
