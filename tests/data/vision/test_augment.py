"""Augmentation: what each change does to an image, and that drawn batches depend on nothing but their number."""

import dataclasses

import numpy as np
import pytest

from attnlab.data.long_range.drawn import Drawn
from attnlab.data.pipeline import batches
from attnlab.data.vision.augment import Augmentation, Crop, CutMix, Flip, Mixup
from attnlab.data.vision.shapes import Segments
from attnlab.errors import UserError
from attnlab.tasks.images import ImageClassification, Segmentation

IMAGE = np.arange(1, 31).reshape(5, 6)
SMALL = Drawn(Segments(size=16, most=1), train=6, held_out=4)
EVERYTHING = Augmentation(transforms=(Crop(padding=2), Flip()), mixing=(Mixup(), CutMix()))


def test_a_crop_is_a_shift_into_zeros():
    shifts = set()
    for seed in range(200):
        cut, same = Crop(padding=2)([IMAGE, IMAGE[..., None]], np.random.default_rng(seed))
        np.testing.assert_array_equal(cut, same[..., 0])
        # Numbers are unlike, so that one that is left tells how far the image was moved.
        (y, x), value = np.argwhere(cut)[0], cut[tuple(np.argwhere(cut)[0])]
        moved = y - (value - 1) // 6, x - (value - 1) % 6
        expected = np.zeros_like(IMAGE)
        for place in np.ndindex(IMAGE.shape):
            before = place[0] - moved[0], place[1] - moved[1]
            if 0 <= before[0] < 5 and 0 <= before[1] < 6:
                expected[place] = IMAGE[before]
        np.testing.assert_array_equal(cut, expected)
        shifts.add((int(moved[0]), int(moved[1])))
    assert shifts == {(y, x) for y in range(-2, 3) for x in range(-2, 3)}


def test_a_flip_mirrors_one_image_in_two():
    found = [Flip()([IMAGE], np.random.default_rng(seed))[0] for seed in range(400)]
    mirrored = [bool((each == IMAGE[:, ::-1]).all()) for each in found]
    assert all(each or (image == IMAGE).all() for each, image in zip(mirrored, found, strict=True))
    assert 160 < sum(mirrored) < 240


def test_mixtures_have_the_shares_that_they_say():
    first, second = np.zeros((20, 24, 1)), np.ones((20, 24, 1))
    shares = {Mixup: [], CutMix: []}
    for seed in range(300):
        for kind, found in shares.items():
            mixed, share = kind(alpha=1.0)(first, second, np.random.default_rng(seed))
            assert mixed.mean() == pytest.approx(1 - share)
            found.append(share)
            if kind is CutMix:
                rows, columns = (np.flatnonzero(mixed[..., 0].any(axis=axis)) for axis in (1, 0))
                assert set(np.unique(mixed)) <= {0.0, 1.0}
                assert mixed.sum() == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1) if rows.size else True
    assert not first.any() and 0.45 < np.mean(shares[Mixup]) < 0.55
    # Uniform before rectangles are cut at the borders and rounded down, so that less is taken from the second image.
    assert 0.5 < np.mean(shares[CutMix]) < 0.75


def test_batches_depend_on_their_number_alone():
    source = ImageClassification(SMALL, augmentation=EVERYTHING).source('train', 256)

    def read(count, **options):
        with batches(source, batch_size=4, seed=3, **options) as stream:
            return [next(stream) for _ in range(count)]

    whole, later = read(5), read(2, start=3, num_threads=0)
    for found, expected in zip(later, whole[3:], strict=True):
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name])
    parts = [read(1, start=2, process_index=index, process_count=2)[0] for index in range(2)]
    np.testing.assert_array_equal(np.concatenate([part['tokens'] for part in parts]), whole[2]['tokens'])
    # Six images in twenty rows: none comes twice as it was.
    rows = np.concatenate([batch['tokens'] for batch in whole]).reshape(20, -1)
    assert len(np.unique(rows, axis=0)) == 20
    assert not (read(1)[0]['share'] == 1).all()
    np.testing.assert_array_equal(source[0]['tokens'], source[0]['tokens'])
    assert source[0]['share'] == 1


def test_labels_of_a_mixture_are_those_of_its_images():
    labelled = dataclasses.replace(SMALL, train=50)
    task = ImageClassification(labelled, augmentation=Augmentation(mixing=(Mixup(alpha=0.2),)))
    source, examples = task.source('train', 256), ImageClassification(labelled).source('train', 256)
    images = np.stack([examples[index]['tokens'].reshape(-1) for index in range(50)])
    for index in range(5):
        row = source.varied(index, np.random.default_rng(index))
        rest = (row['tokens'].reshape(-1) - row['share'] * images[index]) / (1 - row['share'])
        nearest = np.abs(images - rest).sum(axis=1).argmin()
        np.testing.assert_allclose(rest, images[nearest], atol=1e-2 / (1 - row['share']))
        assert row['label'] == examples[index]['label'] and row['other'] == examples[int(nearest)]['label']


def test_classes_of_pixels_move_with_them():
    task = Segmentation(SMALL, augmentation=Augmentation(transforms=(Crop(), Flip())))
    source, plain = task.source('train', 256), Segmentation(SMALL).source('train', 256)
    for index in range(6):
        row = source.varied(index, np.random.default_rng(index))
        there = plain[index]['tokens'][plain[index]['targets'] > 0]
        moved = row['tokens'][row['targets'] > 0]
        # What is left of a shape has the very grey levels that it had.
        assert set(moved.reshape(-1).tolist()) <= set(there.reshape(-1).tolist()) and moved.size
    assert set(source[0]) == set(row) == set(task.example(256))


def test_what_is_evaluated_is_as_it_is():
    task, plain = ImageClassification(SMALL, augmentation=EVERYTHING), ImageClassification(SMALL)
    for split, tokens in (('test', None), ('train', 512)):
        found, expected = task.source(split, 256, tokens), plain.source(split, 256, tokens)
        assert len(found) == len(expected) and not hasattr(found, 'varied')
        np.testing.assert_array_equal(found[1]['tokens'], expected[1]['tokens'])
    assert {name: value.shape for name, value in task.example(256).items()} == {
        name: value.shape for name, value in task.source('train', 256)[0].items()
    }


@pytest.mark.parametrize(
    ('make', 'sentence'),
    [
        (lambda: Crop(padding=0), 'padding of Crop is 0; it must be at least 1'),
        (lambda: Mixup(alpha=0.0), 'alpha of Mixup is 0.0; it must be above 0'),
        (lambda: CutMix(alpha=-1.0), 'alpha of CutMix is -1.0; it must be above 0'),
        (lambda: Segmentation(SMALL, augmentation=EVERYTHING), 'patches of a mixture have no class of their own'),
    ],
)
def test_mistakes_are_named(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()
