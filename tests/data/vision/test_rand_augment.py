"""RandAugment: every change to the bit as in pillow, levels as in torchvision, batches by their number alone."""

import itertools

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from attnlab.data.long_range.drawn import Drawn
from attnlab.data.pipeline import batches
from attnlab.data.vision.augment import Augmentation
from attnlab.data.vision.rand_augment import OPERATIONS, RandAugment, Warp
from attnlab.data.vision.shapes import Count, Segments
from attnlab.errors import UserError
from attnlab.tasks.images import ImageClassification, Segmentation


def moved(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


BY_PILLOW = {
    'identity': lambda image, level: image,
    'shear_x': lambda image, level: moved(image, 1, level, 0, 0, 1, 0),
    'shear_y': lambda image, level: moved(image, 1, 0, 0, level, 1, 0),
    'translate_x': lambda image, level: moved(image, 1, 0, -int(level), 0, 1, 0),
    'translate_y': lambda image, level: moved(image, 1, 0, 0, 0, 1, -int(level)),
    'rotate': lambda image, level: image.rotate(level, Image.Resampling.NEAREST),
    'brightness': lambda image, level: ImageEnhance.Brightness(image).enhance(1 + level),
    'color': lambda image, level: ImageEnhance.Color(image).enhance(1 + level),
    'contrast': lambda image, level: ImageEnhance.Contrast(image).enhance(1 + level),
    'sharpness': lambda image, level: ImageEnhance.Sharpness(image).enhance(1 + level),
    'posterize': lambda image, level: ImageOps.posterize(image, int(level)),
    'solarize': lambda image, level: ImageOps.solarize(image, level),
    'autocontrast': lambda image, level: ImageOps.autocontrast(image),
    'equalize': lambda image, level: ImageOps.equalize(image),
}
LEVELS = {
    'shear_x': 0.3 * 9 / 30,
    'shear_y': 0.3 * 9 / 30,
    'translate_x': 150 / 331 * 45 * 9 / 30,
    'translate_y': 150 / 331 * 32 * 9 / 30,
    'rotate': 9.0,
    'brightness': 0.27,
    'color': 0.27,
    'contrast': 0.27,
    'sharpness': 0.27,
    'posterize': 7.0,
    'solarize': 178.5,
}
"""Those of magnitude 9 of 31 for an image 32 pixels high and 45 wide."""


def pictures() -> list[np.ndarray]:
    """Noise and smooth images, of few values and of one, odd and even sides, grey and in colours."""
    rng = np.random.default_rng(0)
    slope = np.linspace(30, 190, 32 * 45).reshape(32, 45).astype(np.uint8)
    grey = [
        rng.integers(0, 256, (32, 45)),
        slope,
        rng.integers(100, 140, (33, 18)),
        np.full((8, 9), 77),
        np.array([[3, 200], [3, 3]]),
    ]
    colours = [np.stack([each, each[::-1], 255 - each // 2], axis=-1) for each in grey]
    return [each.astype(np.uint8) for each in grey + colours]


@pytest.mark.parametrize('name', OPERATIONS)
def test_changes_are_those_of_pillow(name):
    operation, seen = OPERATIONS[name], set()
    for picture, share, sign in itertools.product(pictures(), np.linspace(0, 1, 7), (1, -1)):
        level = operation.level(float(share), *picture.shape[:2])
        level = sign * level if operation.signed else level
        (found,) = operation.changed([picture], level)
        expected = np.asarray(BY_PILLOW[name](Image.fromarray(picture), level))
        np.testing.assert_array_equal(found, expected, err_msg=f'{picture.shape} {level}')
        assert found.dtype == np.uint8
        seen.add(bool((found != picture).any()))
    assert True in seen or name == 'identity'


@pytest.mark.parametrize('name', OPERATIONS)
def test_levels_are_those_of_torchvision(name):
    assert OPERATIONS[name].level(9 / 30, 32, 45) == pytest.approx(LEVELS.get(name, 0.0), rel=1e-12)
    # Bits kept at every magnitude: 8 less the nearest whole number to a share of 4, ties to the even one.
    if name == 'posterize':
        kept = [OPERATIONS[name].level(index / 30, 32, 45) for index in range(31)]
        assert kept == [8 - np.round(index / 7.5) for index in range(31)]


def test_changes_are_drawn_with_equal_chances_and_signs():
    """Of one change of a single bright pixel, moves tell the operation and its sign."""
    found = {-1: 0, 0: 0, 1: 0}
    picture = np.zeros((31, 31), np.uint8)
    picture[:, 15] = 255
    for seed in range(2800):
        (each,) = RandAugment(count=1, magnitude=30)([picture], np.random.default_rng(seed))
        columns = np.flatnonzero(each.all(axis=0))
        found[int(np.sign(columns[0] - 15)) if len(columns) == 1 else 0] += 1
    # One operation in fourteen moves whole columns, to either side one time in two.
    assert 70 < found[-1] < 130 and 70 < found[1] < 130


def test_classes_of_pixels_move_with_them_and_do_not_change_otherwise():
    image = np.random.default_rng(0).integers(1, 256, (12, 12)).astype(np.uint8)
    classes = (image // 64 + 1).astype(np.int32)
    for name, operation in OPERATIONS.items():
        level = operation.level(0.5, 12, 12)
        first, second = operation.changed([image, classes], level)
        if isinstance(operation, Warp):
            np.testing.assert_array_equal(second, np.where(first > 0, first // 64 + 1, 0), err_msg=name)
        else:
            np.testing.assert_array_equal(second, classes)
        assert second.dtype == np.int32


@pytest.mark.parametrize('task', [ImageClassification(Drawn(Count(size=16, most=2), train=6, held_out=4))])
def test_batches_depend_on_their_number_alone(task):
    varied = type(task)(task.data, augmentation=Augmentation(transforms=(RandAugment(),)))
    source = varied.source('train', 256)

    def read(count, **options):
        with batches(source, batch_size=4, seed=3, **options) as stream:
            return [next(stream)['tokens'] for _ in range(count)]

    whole, later = read(4), read(2, start=2, num_threads=0)
    np.testing.assert_array_equal(later, whole[2:])
    assert len(np.unique(np.concatenate(whole).reshape(16, -1), axis=0)) > 10


def test_segmentation_takes_it():
    data = Drawn(Segments(size=16, most=1), train=6, held_out=4)
    source = Segmentation(data, augmentation=Augmentation(transforms=(RandAugment(),))).source('train', 256)
    rows = [source.varied(0, np.random.default_rng(seed)) for seed in range(20)]
    assert len({row['targets'].tobytes() for row in rows}) > 5


def test_the_weakest_level_is_a_level():
    """At which nothing moves, and what only moves or fades leaves an image as it is."""
    picture = np.random.default_rng(0).integers(0, 256, (8, 9, 3), np.uint8)
    assert RandAugment(magnitude=0).magnitude == 0
    unlike = {'solarize', 'autocontrast', 'equalize'}
    for name, operation in OPERATIONS.items():
        (changed,) = operation.changed([picture], operation.level(0.0, 8, 9))
        assert name in unlike or (changed == picture).all(), name


@pytest.mark.parametrize(
    ('make', 'sentence'),
    [
        (lambda: RandAugment(count=0), 'count of RandAugment is 0; it must be a whole number of at least 1'),
        (lambda: RandAugment(magnitude=31), 'magnitude of RandAugment is 31 of 31 bins'),
        (
            lambda: RandAugment()([np.zeros((4, 4))], np.random.default_rng(0)),
            'RandAugment changes images of bytes; these are of float64',
        ),
    ],
)
def test_mistakes_are_named(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()
