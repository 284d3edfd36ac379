"""Drawn images against what their labels say, found again from the pixels."""

import functools

import numpy as np
import pytest

from attnlab.data.long_range.drawn import Drawn
from attnlab.data.vision.shapes import Connected, Count, SameDifferent, Segments
from attnlab.errors import UserError
from tests.data.long_range.probes import linear_probe

EXAMPLES = 200


def examples(of, count=EXAMPLES):
    rows = Drawn(of).rows('train')
    return [rows[index] for index in range(count)]


def parts(picture):
    """The connected parts of the pixels that are not zero, by their four neighbours: one number a part."""
    found = np.zeros(picture.shape, int)
    for start in zip(*np.nonzero(picture), strict=True):
        todo = [] if found[start] else [start]
        number = found.max() + 1
        while todo:
            y, x = todo.pop()
            if min(y, x) >= 0 and max(y, x) < len(picture) and picture[y, x] and not found[y, x]:
                found[y, x] = number
                todo += [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
    return found


@pytest.mark.parametrize('of', [Count(), SameDifferent(), Connected(), Segments()], ids=lambda of: type(of).__name__)
def test_an_example_follows_from_its_index(of):
    first, again, other = Drawn(of).rows('train')[5], Drawn(of).rows('train')[5], Drawn(of).rows('test')[5]
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first['x'], other['x'])
    found = np.stack([row['x'] for row in examples(of)]).astype(float)
    assert found.shape == (EXAMPLES, of.kind.length)
    assert abs(found.mean() - of.kind.mean) < 0.1 * of.kind.mean
    assert abs(found.std() - of.kind.deviation) < 0.05 * of.kind.deviation


def test_shapes_are_counted():
    for row in examples(Count()):
        assert parts(row['x'].reshape(32, 32)).max() == row['label'] + 1
    counts = np.bincount([row['label'] for row in examples(Count())])
    assert len(counts) == 5 and counts.min() > 25


def test_patterns_are_the_same_where_the_label_says_so():
    for row in examples(SameDifferent()):
        picture = row['x'].reshape(32, 32)
        numbers = parts(picture)
        assert numbers.max() == 2
        first, second = (picture[numbers == number] for number in (1, 2))
        assert len(first) == len(second) == 64
        assert (first != second).sum() == (0 if row['label'] else 16)


@pytest.mark.parametrize('step', [1, 4])
def test_corners_of_patterns_lie_on_all_multiples_of_the_step_and_no_others(step):
    corners = []
    for row in examples(SameDifferent(cells=2, step=step)):
        picture = row['x'].reshape(32, 32)
        found = np.argwhere(parts(picture) == 1), np.argwhere(parts(picture) == 2)
        here = [each.min(axis=0) for each in found]
        patterns = [picture[y : y + 4, x : x + 4] for y, x in here]
        assert all(pattern.all() for pattern in patterns) and np.count_nonzero(picture) == 32
        assert (patterns[0] != patterns[1]).sum() == (0 if row['label'] else 8)
        assert np.abs(here[0] - here[1]).max() > 4
        corners += here
    assert np.array_equal(np.unique(corners), np.arange(0, 29, step))


