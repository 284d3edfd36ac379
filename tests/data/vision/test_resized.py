"""Images at another size hold what they held."""

import numpy as np
import pytest

from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.long_range.listops import ListOps
from attnlab.data.vision.resized import Resized
from attnlab.data.vision.shapes import Connected, Count, Segments
from attnlab.errors import UserError
from attnlab.tasks.images import ImageClassification, Segmentation


def test_images_have_their_labels_and_means_at_every_size():
    of = Drawn(Count(), held_out=8)
    for size in (16, 48):
        resized = Resized(of, size)
        assert resized.kind.length == size**2 and len(resized.rows('test')) == 8 and resized.splits == of.splits
        for index in range(8):
            one, other = of.rows('test')[index], resized.rows('test')[index]
            assert other['label'] == one['label'] and other['x'].shape == (size**2,)
            # Pixels at the border weigh more or less than others; shapes are away from it.
            assert other['x'].mean() == pytest.approx(one['x'].mean(), rel=0.05)


def test_the_same_size_is_the_same_image():
    rows, same = Digits().rows('test'), Resized(Digits(), 8).rows('test')
    np.testing.assert_allclose(same[3]['x'], rows[3]['x'], atol=1e-5)


def test_a_task_reads_them():
    task = ImageClassification(data=Resized(Digits(), 12))
    row = task.source('train', 144)[0]
    assert row['tokens'].shape == (144, 1) and row['tokens'].dtype == np.float32
    assert task.describe() == Digits().describe() | {'resized': 12}


def test_mistakes_are_named():
    with pytest.raises(UserError, match='Drawn holds no square images of real numbers'):
        Resized(Drawn(ListOps()), 8)
    with pytest.raises(UserError, match='size of Resized is 0; it must be at least 1'):
        Resized(Digits(), 0)


def test_difficulties_are_those_of_the_images_as_they_were():
    task = ImageClassification(Resized(Drawn(Connected()), 16))
    assert any(name.startswith('steps') for name in task.slices('test', 256, (1,), 64))
    with pytest.raises(UserError, match='Segmentation needs a class of every pixel; Resized images have those of none'):
        Segmentation(Resized(Drawn(Segments()), 16))
