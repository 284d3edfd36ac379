"""Tasks on images: their rows, metrics and trivial predictors."""

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.data.long_range.drawn import Drawn
from attnlab.data.long_range.listops import ListOps
from attnlab.data.vision.shapes import Count, Segments
from attnlab.errors import UserError
from attnlab.losses import softmax_loss
from attnlab.models.predictor import Predictor
from attnlab.tasks.images import ImageClassification, Segmentation, side
from attnlab.tasks.task import Guessable, Sliced, Task

SMALL = Drawn(Segments(size=16, most=1), train=30, held_out=20)


class Oracle(Predictor):
    """Stands for a model whose hidden states are logits it is given."""

    def __init__(self, logits):
        self.logits = lambda hidden: hidden
        self.found = logits

    def hidden(self, inputs, ctx, state=None):
        return self.found, None

    def losses(self, hidden, targets, key=None):
        return softmax_loss(hidden, targets)


def test_a_patch_has_the_class_of_most_of_its_pixels():
    task = Segmentation(SMALL, patch=2)
    assert isinstance(task, Task) and isinstance(task, Sliced) and isinstance(task, Guessable)
    row, pixels = task.source('test', 256)[3], SMALL.rows('test')[3]['targets'].reshape(16, 16)
    for place, target in enumerate(row['targets']):
        y, x = 2 * (place // 8), 2 * (place % 8)
        assert target == np.bincount(pixels[y : y + 2, x : x + 2].reshape(-1), minlength=4).argmax()
    example = task.example(256)
    assert {name: (value.shape, value.dtype) for name, value in row.items()} == {
        name: (value.shape, value.dtype) for name, value in example.items()
    }
    assert not any(value.any() for value in example.values())
    assert set(task.slices('test', 256, (1,), 10)) == {'all'}


def test_overlaps_are_summed_over_images():
    task = Segmentation(SMALL, patch=2)
    rows = [task.source('test', 256)[index] for index in range(4)]
    batch = {name: jnp.asarray(np.stack([row[name] for row in rows])) for name in rows[0]}
    targets = np.asarray(batch['targets'])
    found = np.where(targets == 1, 0, targets)
    found[0, 0], found[1, :3] = 2, 2
    measured = task.measure(Oracle(20 * jnp.eye(4)[found]), batch, None)
    assert float(measured['accuracy'].mean()) == pytest.approx(np.mean(found == targets))
    union, both = ((found == 2) | (targets == 2)).sum(), ((found == 2) & (targets == 2)).sum()
    assert float(measured['iou_2'].mean()) == pytest.approx(both / union)
    assert float(measured['iou_1'].total) == 0 and float(measured['iou_3'].mean()) == 1
    with pytest.raises(UserError, match='64 patches an image; the model has 16 hidden states'):
        task.measure(Oracle(jnp.zeros((4, 16, 4))), batch, None)
    guesses = task.trivial(task.slices('test', 256, (1,), 20)['all'])['accuracy']
    assert guesses['majority'] == pytest.approx(
        np.mean([task.source('test', 256)[index]['targets'] == 0 for index in range(20)])
    )


def test_a_linear_map_of_pixels_knows_digits_and_is_a_guess_to_beat():
    pytest.importorskip('sklearn')
    task = ImageClassification()
    found = task.trivial(task.slices('test', 64, (1,), 180)['all'])['accuracy']
    assert set(found) == {'chance', 'majority', 'linear on pixels'}
    assert found['chance'] == 0.1 and found['linear on pixels'] > 0.85 > found['majority']


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r'config.length is 256; images of 32 x 32 pixels need 1024'):
        ImageClassification(Drawn(Count())).source('train', 256)
    with pytest.raises(UserError, match='Drawn holds no square images'):
        side(Drawn(ListOps()))
    with pytest.raises(UserError, match='patch of Segmentation is 3; it must divide 16 pixels'):
        Segmentation(SMALL, patch=3)
