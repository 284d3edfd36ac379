"""One label for every point of a cloud, which a model reads as voxels."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from attnlab.data.long_range.dataset import Dataset, Example
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.pipeline import Row, Source
from attnlab.data.vision.clouds import Parts, Points
from attnlab.errors import UserError
from attnlab.metrics import Average, overlap, proportion
from attnlab.models.predictor import Predictor
from attnlab.tasks.images import Made
from attnlab.tasks.long_range import LongRange
from attnlab.tasks.task import Batch, Slice, context
from attnlab.tasks.trivial import of_labels, sampled_rows
from attnlab.typing import DropoutKey

FEATURES = 5
"""Numbers a voxel."""

PLACES = 3
"""Numbers that say where one is: its place on every axis, from 0."""


@dataclasses.dataclass(frozen=True)
class PointSegmentation(LongRange):
    """Predict the class of every point of a cloud, from the hidden state of the voxel that it lies in.

    The unit cube is cut into `side` voxels on every axis, which are tokens, the last axis fastest; those without points
    are tokens too. A voxel is described by whether it has points (0 or 1), the logarithm of one more than their number,
    and the mean of their places, from -1 to 1 on each axis of the voxel; 0 where there are none. Points of one voxel
    share a prediction. `length` counts points.

    Attributes:
      data: clouds of as many points each, whose examples have `targets`, a class a point.
      side: voxels on every axis, as that of the inputs.
    """

    packs: ClassVar[bool] = False
    labels: ClassVar[str] = 'targets'

    data: Dataset = Drawn(Parts())
    side: int = 8

    def __post_init__(self) -> None:
        if self.side < 1:
            raise UserError(f'side of PointSegmentation is {self.side}; it must be at least 1')
        if self.data.kind.vocab is not None or self.data.kind.channels != 3:
            raise UserError(f'{type(self.data).__name__} holds no clouds of points; LongRange tasks read it')

    def example(self, length: int) -> Row:
        """A row of zeros."""
        points = self._document_length(length)
        empty = self.row({'x': np.zeros((points, 3), np.float32), 'targets': np.zeros(points, np.uint8)})
        return {name: np.zeros_like(value) for name, value in empty.items()}

    def row(self, example: Example) -> Row:
        """The row of an example: `tokens`, float32 `voxels 5`; `voxels`, `targets`, int32, and `weights` of points."""
        voxels = voxels_of(example['x'], self.side)
        counts = np.bincount(voxels, minlength=self.side**3)
        places = example['x'].astype(np.float64) * self.side
        offsets = np.zeros((self.side**3, 3))
        np.add.at(offsets, voxels, 2 * (places - np.floor(places)) - 1)
        means = offsets / np.maximum(counts, 1)[:, None]
        tokens = np.concatenate([(counts > 0)[:, None], np.log1p(counts)[:, None], means], axis=1)
        return {
            'tokens': tokens.astype(np.float32),
            'voxels': voxels,
            'targets': example['targets'].astype(np.int32),
            'weights': np.ones(len(voxels), np.float32),
        }

    def places(self, row: Row) -> Int[np.ndarray, 'n']:
        """The number of the voxel that every point of a row lies in, among all voxels."""
        return row['voxels']

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """Loss in nats and accuracy per point; `iou_1` is intersection over union of class 1, found and true.

        There is one for every class; both are summed over all clouds first.
        """
        hidden, _ = model.hidden(batch['tokens'], context(batch, dropout_key))
        targets, weights = batch['targets'], batch['weights']
        if hidden.shape[1] != batch['tokens'].shape[1]:
            raise UserError(
                f'side of {type(self).__name__} is {self.side}, {batch["tokens"].shape[1]} voxels; the model has '
                f'{hidden.shape[1]} hidden states'
            )
        of_points = jnp.take_along_axis(hidden, batch['voxels'][:, :, None], axis=1)
        found = jnp.argmax(model.logits(of_points), axis=-1)
        overlaps = {f'iou_{o}': overlap(found == o, targets == o, weights) for o in range(self.data.kind.classes)}
        return {
            'loss': Average.of(model.losses(of_points, targets, dropout_key), weights),
            **proportion('accuracy', (found == targets).astype(jnp.float32), weights),
            **overlaps,
        }

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """What guesses at the class of a point reach; `class of the place`: that which training has most often there.

        A place is a voxel; where training has no points it is the class that it has most often anywhere.
        """
        classes = self.data.kind.classes
        train, asked = (sampled_rows(source) for source in (self.source('train', part.length), part.source))
        shown, targets = (np.concatenate([row['targets'] for row in rows]) for rows in (train, asked))
        places, others = (np.concatenate([self.places(row) for row in rows]) for rows in (train, asked))
        table = np.tile(np.bincount(shown, minlength=classes) / len(shown), (self.side**3, 1))
        np.add.at(table, (places, shown), 1.0)
        by_place = float(np.mean(table.argmax(axis=1)[others] == targets))
        return {'accuracy': of_labels(shown, targets, classes) | {'class of the place': by_place}}

    def _rows(self, examples: Source, length: int) -> Source:
        self._document_length(length)
        return Made(examples, self.row)

    def _document_length(self, length: int) -> int:
        points = self.data.kind.length
        if length != points:
            raise UserError(f'config.length is {length}; clouds of {points} points need {points}')
        return length


@dataclasses.dataclass(frozen=True)
class SparseSegmentation(PointSegmentation):
    """`PointSegmentation` of a volume whose voxels without points are empty places, segment 0, which nothing reads.

    For mixers of grids that keep empty places out (`sparse`): what they do is what they would do with the occupied
    voxels alone, at the cost of all.
    """

    packs: ClassVar[bool] = True

    def row(self, example: Example) -> Row:
        """The row of an example, with `segments` and `positions` of voxels."""
        row = super().row(example)
        numbers = np.arange(self.side**3, dtype=np.int32)
        return row | {'segments': row['tokens'][:, 0].astype(np.int32), 'positions': numbers}


@dataclasses.dataclass(frozen=True)
class OccupiedSegmentation(PointSegmentation):
    """Predict the class of every point of a cloud from voxels with points alone, which are the tokens.

    There are as many tokens as points, which is the most that can be needed; those that are over are padding, segment
    0. Voxels stand in the order that they have among all, and end with their place on every axis. For mixers that keep
    documents apart, without a grid; otherwise as `PointSegmentation`.
    """

    packs: ClassVar[bool] = True

    def row(self, example: Example) -> Row:
        """The row of an example: `tokens`, float32 `points 8`, `segments` and `positions` of them; else the same."""
        row = super().row(example)
        found, voxels = np.unique(row['voxels'], return_inverse=True)
        tokens = np.zeros((len(voxels), FEATURES + PLACES), np.float32)
        places = np.stack(np.unravel_index(found, (self.side,) * PLACES), axis=-1)
        tokens[: len(found)] = np.concatenate([row['tokens'][found], places], axis=1)
        numbers = np.arange(len(voxels), dtype=np.int32)
        marked = {'segments': (numbers < len(found)).astype(np.int32), 'positions': numbers}
        return row | {'tokens': tokens, 'voxels': voxels.astype(np.int32)} | marked

    def places(self, row: Row) -> Int[np.ndarray, 'n']:
        """The number of the voxel that every point of a row lies in, among all voxels."""
        places = row['tokens'][row['voxels'], FEATURES:].astype(np.int64)
        return np.ravel_multi_index(tuple(places.T), (self.side,) * PLACES)


def voxels_of(points: Points, side: int) -> Int[np.ndarray, 'n']:
    """The index of the voxel that every point of the unit cube lies in, int32."""
    places = np.clip(np.floor(points.astype(np.float64) * side), 0, side - 1).astype(np.int64)
    return np.ravel_multi_index(tuple(places.T), (side, side, side)).astype(np.int32)