@pytest.mark.parametrize('cells', range(2, 8))
def test_bright_cells_are_even_in_number_whether_patterns_are_the_same_or_not(cells):
    rows = examples(SameDifferent(size=56, cells=cells), 60)
    assert {int(row['label']) for row in rows if (row['x'] == 255).sum() // 4 % 2 == 0} == {0, 1}
    assert not any((row['x'] == 255).sum() // 4 % 2 for row in rows)


def test_lit_pixels_and_grey_levels_tell_as_many_counts_as_is_said_of_them():
    rows = examples(Count(), 1000)
    labels = np.array([row['label'] for row in rows])
    lit, grey = (np.array([found(row['x']) for row in rows]) for found in (np.count_nonzero, np.sum))
    for told, share in ((lit, 0.57), (grey, 0.52)):
        # The most that are right of the first rows in order, with thresholds between labels wherever they do best.
        hits = np.cumsum(labels[np.argsort(told)] == np.arange(5)[:, None], axis=1)
        right = functools.reduce(lambda best, of: np.maximum.accumulate(best - of) + of, hits)
        assert abs(right[-1] / len(rows) - share) < 0.02
    assert np.array_equal(lit % 4, (labels + 1) % 4)


@pytest.mark.parametrize(('size', 'cells'), [(16, 2), (32, 4), (33, 4)])
def test_corners_find_places_at_every_step_that_is_taken(size, cells):
    for step in range(1, size - 2 * cells + 1):
        row = Drawn(SameDifferent(size, cells, step)).rows('train')[0]
        assert np.count_nonzero(row['x']) == 2 * (2 * cells) ** 2


def test_marks_are_on_one_path_where_the_label_says_so():
    for row in examples(Connected()):
        picture = row['x'].reshape(32, 32)
        numbers = parts(picture)
        marks = numbers[picture == 255]
        assert numbers.max() == 2 and len(marks) == 2
        assert (marks[0] == marks[1]) == bool(row['label'])
        sizes = {int((numbers == number).sum()) for number in marks}
        assert 2 * int(row['steps']) + 1 in sizes and 6 <= row['steps'] <= 24


def test_the_distance_of_marks_tells_as_many_labels_as_is_said_of_it():
    rows = examples(Connected(), 600)
    marks = [np.argwhere(row['x'].reshape(32, 32) == 255) for row in rows]
    near = np.array([np.abs(first - second).sum() <= 16 for first, second in marks])
    assert abs(np.mean(near == [row['label'] for row in rows]) - 0.73) < 0.03


def test_classes_of_pixels_are_those_of_shapes():
    for row in examples(Segments(noise=0.0), 50):
        picture, classes = (row[name].reshape(32, 32) for name in ('x', 'targets'))
        assert np.array_equal(picture > 0, classes > 0)
        numbers = parts(picture)
        for number in range(1, numbers.max() + 1):
            kinds, inside = np.unique(classes[numbers == number]), np.argwhere(numbers == number)
            height, width = np.ptp(inside, axis=0) + 1
            assert len(kinds) == 1 and height == width
            # A square is full; a disc is the same upside down, a triangle is not.
            box = numbers[inside[:, 0].min() :, inside[:, 1].min() :][:height, :width] == number
            assert box.all() == (kinds[0] == 2)
            assert np.array_equal(box, box[::-1]) == (kinds[0] != 3)


@pytest.mark.parametrize('of', [SameDifferent(), Connected()], ids=lambda of: type(of).__name__)
def test_a_linear_map_of_pixels_is_no_better_than_the_commonest_label(of):
    rows = examples(of, 600)
    features, labels = np.stack([row['x'] for row in rows]).astype(float), np.array([int(row['label']) for row in rows])
    accuracy, chance, spread = linear_probe(features, labels)
    assert accuracy < chance + 3 * spread


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: Count(size=8), 'size of Count is 8; it must be at least 16'),
        (lambda: Count(most=9), 'most of Count is 9; images of 32 pixels hold from 2 to 5 shapes'),
        (lambda: SameDifferent(cells=5), 'cells of SameDifferent is 5; it must be from 2 to 4'),
        (
            lambda: SameDifferent(step=25),
            'step of SameDifferent is 25; corners of 4 x 4 cells in 32 pixels take from 1 to 24$',
        ),
        (lambda: SameDifferent(step=0), 'step of SameDifferent is 0; .* take from 1 to 24$'),
        (lambda: Connected(size=31), 'size must be even'),
        (lambda: Segments(most=6), 'most of Segments is 6; it must be from 1 to 5'),
    ],
)
def test_wrong_sizes_are_named(make, message):
    with pytest.raises(UserError, match=message):
        make()
