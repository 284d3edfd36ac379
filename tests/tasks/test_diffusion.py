"""Denoising diffusion: noise, targets and the sampler, whose perfect model gives the image back."""

import dataclasses
import pathlib
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.configuration import config_of
from attnlab.data.long_range.dataset import Dataset, Kind
from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.drawn import Drawn
from attnlab.data.pipeline import Varied, batches, spread
from attnlab.data.vision.augment import Augmentation, Flip, Mixup
from attnlab.data.vision.resized import Resized
from attnlab.data.vision.shapes import Connected, Count, Segments
from attnlab.errors import UserError
from attnlab.evals.cadence import AtEnd
from attnlab.evals.drawn import Drawings, DrawnImages, statistics
from attnlab.models.predictor import Predictor
from attnlab.tasks.diffusion import LAST, CosineSchedule, Diffusion, _joined, _patched
from attnlab.tasks.images import ImageClassification
from attnlab.tasks.task import Sliced, Task
from attnlab.train.setup import prepare

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'images.py'
SMALL = Drawn(Count(size=16, most=2), train=8, held_out=6)


def test_levels_go_from_the_image_to_noise():
    a, b = CosineSchedule().levels(np.array([0.0, 0.5, LAST, 1.0]), np)
    np.testing.assert_allclose(a**2 + b**2, 1)
    np.testing.assert_allclose(a[[0, 3]], [1, 0], atol=1e-12)
    assert a[1] == pytest.approx(0.7, abs=0.02) and 0.005 < a[2] < 0.01
    with pytest.raises(UserError, match=r'offset of CosineSchedule is -1\.0; it must be at least 0'):
        CosineSchedule(offset=-1.0)


@pytest.mark.parametrize('predicts', ['epsilon', 'v'])
def test_rows_are_images_with_noise(predicts):
    task = Diffusion(SMALL, patch=2, predicts=predicts)
    plain = ImageClassification(SMALL)
    assert isinstance(task, Task) and isinstance(task, Sliced) and task.vocab == 4
    source, images = task.source('train', 256), plain.source('train', 256)
    assert isinstance(source, Varied)
    row = source.varied(3, np.random.default_rng(7))
    t = np.random.default_rng(7).uniform(0, LAST)
    # The first number that tells the time is cos(pi t).
    np.testing.assert_allclose(row['tokens'][:, 1], np.cos(np.pi * t), rtol=1e-5)
    a, b = CosineSchedule().levels(t, np)
    image = images[3]['tokens']
    noise = (row['tokens'][:, :1] - a * image) / b
    expected = noise if predicts == 'epsilon' else a * noise - b * image
    np.testing.assert_allclose(row['targets'], _patched(expected, 16, 2), rtol=1e-3, atol=1e-4)
    example = task.example(256)
    assert {name: (value.shape, value.dtype) for name, value in row.items()} == {
        name: (value.shape, value.dtype) for name, value in example.items()
    }


def test_noise_is_drawn_anew_in_training_and_belongs_to_the_image_elsewhere():
    task = Diffusion(SMALL, augmentation=Augmentation(transforms=(Flip(),)))
    source = task.source('train', 256)
    with batches(source, batch_size=8, seed=0) as stream:
        first, second = next(stream), next(stream)
    rows = np.concatenate([first['tokens'], second['tokens']]).reshape(16, -1)
    assert len(np.unique(rows, axis=0)) == 16
    again = task.source('train', 256, 4 * 256)
    np.testing.assert_array_equal(source[spread(len(source), 4)[1]]['tokens'], again[1]['tokens'])
    test = task.slices('test', 256, (1,), 6)['all'].source
    assert len({float(test[index]['tokens'][0, 1]) for index in range(6)}) == 6
    assert 0.8 < task.trivial(task.slices('test', 256, (1,), 6)['all'])['loss']['zero'] < 1.2


def test_patches_are_joined_again():
    pixels = np.arange(2 * 16 * 3, dtype=np.float32).reshape(2, 16, 3)
    cut = np.stack([_patched(each, 4, 2) for each in pixels])
    assert cut.shape == (2, 4, 12) and cut[0, 0, :6].tolist() == pixels[0, :2].reshape(-1).tolist()
    np.testing.assert_array_equal(_joined(jnp.asarray(cut), 4, 2, 3), pixels)


class Knowing(Predictor):
    """Stands for a model that knows the one image there is, and so predicts noise exactly."""

    def __init__(self, image, task):
        self.image, self.task = image, task

    def hidden(self, inputs, ctx, state=None):
        x, told = inputs[..., :1], inputs[:, :1, 1:2]
        a, b = self.task.schedule.levels(jnp.arccos(told) / jnp.pi)
        noise = (x - a * self.image) / b
        return noise if self.task.predicts == 'epsilon' else a * noise - b * self.image, None

    def logits(self, hidden):
        return hidden


