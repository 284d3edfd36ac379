import math
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest

from attnlab.data.long_range import pathfinder
from attnlab.data.long_range.dataset import digest_of
from attnlab.data.long_range.drawn import Drawn, example
from attnlab.data.long_range.pathfinder import PATH_X, Pathfinder, _added, _shapes, _towards
from attnlab.errors import UserError

from .probes import linear_probe

ROOT = pathlib.Path(__file__).parents[3]

pytestmark = pytest.mark.xdist_group('pathfinder')  # Images are drawn once.


def stream(index, split=0):
    return np.random.SeedSequence(0, spawn_key=(split, index))


def moved(place, angle, distance):
    """A step as the published generator takes it: the sum rounded up to whole pixels."""
    return math.ceil(place[0] + distance * math.sin(angle)), math.ceil(place[1] + distance * math.cos(angle))


def rotated(angle):
    return angle - math.pi if angle >= 0 else angle + math.pi


def joined(scene, of):
    """Whether a chain of as many dashes as a path has leads from the first marker to the second.

    The dashes are in no order, and which path they are of is not looked at: a dash follows another where it ends on the
    circle around the point a gap behind the other, and points to that point.
    """
    dashes = [dash for path in scene.targets + scene.distractors for dash in path]
    random.Random(0).shuffle(dashes)
    start, end = scene.markers
    (first,) = [dash for dash in dashes if (dash.y, dash.x) == start and any(dash is path[0] for path in scene.targets)]
    pivot = moved(moved(start, first.angle, of.dash), rotated(first.angle), of.dash + scene.margin)
    chains = [(first, pivot, first.angle, 1)]
    while chains:
        dash, pivot, heading, count = chains.pop()
        if count == of.contour:
            if (dash.y, dash.x) == end:
                return 1
            continue
        pivot = moved(pivot, heading, of.dash + 2 * scene.margin)
        for other in dashes:
            dy, dx = other.y - pivot[0], other.x - pivot[1]
            on_circle = abs(math.hypot(dy, dx) - of.dash - scene.margin) < 1.5
            off = math.remainder(math.atan2(dy, dx) - rotated(other.angle), 2 * math.pi)
            if on_circle and abs(off) < 1e-6:
                chains.append((other, pivot, math.atan2(dy, dx), count + 1))
    return 0


@pytest.mark.parametrize(('of', 'count'), [(Pathfinder(), 40), pytest.param(PATH_X, 5, marks=pytest.mark.slow)])
def test_the_label_is_whether_a_path_joins_the_markers(of, count):
    """Others may join them too by chance, as dashes of two paths may come near each other."""
    scenes = [of.scene(stream(index)) for index in range(count)]
    assert all(joined(scene, of) for scene in scenes if scene.label)
    assert sum(joined(scene, of) for scene in scenes if not scene.label) <= count / 20
    assert all(len(path) == of.contour for scene in scenes for path in scene.targets)
    assert all(len(path) == of.distractor_contour for scene in scenes for path in scene.distractors)


def distances(scene, of, reach):
    """How far every pixel is from the nearest dash, and from the nearest marker."""
    y, x = np.mgrid[: of.size, : of.size].astype(float)
    nearest = np.full((of.size, of.size), np.inf)
    for dash in (dash for path in scene.targets + scene.distractors for dash in path):
        to_y, to_x = reach * math.sin(dash.angle), reach * math.cos(dash.angle)
        along = np.clip(((y - dash.y) * to_y + (x - dash.x) * to_x) / (reach * reach), 0, 1)
        nearest = np.minimum(nearest, np.hypot(y - dash.y - along * to_y, x - dash.x - along * to_x))
    return nearest, np.minimum(*(np.hypot(y - row, x - column) for row, column in scene.markers))


@pytest.mark.slow
@pytest.mark.parametrize(('of', 'count'), [(Pathfinder(), 30), (PATH_X, 3)])
def test_an_image_shows_its_scene_and_nothing_else(of, count):
    for index in range(count):
        scene = of.scene(stream(index))
        image = of.render(scene)
        assert image.shape == (of.size, of.size) and image.dtype == np.uint8 and image.max() == 255
        dash, marker = distances(scene, of, of.dash)
        far = (dash > of.thickness / 2 + 2) & (marker > of.marker_radius + 1.5)
        assert far.any() and not (image[far] > 25).any()
        assert image[marker <= of.marker_radius - 1].min() > 80
        for path in scene.targets + scene.distractors:
            for dash in path:
                middle = dash.y + of.dash / 2 * math.sin(dash.angle), dash.x + of.dash / 2 * math.cos(dash.angle)
                row, column = (min(max(round(place), 1), of.size - 2) for place in middle)
                assert image[row - 1 : row + 2, column - 1 : column + 2].max() > 50


def test_examples_are_scenes_as_rows_of_pixels():
    of = Pathfinder()
    drawn = example(of, 0, 'valid', 5)
    scene = of.scene(stream(5, split=1))
    assert drawn['x'].tolist() == of.render(scene).reshape(-1).tolist() and drawn['label'] == scene.label
    assert digest_of(drawn) == digest_of(Drawn(of).rows('valid')[5])
    assert of.kind.length == len(drawn['x']) == 1024 and PATH_X.kind.length == 16384