@pytest.mark.parametrize(('predicts', 'eta'), [('epsilon', 0.0), ('v', 1.0)])
@pytest.mark.parametrize('of', [Count(size=16, most=2), Connected()])
def test_a_perfect_model_draws_the_image(of, predicts, eta):
    """Also the brightest pixels, of few bright ones the furthest from the mean: 7.9 deviations of `Connected`."""
    data = Drawn(of, train=8, held_out=6)
    task = Diffusion(data, predicts=predicts)
    image = jnp.asarray(ImageClassification(data).source('test', data.kind.length)[0]['tokens'])
    drawn = jax.jit(lambda key: task.drawn(Knowing(image[None], task), key, count=2, steps=8, eta=eta))
    np.testing.assert_allclose(drawn(jax.random.key(0)), np.stack([image] * 2), atol=2e-3)


@pytest.mark.parametrize('data', [SMALL, Digits(), Resized(Drawn(Segments(), train=8, held_out=6), 8)])
def test_bounds_are_of_the_range_of_pixels(data):
    """No image leaves it, and black and the highest level are its ends."""
    lowest, highest = Diffusion(data).bounds
    kind, level = data.kind, 16 if isinstance(data, Digits) else 255
    assert (lowest, highest) == pytest.approx([(0 - kind.mean) / kind.deviation, (level - kind.mean) / kind.deviation])
    pixels = np.stack([ImageClassification(data).row(data.rows('train')[index])['tokens'] for index in range(8)])
    assert lowest - 1e-6 <= pixels.min() and pixels.max() <= highest + 1e-6


def test_bounds_of_data_that_do_not_say_their_range_are_those_of_training_images():
    assert Diffusion(InOrder()).bounds == pytest.approx((0, 255), abs=1)


class Linearly(Predictor):
    """Stands for a model that predicts `scale x + shift`, never the image that noise was added to."""

    def __init__(self, scale, shift):
        self.scale, self.shift = scale, shift

    def hidden(self, inputs, ctx, state=None):
        return self.scale * inputs[..., :1] + self.shift, None

    def logits(self, hidden):
        return hidden


@pytest.mark.parametrize('predicts', ['epsilon', 'v'])
@pytest.mark.parametrize('eta', [0.0, 0.5, 1.0])
def test_steps_are_those_of_the_written_equation(predicts, eta):
    """Song et al. 2020, https://arxiv.org/abs/2010.02502, equations 12 and 16, of numbers in their notation."""
    task, key = Diffusion(SMALL, predicts=predicts), jax.random.key(3)
    # The last step goes to the estimate of the image, with no noise left; the first ones add what `eta` says.
    times = np.linspace(LAST, 0, 4)
    first, *keys = jax.random.split(key, 4)
    x = np.asarray(jax.random.normal(first, (2, 256, 1)), np.float64)
    for t, s, each in zip(times[:-1], times[1:], keys, strict=True):
        kept, kept_next = (task.schedule.levels(level, np)[0] ** 2 for level in (t, s))
        found = 0.2 * x - 0.1
        # v = sqrt(kept) noise - sqrt(1 - kept) image
        noise = found if predicts == 'epsilon' else np.sqrt(kept) * found + np.sqrt(1 - kept) * x
        image = np.clip((x - np.sqrt(1 - kept) * noise) / np.sqrt(kept), *task.bounds)
        noise = (x - np.sqrt(kept) * image) / np.sqrt(1 - kept)
        sigma = eta * np.sqrt((1 - kept_next) / (1 - kept)) * np.sqrt(1 - kept / kept_next)
        x = np.sqrt(kept_next) * image + np.sqrt(1 - kept_next - sigma**2) * noise
        x = x + sigma * np.asarray(jax.random.normal(each, x.shape))
    drawn = jax.jit(lambda key: task.drawn(Linearly(0.2, -0.1), key, count=2, steps=3, eta=eta))
    np.testing.assert_allclose(drawn(key), x, rtol=1e-3, atol=1e-3)


class Averaging(Predictor):
    """Stands for the best model of pixels that are drawn from N(mean, deviation^2), each by itself."""

    def __init__(self, mean, deviation, task):
        self.mean, self.deviation, self.task = mean, deviation, task

    def hidden(self, inputs, ctx, state=None):
        x, told = inputs[..., :1], inputs[:, :1, 1:2]
        a, b = self.task.schedule.levels(jnp.arccos(told) / jnp.pi)
        image = self.mean + a * self.deviation**2 / ((a * self.deviation) ** 2 + b**2) * (x - a * self.mean)
        noise = (x - a * image) / b
        return noise if self.task.predicts == 'epsilon' else a * noise - b * image, None

    def logits(self, hidden):
        return hidden