def test_the_images_of_seed_0_stay_what_they_are():
    digests = {of.size: digest_of(example(of, 0, 'train', 0)).hex()[:16] for of in (Pathfinder(), PATH_X)}
    assert digests == {32: '6f0e6c5bba713df7', 128: '89d1496cfb2a5892'}


@pytest.fixture(scope='module')
def scenes():
    return [Pathfinder().scene(stream(index)) for index in range(300)]


@pytest.fixture(scope='module')
def images(scenes):
    return [{'x': Pathfinder().render(scene).reshape(-1), 'label': scene.label} for scene in scenes]


# Of the released images (docs/pathfinder.md), and half a unit of the last digit to which that is known.
RELEASED = {'short paths': (1.2, 0.05), 'lit': (0.35, 0.015), 'level of markers': (238, 2)}


@pytest.mark.parametrize('figure', RELEASED)
def test_images_are_those_of_the_released_generator(scenes, images, figure):
    pixels = np.array([image['x'] for image in images], float)
    rows, columns = np.array([scene.markers for scene in scenes]).transpose(2, 0, 1)
    found = {
        'short paths': np.array([len(scene.distractors) for scene in scenes]),
        'lit': (pixels > 0).mean(1),
        'level of markers': np.take_along_axis(pixels, 32 * rows + columns, axis=1).mean(1),
    }[figure]
    value, half = RELEASED[figure]
    assert abs(found.mean() - value) < half + 4 * found.std() / math.sqrt(len(found))


def test_pixels_are_rounded_up_after_the_sum():
    """As in the released generator, in which a path to the left goes down a row near the top, and nowhere else."""
    ways = {'left': _towards(math.pi, 4), 'down': _towards(math.pi / 2, 4)}
    assert [_added((y, 20), ways['left']) for y in (7, 8)] == [(8, 16), (8, 16)]
    assert [_added((9, x), ways['down']) for x in (3, 4)] == [(13, 4), (13, 4)]
    # At -120 degrees the drawing of a first dash ends a pixel short of where it would, and covers no corner.
    starts = _shapes(Pathfinder(), 1).starts
    assert sum(len(start.centres) > 0 for start in starts) == 30 and not len(starts[180 - 120].centres)


def test_classes_are_balanced_and_images_differ(images):
    assert abs(np.mean([image['label'] for image in images]) - 0.5) < 3 * 0.5 / np.sqrt(len(images))
    test = Drawn(Pathfinder()).rows('test')
    seen = {image['x'].tobytes() for image in images} | {test[index]['x'].tobytes() for index in range(20)}
    assert len(seen) == len(images) + 20


def ink(images):
    pixels = np.array([image['x'] for image in images], float)
    counts = [pixels.sum(1), *((pixels > least).sum(1) for least in (0, 50, 100, 150, 200))]
    return np.stack(counts, 1)


@pytest.mark.slow
def test_the_amount_of_ink_tells_nothing(images):
    labels = np.array([int(image['label']) for image in images])
    accuracy, chance, spread = linear_probe(ink(images), labels)
    assert accuracy < chance + 3 * spread


def test_the_amount_of_ink_would_tell_if_it_were_another(images):
    labels = np.array([int(image['label']) for image in images])
    more = [
        image | {'x': np.r_[image['x'], np.full(40 * image['label'], 120)][40 * image['label'] :]} for image in images
    ]
    accuracy, chance, spread = linear_probe(ink(more), labels)
    assert accuracy > chance + 5 * spread


SPEED = """
import time
from attnlab.data.long_range.drawn import example
from attnlab.data.long_range.listops import ListOps
from attnlab.data.long_range.pathfinder import Pathfinder
for of in (ListOps(), Pathfinder()):
    example(of, 0, 'train', 0)
    began = time.process_time()
    for index in range(400):
        example(of, 0, 'train', index)
    print((time.process_time() - began) / 400)
"""


@pytest.mark.slow
def test_the_speed_on_one_core():
    # In a process of its own, in which annotations are not checked.
    done = subprocess.run([sys.executable, '-c', SPEED], cwd=ROOT, capture_output=True, text=True, check=True)
    listops, pathfinder = map(float, done.stdout.split())
    assert listops < 300 / 96_000 and pathfinder < 12e-3


@pytest.mark.parametrize(
    'wrong', [{'seed_distance': 8}, {'contour': 1}, {'margins': ()}, {'margins': (0,)}, {'dash': 0}]
)
def test_what_cannot_be_drawn_is_refused(wrong):
    with pytest.raises(UserError, match='Pathfinder'):
        Pathfinder(**wrong)


def test_settings_without_room_end(monkeypatch):
    monkeypatch.setattr(pathfinder, 'TRIALS', 20)
    with pytest.raises(UserError, match=r'20 trials found no room for both paths of .*contour=60'):
        Pathfinder(contour=60).draw(np.random.SeedSequence(0))