@pytest.mark.parametrize('eta', [0.0, 0.5, 1.0])
def test_the_best_model_of_gaussian_pixels_draws_their_distribution(eta):
    task = Diffusion(SMALL, predicts='v')
    drawn = jax.jit(lambda key: task.drawn(Averaging(1.8, 0.4, task), key, count=64, steps=200, eta=eta))
    pixels = np.asarray(drawn(jax.random.key(0)))
    # Of 16,384 pixels the mean has a standard error of 0.003, the deviation one of 0.002.
    assert pixels.mean() == pytest.approx(1.8, abs=0.015) and pixels.std() == pytest.approx(0.4, abs=0.015)


class KnowingEach(Predictor):
    """Stands for a model that knows the one image of every label, which is one number everywhere."""

    def __init__(self, levels, task):
        self.levels, self.task = levels, task

    def hidden(self, inputs, ctx, state=None):
        x, told, label = inputs[..., :1], inputs[:, :1, 1:2], inputs[..., 1 + self.task.features :]
        a, b = self.task.schedule.levels(jnp.arccos(told) / jnp.pi)
        return a * (x - a * (label @ self.levels)) / b - b * (label @ self.levels), None

    def logits(self, hidden):
        return hidden


def test_given_labels_images_are_drawn_of_each_in_turn():
    task, plain = Diffusion(SMALL, predicts='v', given='label'), Diffusion(SMALL, predicts='v')
    assert (task.told, plain.told, plain.asked(5)) == (10, 8, None)
    levels = jnp.array([[0.5], [2.0]])
    drawn = jax.jit(lambda key: task.drawn(KnowingEach(levels, task), key, count=5, steps=8))(jax.random.key(0))
    np.testing.assert_allclose(drawn.mean(axis=(1, 2)), [0.5, 2, 0.5, 2, 0.5], atol=2e-3)
    row, other = (each.source('test', 256)[1] for each in (task, plain))
    label = int(SMALL.rows('test')[1]['label'])
    np.testing.assert_array_equal(row['tokens'][:, :9], other['tokens'])
    np.testing.assert_array_equal(row['tokens'][:, 9:], np.tile(np.eye(2)[label], (256, 1)))
    assert task.example(256)['tokens'].shape == row['tokens'].shape


def test_drawn_images_are_written_side_by_side(tmp_path):
    from PIL import Image

    pictures = np.zeros((5, 4, 4, 1), np.uint8)
    pictures[4] = 200
    numbers = {'mean_error': 0.5, 'deviation_error': 0.25, 'mean_error_of_data': 0.1, 'deviation_error_of_data': 0.2}
    found = DrawnImages(numbers, pictures)
    found.draw(tmp_path)
    sheet = np.asarray(Image.open(tmp_path / 'drawn.png'))
    assert sheet.shape == (2 * 20, 3 * 20) and (sheet[20:36, 20:36] == 200).all() and sheet.sum() == 200 * 256
    assert len(found.table('run').rows) == 2
    zeros = np.zeros((3, 4, 1))
    assert statistics(zeros + 1, zeros) == {'mean_error': 1.0, 'deviation_error': 0.0}


def test_drawn_images_are_compared_with_those_all_over_a_split_that_is_stored_class_by_class():
    """Of images of one level each, in ascending order, the mean of few is that of all."""
    setup = dataclasses.replace(prepare(config_of(CONFIG, 'data=count,predict=v')), task=Diffusion(InOrder()))
    level = InOrder().rows('test')[1500]['x'][0]
    found = Drawings(AtEnd(), count=3).compared(setup, np.full((3, 16, 1), level, np.float32))
    assert found.numbers['mean_error'] == pytest.approx(0, abs=0.1)
    assert found.numbers['mean_error_of_data'] == pytest.approx(0, abs=0.1)


@dataclasses.dataclass(frozen=True)
class InOrder(Dataset):
    """3,001 images of 4 x 4 pixels, each of one level."""

    kind: ClassVar = Kind(classes=2, length=16)
    splits: ClassVar = {'train': 3001, 'test': 3001}

    def rows(self, split):
        levels = np.linspace(0, 255, self.splits[split], dtype=np.float32)
        return [{'x': np.full(16, level), 'label': np.int32(level > 127)} for level in levels]

    def describe(self):
        return {}


@pytest.mark.parametrize(
    ('make', 'sentence'),
    [
        (lambda: Diffusion(SMALL, patch=3), 'patch of Diffusion is 3; it must divide 16 pixels'),
        (lambda: Diffusion(SMALL, features=0), 'features of Diffusion is 0; without any the time is not told'),
        (lambda: Diffusion(SMALL, augmentation=Augmentation(mixing=(Mixup(),))), 'would be drawn as mixtures'),
        (lambda: Diffusion(Drawn(Segments()), given='label'), 'given of Diffusion is label; the data have a class for'),
        (lambda: Drawings(AtEnd(), count=0), 'Drawings has count 0, steps 50 and eta 0.0; it needs at least one'),
    ],
)
def test_mistakes_are_named(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()
